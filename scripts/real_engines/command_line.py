"""The shared command line for starting and stopping servers: `start ...` and `stop PID ...`, JSON, exit codes."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from real_engines.server_process import Server, ServerError, free_port, is_taken, start, stop


class CommandLine:
    """The command line of one kind of server.

    Args:
        program: The command that a user types.
        name: What the command line of its first process contains, which servers rewrite while they run; names its log.
        start_timeout_s: Seconds for it to get ready, unless a flag says otherwise.
        grace_s: Seconds for it to end by itself, unless a flag says otherwise.
    """

    def __init__(self, program: str, name: str, start_timeout_s: float, grace_s: float) -> None:
        self._name = name
        self._parser = argparse.ArgumentParser(prog=program)
        commands = self._parser.add_subparsers(dest="command", required=True)
        commands.add_parser("install", help="Make its environment, once; start does it too.")
        self.start_flags = commands.add_parser("start", help="Start it, wait until it is ready, print a line of JSON.")
        self.start_flags.add_argument("--port", type=int, default=0, help="Port of 127.0.0.1; default: a free one.")
        self.start_flags.add_argument("--log", type=Path, help="File for what it prints; default: one in $TMPDIR.")
        self.start_flags.add_argument("--timeout-s", type=float, default=start_timeout_s, help="Seconds to get ready.")
        self.start_flags.add_argument("--owner", type=int, help="A process id; the server ends when that process does.")
        self.start_flags.add_argument("flags", nargs="*", help="After --: flags of its own.")
        stopping = commands.add_parser("stop", help="End servers that start has started, by their ids.")
        stopping.add_argument("pids", type=int, nargs="+", metavar="PID")
        stopping.add_argument("--grace-s", type=float, default=grace_s, help="Seconds to end by itself.")

    def run(self, arguments: Sequence[str], server_of: Callable[[argparse.Namespace], Server]) -> int:
        """Run the command and return the exit code; `server_of` makes a server from the arguments of `start`."""
        parsed = self._parser.parse_args(arguments)
        try:
            if parsed.command == "start":
                self._start(parsed, server_of)
            elif parsed.command == "stop":
                for pid in parsed.pids:
                    stop(pid, self._name, parsed.grace_s)
        except ServerError as e:
            print(f"error: {self._parser.prog} {parsed.command}: {e}", file=sys.stderr)
            return 1
        return 0

    def _start(self, parsed: argparse.Namespace, server_of: Callable[[argparse.Namespace], Server]) -> None:
        if parsed.port and is_taken(parsed.port):  # its owner would pass for the new server
            raise ServerError(f"port {parsed.port} of 127.0.0.1 is taken; choose another one, or leave --port out")
        parsed.port = parsed.port or free_port()
        parsed.log = parsed.log or Path(tempfile.gettempdir(), f"{self._name}-{parsed.port}.log")
        pid = start(server_of(parsed), parsed.timeout_s, parsed.owner)
        print(json.dumps({"base_url": f"http://127.0.0.1:{parsed.port}", "pid": pid, "log": str(parsed.log)}))
