"""CPU time of the engine behind a URL, where it runs on this machine: the process that listens there and those below.

Knows Linux's /proc; where there is none, or the process is not ours to look into, the answer is None.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import httpx

_LOCAL_HOSTS: Final = ("127.0.0.1", "localhost")
_LOCAL_ADDRESS, _STATE, _INODE = 1, 3, 9  # columns of /proc/net/tcp
_LISTENING: Final = "0A"
_PPID: Final = 1  # field of /proc/PID/stat after the name


def engine_processes(url: httpx.URL) -> list[int]:
    """The engine's processes: the oldest that listens at `url`, and its descendants; none where they can't be seen."""
    root = _listener(url.port or 80) if url.host in _LOCAL_HOSTS else None
    return [] if root is None else _tree(root)


def cpu_s(pids: list[int]) -> float | None:
    """Seconds that the threads which these processes have now spent on CPUs (user and system); None without processes.

    To the nanosecond, unlike a process's own times, which come in hundredths of a second.
    """
    threads = [thread for pid in pids for thread in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    try:
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9 if threads else None
    except OSError:  # a thread has just ended
        return None


def _listener(port: int) -> int | None:
    try:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    except OSError:
        return None
    listening = [row for row in rows if row[_STATE] == _LISTENING and row[_LOCAL_ADDRESS].endswith(f":{port:04X}")]
    sockets = {f"socket:[{row[_INODE]}]" for row in listening}
    return min((pid for pid in _pids() if sockets & _sockets(pid)), default=None)


def _pids() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def _sockets(pid: int) -> set[str]:
    found = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            found.add(str(link.readlink()))
    except OSError:  # it has just ended, or is another user's
        return found
    return found


def _tree(root: int) -> list[int]:
    parents = {}
    for pid in _pids():
        try:
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_PPID])
        except OSError:  # it has just ended
            continue
    found, pending = [], [root]
    while pending:
        found.append(pending.pop())
        pending += [pid for pid, parent in parents.items() if parent == found[-1]]
    return found
