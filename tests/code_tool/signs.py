"""Signs that an attack worked, as the host sees them: the resources that processes hold and use, and their rights.

Each takes processes that bear the attack's name.
"""

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from host_view import Process

Shows = Callable[[Sequence[Process]], bool]


def more_than(count: int) -> Shows:
    return lambda processes: len(processes) > count


def threads_above(count: int) -> Shows:
    return lambda processes: any(process.number("Threads") > count for process in processes)


def memory_above(mebibytes: int) -> Shows:
    """The processes together really use this much memory."""
    return lambda processes: sum(process.number("VmRSS") for process in processes) > mebibytes * 1024


def holds(word: str) -> Shows:
    return lambda processes: any(word in link for process in processes for link in process.handles().values())


def holds_socket(processes: Sequence[Process]) -> bool:
    """A socket of any family but AF_UNIX is open."""
    local = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()}
    return any(
        link.startswith("socket:[") and link[8:-1] not in local
        for process in processes
        for link in process.handles().values()
    )


def held_above(mebibytes: int, by_who_hides: int = 0) -> Shows:
    """Open files hold this many mebibytes; a process that hides its handles counts for some."""

    def shows(processes: Sequence[Process]) -> bool:
        files = {(f.st_dev, f.st_ino): f for process in processes for f in process.files() if stat.S_ISREG(f.st_mode)}
        hidden = by_who_hides * sum(process.hides_handles() for process in processes) if by_who_hides else 0
        return sum(facts.st_blocks * 512 for facts in files.values()) > (mebibytes - hidden) * 2**20

    return shows


def locks_above(count: int) -> Shows:
    def shows(processes: Sequence[Process]) -> bool:
        holders = [line.split()[4:5] for line in Path("/proc/locks").read_text().splitlines()]
        return sum(holders.count([str(process.pid)]) for process in processes) > count

    return shows


def pending_signals_above(count: int) -> Shows:
    """So many signals wait for a user's processes."""
    return lambda processes: any(int(p.status("SigQ").partition("/")[0] or 0) > count for p in processes)


def holds_device(processes: Sequence[Process]) -> bool:
    """A device is open that is neither null, zero, full nor random."""
    harmless = {os.makedev(1, minor) for minor in (3, 5, 7, 8, 9)}
    held = [facts for process in processes for facts in process.files()]
    devices = [facts for facts in held if stat.S_ISCHR(facts.st_mode) or stat.S_ISBLK(facts.st_mode)]
    return any(facts.st_rdev not in harmless for facts in devices)


def unlimited(name: str) -> Shows:
    return lambda processes: any(
        line.startswith(name) and "unlimited" in line
        for process in processes
        for line in process.text("limits").splitlines()
    )


def changes(link: str) -> Shows:
    """A link of /proc/PID is not as it was when the process was first seen."""
    first: dict[int, str] = {}

    def shows(processes: Sequence[Process]) -> bool:
        now = {process.pid: process.link(link) for process in processes}
        return any(goal not in ("", first.setdefault(pid, goal)) for pid, goal in now.items())

    return shows
