"""What the host sees of sandboxed processes while they run: /proc, from outside.

Knows nothing of executors. A process is the sandbox's when it bears the attack's name or descends from this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import stat
import sys
import termios
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attack_targets import Stage, Target


@dataclass(frozen=True)
class Process:
    """One process, read anew at each question; what is gone or hidden reads as empty."""

    pid: int

    def text(self, file: str) -> str:
        """A file of /proc/PID."""
        try:
            return Path("/proc", str(self.pid), file).read_bytes().decode("utf-8", "replace")
        except OSError:
            return ""

    def status(self, field: str) -> str:
        """One line's value of /proc/PID/status."""
        return next((line.partition(":")[2].strip() for line in self.text("status").splitlines()
                     if line.startswith(f"{field}:")), "")  # fmt: skip

    def number(self, field: str) -> int:
        """The first number of a line of /proc/PID/status, 0 where there is none."""
        words = self.status(field).split()
        return int(words[0]) if words else 0

    def link(self, file: str) -> str:
        """Where a link of /proc/PID leads."""
        try:
            return os.readlink(f"/proc/{self.pid}/{file}")
        except OSError:
            return ""

    def handles(self) -> dict[int, str]:
        """Open descriptors, and what they are."""
        try:
            return {int(name): self.link(f"fd/{name}") for name in os.listdir(f"/proc/{self.pid}/fd")}
        except OSError:
            return {}

    def handle_stat(self, handle: int) -> os.stat_result | None:
        """fstat of one of its descriptors."""
        try:
            return os.stat(f"/proc/{self.pid}/fd/{handle}")
        except OSError:
            return None

    def is_hidden(self) -> bool:
        """Whether this process may not look into it."""
        try:
            os.readlink(f"/proc/{self.pid}/cwd")
        except PermissionError:
            return True
        except OSError:
            return False
        return False

    def is_alive(self) -> bool:
        """Whether it is there and no zombie."""
        return self.status("State")[:1] not in ("", "Z", "X")


def pids() -> set[int]:
    """All processes of the machine."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def descendants(of: int) -> set[int]:
    """Children, their children, and so on."""
    parents = {pid: Process(pid).number("PPid") for pid in pids()}
    found, last = {of}, 0
    while len(found) > last:
        last = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {of}


class Sight(Target):
    """What sandboxed processes do is seen while they do it.

    Args:
        stage: Where.
        shows: Whether these processes show that the attack worked: those that bear the name of the attack.
        after: Look only when the run is over: for what must not outlive it.
        facts: What the attacker knows.

    Attributes:
        is_blind: This process may not look into them (CAP_SYS_PTRACE), so that nothing was to be seen.
    """

    def __init__(
        self, stage: Stage, shows: Callable[[Sequence[Process]], bool], *, after: bool = False, **facts: Any
    ) -> None:
        super().__init__()
        del stage
        self.facts |= facts
        self.is_blind = False
        self._shows = shows
        self._only_after = after
        self._over = False
        self._seen = False

    def _is_ours(self, process: Process) -> bool:
        return process.text("comm").strip() == self.name

    def _ours(self) -> list[Process]:
        return [process for process in map(Process, sorted(pids())) if self._is_ours(process) and process.is_alive()]

    def seen(self) -> bool:
        if not self._seen and (self._over or not self._only_after):
            processes = self._ours()
            self.is_blind = self.is_blind or any(process.is_hidden() for process in processes)
            self._seen = self._shows(processes)
        return self._seen

    def finish(self) -> None:
        self._over = True

    def close(self) -> None:
        for process in self._ours():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)


class DiskSpace(Target):
    """The disk of the scratch directories must not get so much fuller. Other programs use it too: want a lot.

    Args:
        stage: Where.
        mebibytes: How much less may not be free than before.
    """

    def __init__(self, stage: Stage, mebibytes: int) -> None:
        super().__init__()
        self._root = stage.scratch_root
        self._least = self._free_bytes() - mebibytes * 2**20

    def _free_bytes(self) -> int:
        facts = os.statvfs(self._root)
        return facts.f_bfree * facts.f_frsize

    def seen(self) -> bool:
        return self._free_bytes() < self._least


class Usage(Sight):
    """What lies in the scratch directory is more than a run may have.

    Args:
        stage: Where.
        mebibytes: More than this is seen.
        files: More files, folders and links than this are seen.
    """

    def __init__(self, stage: Stage, mebibytes: int = 2**40, files: int = 2**40) -> None:
        def shows(processes: Sequence[Process]) -> bool:
            return any(_is_above(f"/proc/{process.pid}/cwd/", mebibytes * 2**20, files) for process in processes)

        super().__init__(stage, shows)


def _is_above(folder: str, most_bytes: int, most_files: int) -> bool:
    found_bytes = found_files = 0
    for place, folders, files in os.walk(folder):
        found_files += len(files) + len(folders)
        if found_files > most_files:
            return True
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                found_bytes += os.lstat(os.path.join(place, file)).st_blocks * 512
    return found_bytes > most_bytes


class Program(Sight):
    """Another program was started, with `nap` among its arguments."""

    def __init__(self, stage: Stage) -> None:
        self._nap = f"9.{secrets.randbelow(10**9):09}"
        super().__init__(stage, bool, nap=self._nap)

    def _is_ours(self, process: Process) -> bool:
        return self._nap in process.text("cmdline")


def more_than(count: int) -> Callable[[Sequence[Process]], bool]:
    """So many processes live at once."""
    return lambda processes: len(processes) > count


def threads_above(count: int) -> Callable[[Sequence[Process]], bool]:
    """One process has so many threads."""
    return lambda processes: any(process.number("Threads") > count for process in processes)


def memory_above(mebibytes: int) -> Callable[[Sequence[Process]], bool]:
    """So much memory is really in use, by all together."""
    return lambda processes: sum(process.number("VmRSS") for process in processes) > mebibytes * 1024


def holds(*words: str) -> Callable[[Sequence[Process]], bool]:
    """A descriptor is open whose description contains one of these."""

    def shows(processes: Sequence[Process]) -> bool:
        return any(word in link for process in processes for link in process.handles().values() for word in words)

    return shows


def holds_socket(processes: Sequence[Process]) -> bool:
    """A socket of any family but AF_UNIX is open."""
    with open("/proc/net/unix") as file:
        local = {line.split()[6] for line in file}
    return any(
        link.startswith("socket:[") and link[8:-1] not in local
        for process in processes
        for link in process.handles().values()
    )


def holds_handle(processes: Sequence[Process]) -> bool:
    """A descriptor beyond the three standard ones is open: harmless only where it is a pipe's end."""
    return any(
        handle > 2 and not link.startswith("pipe:") for process in processes for handle, link in process.handles().items()
    )


def held_above(mebibytes: int) -> Callable[[Sequence[Process]], bool]:
    """So much lies in files without a name that are still open."""

    def shows(processes: Sequence[Process]) -> bool:
        files = {}
        for process in processes:
            for handle, link in process.handles().items():
                facts = process.handle_stat(handle) if link.endswith("(deleted)") else None
                if facts is not None:
                    files[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
        return sum(files.values()) > mebibytes * 2**20

    return shows


def pipes_above(mebibytes: int) -> Callable[[Sequence[Process]], bool]:
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
    for process in processes:
        for handle in process.handles():
            facts = process.handle_stat(handle)
            if facts and (stat.S_ISCHR(facts.st_mode) or stat.S_ISBLK(facts.st_mode)) and facts.st_rdev not in harmless:
                return True
    return False


def unlimited(name: str) -> Callable[[Sequence[Process]], bool]:
    """A line of /proc/PID/limits says so."""
    return lambda processes: any(
        line.startswith(name) and "unlimited" in line for process in processes for line in process.text("limits").splitlines()
    )


def differs(link: str) -> Callable[[Sequence[Process]], bool]:
    """A link of /proc/PID is not as it is for this process."""
    own = os.readlink(f"/proc/self/{link}")
    return lambda processes: any(process.link(link) not in ("", own) for process in processes)


def writes(path: str) -> Callable[[Sequence[Process]], bool]:
    """A file is open for writing."""

    def shows(processes: Sequence[Process]) -> bool:
        for process in processes:
            for handle, link in process.handles().items():
                flags = process.text(f"fdinfo/{handle}").partition("flags:")[2].split()
                if link == path and flags and int(flags[0], 8) & os.O_ACCMODE:
                    return True
        return False

    return shows
