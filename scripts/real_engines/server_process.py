"""Start servers in process groups of their own, wait until they are ready, and stop them by process id.

Depends only on processes and HTTP status codes, not on the kind of server. Uses only the standard library, because it
runs in the servers' own environments.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.1
_PROBE_TIMEOUT_S: Final = 5.0
_KILL_WAIT_S: Final = 10.0
_OWNER_POLL_S: Final = 1.0
_PORTS: Final = range(20_000, 30_000)
_LOG_TAIL_BYTES: Final = 4000


class ServerError(Exception):
    """A server can't be started, or a process is not stopped because it is not the server; the message says why."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server to start.

    Attributes:
        command: Program and arguments; must contain the name that `stop` checks.
        environment: Environment variables in addition to this process's.
        ready_url: URL that answers 200 once requests are accepted.
        log: File for the server's output; it is overwritten.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    ready_url: str
    log: Path


def start(server: Server, timeout_s: float, owner: int | None = None) -> int:
    """Start a server and wait until it is ready.

    Args:
        server: The server to start.
        timeout_s: How long the server may take to be ready, in seconds.
        owner: Id of a process: when it ends, the server is ended too. None: the server runs until it is stopped.

    Returns:
        The id of the server's first process, which is also the id of its process group.

    Raises:
        ServerError: The server ended or was not ready in time; the message has the end of its log. Nothing is left
            running.
    """
    server.log.parent.mkdir(parents=True, exist_ok=True)
    with server.log.open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - the caller's command
            list(server.command),
            env={**os.environ, **server.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        if owner is not None:
            _start_watcher(process.pid, owner)
        _wait_until_ready(process, server, timeout_s)
    except BaseException:  # Ctrl-C too
        end_group(process.pid, 0.0)
        raise
    return process.pid


def stop(pid: int, name: str, grace_s: float) -> None:
    """End a server and all processes of its group: first with SIGTERM, after the grace period with SIGKILL.

    Args:
        pid: Process id that `start` returned.
        name: Text that the process's command line must contain; servers may rewrite their command lines.
        grace_s: How long the group's processes may take to end before they are killed, in seconds.

    Raises:
        ServerError: There is no such process, or it is another program.
    """
    command = _command_of(pid)
    if name not in command or os.getpgid(pid) != pid:
        found = f"is {command!r}" if command else "does not exist"
        raise ServerError(f"process {pid} {found}; expected a process id that start printed")
    end_group(pid, grace_s)


def end_group(group: int, grace_s: float) -> None:
    """End a process group: send SIGTERM, wait up to `grace_s` seconds, send SIGKILL, and wait up to 10 s."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_WAIT_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
        give_up_at = time.monotonic() + wait_s
        while _is_running(group):
            if time.monotonic() >= give_up_at:
                break
            time.sleep(_POLL_S)


def free_port() -> int:
    """Return a free port of 127.0.0.1, below the ephemeral ports, which outgoing connections could take meanwhile.

    Raises:
        ServerError: None of the tried ports is free.
    """
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError("found no free port among 100 ports of 127.0.0.1; name one with --port")


def is_taken(port: int) -> bool:
    """Return whether a process listens on a port of 127.0.0.1."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_until_ready(process: subprocess.Popen[bytes], server: Server, timeout_s: float) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not _is_ready(server.ready_url):
        if process.poll() is not None:
            raise ServerError(
                f"the server ended with exit code {process.returncode} before it was ready.{_log_tail(server.log)}"
            )
        if time.monotonic() >= give_up_at:
            raise ServerError(f"the server was not ready within {timeout_s:g} s.{_log_tail(server.log)}")
        time.sleep(_POLL_S)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_TIMEOUT_S) as answer:  # noqa: S310 - http, made by the caller
            return bool(answer.status == 200)
    except OSError:  # not listening yet, or an HTTP error
        return False


def _start_watcher(group: int, owner: int) -> None:
    subprocess.Popen(  # noqa: S603 - this file
        [sys.executable, __file__, str(group), str(owner)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end_with_owner(group: int, owner: int) -> None:
    while _is_running(group):
        if not _command_of(owner):
            end_group(group, 0.0)
            return
        time.sleep(_OWNER_POLL_S)


def _is_running(group: int) -> bool:
    """Return whether a group has a process that is not a zombie."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                return True
    return False


def _command_of(pid: int) -> str:
    """Return a process's command line; "" if there is no such process, or it is a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _log_tail(log: Path) -> str:
    return f" The end of {log}:\n" + log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()


if __name__ == "__main__":
    _end_with_owner(int(sys.argv[1]), int(sys.argv[2]))
