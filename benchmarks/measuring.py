"""Clocks and counters that the benchmarks share: event-loop lag, percentiles, processor cores, /proc.

Uses only the standard library, because the sandbox benchmark's workers run in other environments too. If /proc is
missing or hides another user's processes, the functions that read it return None, or only what they can see.
"""

import asyncio
import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Final, Self

_TICK_S: Final = 0.005
_PPID, _CPU_TIMES = 1, slice(11, 15)  # fields of /proc/PID/stat after the name: parent; utime, stime, cutime, cstime
_LOCAL_ADDRESS, _STATE, _INODE = 1, 3, 9  # columns of /proc/net/tcp
_LISTENING: Final = "0A"


class LoopLag:
    """Context manager that records in `lags_ms`, for each timer, how late the running event loop fires it.

    A timer is due every 5 ms. All timers that came due while the loop was blocked are recorded, each with its own wait,
    so that a long block weighs more than a short one.
    """

    def __init__(self) -> None:
        self.lags_ms: list[float] = []

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._wait_until(self._loop.time() + _TICK_S)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._loop.time() >= self._due_s:
            self._record()
        self._timer.cancel()

    def _wait_until(self, due_s: float) -> None:
        self._due_s = due_s
        self._timer = self._loop.call_at(due_s, self._record)

    def _record(self) -> None:
        late_s = max(0.0, self._loop.time() - self._due_s)
        due = 1 + int(late_s / _TICK_S)
        self.lags_ms += [(late_s - number * _TICK_S) * 1e3 for number in range(due)]
        self._timer.cancel()
        self._wait_until(self._due_s + due * _TICK_S)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value v such that at least `share` of the values are <= v; None if there are no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and third quartile; there must be at least one value."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4)
    return low, high


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def pin_to(core: int | None) -> None:
    """Pin this process and its future children to a core; do nothing if `core` is None."""
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


def client_and_engine_core() -> tuple[int | None, int | None]:
    """Return a core for the measured client and another for the engine; None for both if there are fewer than two."""
    cores = usable_cores()
    return (cores[0], cores[-1]) if len(cores) > 1 else (None, None)


def process_tree(root: int) -> list[int]:
    """Return a process and its descendants."""
    return _tree(root, _process_stats())


def tree_cpu_s(root: int) -> float | None:
    """Return the CPU seconds of a process, its descendants and all reaped children; None if there is no /proc."""
    stats = _process_stats()
    if not stats:
        return None
    ticks = sum(int(field) for pid in _tree(root, stats) for field in stats[pid][_CPU_TIMES])
    return ticks / os.sysconf("SC_CLK_TCK")


def threads_cpu_s(pids: Sequence[int]) -> float | None:
    """Return the CPU seconds (user and system) of these processes' live threads, to the nanosecond.

    None if there are no such threads, or if one ends while it is read.
    """
    threads = [thread for pid in pids for thread in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    try:
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9 if threads else None
    except OSError:  # a thread has just ended
        return None


def memory_mb(root: int) -> dict[int, tuple[float, float]]:
    """Return the USS (private memory) and the PSS (private memory and a share of shared pages) of each descendant.

    Both are in mebibytes, by process id. Descendants that this process may not read are left out.
    """
    found = {}
    for pid in process_tree(root)[1:]:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:  # the process has ended, or belongs to another user
            continue
        sizes = {name: int(value.split()[0]) / 1024 for name, _, value in (line.partition(":") for line in lines)}
        if sizes:
            found[pid] = (sizes["Private_Clean"] + sizes["Private_Dirty"], sizes["Pss"])
    return found


def oldest_children(root: int, depth: int) -> list[int]:
    """Return the oldest child of a process, the oldest child of that child, and so on: at most `depth` processes."""
    stats = _process_stats()
    pids: list[int] = []
    while len(pids) < depth:
        parent = pids[-1] if pids else root
        children = [pid for pid, stat in stats.items() if int(stat[_PPID]) == parent]
        if not children:
            break
        pids.append(min(children))
    return pids


def listening_process(port: int) -> int | None:
    """Return the lowest id of the visible processes that listen on an IPv4 port of this machine, or None."""
    try:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    except OSError:
        return None
    listening = [row for row in rows if row[_STATE] == _LISTENING and row[_LOCAL_ADDRESS].endswith(f":{port:04X}")]
    sockets = {f"socket:[{row[_INODE]}]" for row in listening}
    return min((pid for pid in _process_stats() if sockets & _open_files(pid)), default=None)


def _open_files(pid: int) -> set[str]:
    found = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            found.add(str(link.readlink()))
    except OSError:  # the process has just ended, or belongs to another user
        return found
    return found


def _process_stats() -> dict[int, list[str]]:
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(entry.parent.name)] = entry.read_text().rpartition(")")[2].split()
        except OSError:  # the process has just ended
            continue
    return found


def _tree(root: int, stats: dict[int, list[str]]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(int(stat[_PPID]), []).append(pid)
    found, pending = [], [root]
    while pending:
        found.append(pending.pop())
        pending += children.get(found[-1], [])
    return found
