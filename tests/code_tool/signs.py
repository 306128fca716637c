"""Signs for `ObservedProcesses`: functions that judge by the processes with an attack's name whether it worked."""

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from host_view import Process

Sign = Callable[[Sequence[Process]], bool]


def more_than(count: int) -> Sign:
    return lambda processes: len(processes) > count


def threads_above(count: int) -> Sign:
    return lambda processes: any(process.number("Threads") > count for process in processes)


def memory_above(mebibytes: int) -> Sign:
    """Return a sign: the processes together use more than this much resident memory."""
    return lambda processes: sum(process.number("VmRSS") for process in processes) > mebibytes * 1024


def holds(word: str) -> Sign:
    return lambda processes: any(word in link for process in processes for link in process.handles().values())


def holds_socket(processes: Sequence[Process]) -> bool:
    """Return whether a socket of a family other than AF_UNIX is open."""
    local = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()}
    return any(
        link.startswith("socket:[") and link[8:-1] not in local
        for process in processes
        for link in process.handles().values()
    )


def held_above(mebibytes: int, per_hiding_process: int = 0) -> Sign:
    """Return a sign: open files use more MiB than this; a process with hidden handles adds `per_hiding_process`."""

    def sign(processes: Sequence[Process]) -> bool:
        files = {(f.st_dev, f.st_ino): f for process in processes for f in process.files() if stat.S_ISREG(f.st_mode)}
        hidden = per_hiding_process * sum(process.hides_handles() for process in processes) if per_hiding_process else 0
        return sum(facts.st_blocks * 512 for facts in files.values()) > (mebibytes - hidden) * 2**20

    return sign


def locks_above(count: int) -> Sign:
    def sign(processes: Sequence[Process]) -> bool:
        holders = [line.split()[4:5] for line in Path("/proc/locks").read_text().splitlines()]
        return sum(holders.count([str(process.pid)]) for process in processes) > count

    return sign


def pending_signals_above(count: int) -> Sign:
    """Return a sign: more than `count` signals are pending for a user's processes."""
    return lambda processes: any(int(p.status("SigQ").partition("/")[0] or 0) > count for p in processes)


def holds_device(processes: Sequence[Process]) -> bool:
    """Return whether a device other than null, zero, full and random is open."""
    harmless = {os.makedev(1, minor) for minor in (3, 5, 7, 8, 9)}
    held = [facts for process in processes for facts in process.files()]
    devices = [facts for facts in held if stat.S_ISCHR(facts.st_mode) or stat.S_ISBLK(facts.st_mode)]
    return any(facts.st_rdev not in harmless for facts in devices)


def unlimited(name: str) -> Sign:
    return lambda processes: any(
        line.startswith(name) and "unlimited" in line
        for process in processes
        for line in process.text("limits").splitlines()
    )


def changes(link: str) -> Sign:
    """Return a sign: a link of /proc/PID differs from its first observed target."""
    first: dict[int, str] = {}

    def sign(processes: Sequence[Process]) -> bool:
        now = {process.pid: process.link(link) for process in processes}
        return any(goal not in ("", first.setdefault(pid, goal)) for pid, goal in now.items())

    return sign
