"""This process and those below it, as /proc shows them: time on CPUs, and memory.

Where there is no /proc, or other users' processes are hidden, the answer is None.
"""

from __future__ import annotations

import os
from pathlib import Path

_PPID, _CPU_TIMES = 1, slice(11, 15)  # fields of /proc/PID/stat after the name: parent; utime, stime, cutime, cstime
Memory = tuple[float, float]


def cpu_s(root: int) -> float | None:
    """Seconds that a process, its descendants and all that they have reaped spent on CPUs."""
    stats = _stats()
    if not stats:
        return None
    ticks = sum(int(field) for pid in [root, *_below(root, stats)] for field in stats[pid][_CPU_TIMES])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mb(root: int) -> dict[int, Memory]:
    """Descendant -> mebibytes that only it holds (USS), and with its share of what it shares (PSS), where readable."""
    found = {pid: _memory(pid) for pid in _below(root, _stats())}
    return {pid: memory for pid, memory in found.items() if memory is not None}


def chain(root: int, length: int) -> list[int]:
    """The oldest child of a process, the oldest child of that, and so on; shorter where there is none."""
    stats = _stats()
    pids: list[int] = []
    while len(pids) < length:
        parent = pids[-1] if pids else root
        children = [pid for pid, stat in stats.items() if int(stat[_PPID]) == parent]
        if not children:
            break
        pids.append(min(children))
    return pids


def _stats() -> dict[int, list[str]]:
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(entry.parent.name)] = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
    return found


def _below(root: int, stats: dict[int, list[str]]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(int(stat[_PPID]), []).append(pid)
    found, pending = [], [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def _memory(pid: int) -> Memory | None:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:  # it has ended, or is not ours to look into
        return None
    sizes = {name: int(value.split()[0]) / 1024 for name, _, value in (line.partition(":") for line in lines)}
    return (sizes["Private_Clean"] + sizes["Private_Dirty"], sizes["Pss"]) if sizes else None
