"""Signs that an attack worked, by which the host knows them: what processes hold, use, and are allowed.

Each takes processes that bear the attack's name.
"""

import fcntl
import os
import stat
import sys
import termios
from collections.abc import Callable, Sequence
from pathlib import Path

from host_view import Process

Shows = Callable[[Sequence[Process]], bool]


def more_than(count: int) -> Shows:
    """So many processes live at once."""
    return lambda processes: len(processes) > count


def threads_above(count: int) -> Shows:
    """One process has so many threads."""
    return lambda processes: any(process.number("Threads") > count for process in processes)


def memory_above(mebibytes: int) -> Shows:
    """So much memory is really in use, by all together."""
    return lambda processes: sum(process.number("VmRSS") for process in processes) > mebibytes * 1024


def holds(*words: str) -> Shows:
    """A descriptor is open whose description contains one of these."""
    return lambda processes: any(
        word in link for process in processes for link in process.handles().values() for word in words
    )


def holds_socket(processes: Sequence[Process]) -> bool:
    """A socket of any family but AF_UNIX is open."""
    local = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()}
    return any(
        link.startswith("socket:[") and link[8:-1] not in local
        for process in processes
        for link in process.handles().values()
    )


def held_above(mebibytes: int) -> Shows:
    """So much lies in files that are open, and in files without a name that are mapped."""

    def shows(processes: Sequence[Process]) -> bool:
        files = {(f.st_dev, f.st_ino): f for process in processes for f in process.files() if stat.S_ISREG(f.st_mode)}
        return sum(facts.st_blocks * 512 for facts in files.values()) > mebibytes * 2**20

    return shows


def locks_above(count: int) -> Shows:
    """So many locks on files are held."""

    def shows(processes: Sequence[Process]) -> bool:
        holders = [line.split()[4:5] for line in Path("/proc/locks").read_text().splitlines()]
        return sum(holders.count([str(process.pid)]) for process in processes) > count

    return shows


def pending_signals_above(count: int) -> Shows:
    """So many signals wait for a user's processes."""
    return lambda processes: any(int(p.status("SigQ").partition("/")[0] or 0) > count for p in processes)


def pipes_above(mebibytes: int) -> Shows:
    """So much lies in pipes, which no process has to its account."""

    def shows(processes: Sequence[Process]) -> bool:
        waiting = {}
        for process in processes:
            for handle, link in process.handles().items():
                if link.startswith("pipe:") and link not in waiting:
                    waiting[link] = _bytes_waiting(process.pid, handle)
        return sum(waiting.values()) > mebibytes * 2**20

    return shows


def _bytes_waiting(pid: int, handle: int) -> int:
    try:
        pipe = os.open(f"/proc/{pid}/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return 0
    try:
        return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
    finally:
        os.close(pipe)


def holds_device(processes: Sequence[Process]) -> bool:
    """A device is open that is neither null, zero, full nor random."""
    harmless = {os.makedev(1, minor) for minor in (3, 5, 7, 8, 9)}
    held = [process.handle_stat(handle) for process in processes for handle in process.handles()]
    devices = [facts for facts in held if facts and (stat.S_ISCHR(facts.st_mode) or stat.S_ISBLK(facts.st_mode))]
    return any(facts.st_rdev not in harmless for facts in devices)


def unlimited(name: str) -> Shows:
    """A line of /proc/PID/limits says so."""
    return lambda processes: any(
        line.startswith(name) and "unlimited" in line
        for process in processes
        for line in process.text("limits").splitlines()
    )


def differs(link: str) -> Shows:
    """A link of /proc/PID is not as it is for this process."""
    own = str(Path(f"/proc/self/{link}").readlink())
    return lambda processes: any(process.link(link) not in ("", own) for process in processes)


def changes(link: str) -> Shows:
    """A link of /proc/PID is not as it was when the process was first seen."""
    first: dict[int, str] = {}

    def shows(processes: Sequence[Process]) -> bool:
        now = {process.pid: process.link(link) for process in processes}
        return any(goal not in ("", first.setdefault(pid, goal)) for pid, goal in now.items())

    return shows


def writes(path: str) -> Shows:
    """A file is open for writing."""

    def shows(processes: Sequence[Process]) -> bool:
        for process in processes:
            for handle, link in process.handles().items():
                flags = process.text(f"fdinfo/{handle}").partition("flags:")[2].split()
                if link == path and flags and int(flags[0], 8) & os.O_ACCMODE:
                    return True
        return False

    return shows
