"""The command line that the servers share: `install`, `start`, which prints JSON, and `stop`."""

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
        program: The command, for help and errors.
        name: Text in the command line of the server's first process, even if the server rewrites that line. Also begins
            the name of the log.
        start_timeout_s: Default of --timeout-s.
        grace_s: Default of --grace-s.
    """

    def __init__(self, program: str, name: str, start_timeout_s: float, grace_s: float) -> None:
        self._name = name
        self._parser = argparse.ArgumentParser(prog=program)
        commands = self._parser.add_subparsers(dest="command", required=True)
        commands.add_parser("install", help="Create the server's environment; start does this too.")
        self.start_flags = commands.add_parser("start", help="Start a server, and print JSON when it is ready.")
        self.start_flags.add_argument("--port", type=int, default=0, help="Port of 127.0.0.1. Default: a free port.")
        self.start_flags.add_argument(
            "--log", type=Path, help="File for the server's output. Default: a file in $TMPDIR, else in /tmp."
        )
        self.start_flags.add_argument(
            "--timeout-s", type=float, default=start_timeout_s, help="Seconds that the server may take to start."
        )
        self.start_flags.add_argument("--owner", type=int, help="Process id; the server ends when that process ends.")
        self.start_flags.add_argument("flags", nargs="*", help="Flags of the server, after --.")
        stopping = commands.add_parser("stop", help="End servers by the process ids that start printed.")
        stopping.add_argument("pids", type=int, nargs="+", metavar="PID")
        stopping.add_argument(
            "--grace-s", type=float, default=grace_s, help="Seconds that a server may take to end before it is killed."
        )

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
        if parsed.port and is_taken(parsed.port):  # otherwise the server on this port would count as the new server
            raise ServerError(f"port {parsed.port} of 127.0.0.1 is in use; choose another --port, or leave --port out")
        parsed.port = parsed.port or free_port()
        parsed.log = parsed.log or Path(tempfile.gettempdir(), f"{self._name}-{parsed.port}.log")
        pid = start(server_of(parsed), parsed.timeout_s, parsed.owner)
        print(json.dumps({"base_url": f"http://127.0.0.1:{parsed.port}", "pid": pid, "log": str(parsed.log)}))
