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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from attack_targets import Stage, Target

_ENDING_S: Final = 0.5  # a process that was killed may be seen for a moment


@dataclass(frozen=True)
class Process:
    """One process, read anew at each question; what is gone or hidden reads as empty.

    Attributes:
        pid: Its number.
        hidden: Gets what this process was not allowed to look at.
    """

    pid: int
    hidden: list[str] = field(default_factory=list, compare=False)

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
        except OSError as e:
            self._note(e, file)
            return ""

    def _note(self, error: OSError, file: str) -> None:
        if isinstance(error, PermissionError):
            self.hidden.append(file)

    def handles(self) -> dict[int, str]:
        """Open descriptors, and what they are."""
        try:
            return {int(name): self.link(f"fd/{name}") for name in os.listdir(f"/proc/{self.pid}/fd")}
        except OSError as e:
            self._note(e, "fd")
            return {}

    def handle_stat(self, handle: int) -> os.stat_result | None:
        """fstat of one of its descriptors."""
        try:
            return os.stat(f"/proc/{self.pid}/fd/{handle}")
        except OSError:
            return None

    def files(self) -> Iterator[os.stat_result]:
        """What is behind its descriptors, and behind its mappings of files that have been deleted."""
        for handle in self.handles():
            with contextlib.suppress(OSError):
                yield os.stat(f"/proc/{self.pid}/fd/{handle}")
        for name in self._mappings():
            if self.link(f"map_files/{name}").endswith("(deleted)"):
                with contextlib.suppress(OSError):
                    yield os.stat(f"/proc/{self.pid}/map_files/{name}")

    def _mappings(self) -> list[str]:
        try:
            return os.listdir(f"/proc/{self.pid}/map_files")
        except OSError as e:
            self._note(e, "map_files")
            return []

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
    """

    def __init__(
        self, stage: Stage, shows: Callable[[Sequence[Process]], bool], *, after: bool = False, **facts: Any
    ) -> None:
        super().__init__()
        del stage
        self.facts |= facts
        self._hidden: list[str] = []
        self._shows = shows
        self._only_after = after
        self._over = False
        self._seen = False

    def _is_ours(self, process: Process) -> bool:
        return process.text("comm").strip() == self.name

    @property
    def is_blind(self) -> bool:
        """Whether this process was not allowed to look at them (CAP_SYS_PTRACE), so that nothing was to be seen."""
        return bool(self._hidden)

    def _ours(self) -> list[Process]:
        processes = (Process(pid, self._hidden) for pid in sorted(pids()))
        return [process for process in processes if self._is_ours(process) and process.is_alive()]

    def seen(self) -> bool:
        if not self._seen and (self._over or not self._only_after):
            self._seen = self._shows(self._ours())
        return self._seen

    def finish(self) -> None:
        give_up_at = time.monotonic() + _ENDING_S
        while self._only_after and self._ours() and time.monotonic() < give_up_at:
            time.sleep(0.02)
        self._over = True

    def close(self) -> None:
        for process in self._ours():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)


class Usage(Target):
    """What lies in the scratch directories is more than a run may have.

    Args:
        stage: Where.
        mebibytes: More than this is seen.
        files: More files, folders and links than this are seen.
    """

    def __init__(self, stage: Stage, mebibytes: int = 2**40, files: int = 2**40) -> None:
        super().__init__()
        self._root, self._most_bytes, self._most_files = stage.scratch_root, mebibytes * 2**20, files

    def seen(self) -> bool:
        return _is_above(self._root, self._most_bytes, self._most_files)


def _is_above(folder: Path, most_bytes: int, most_files: int) -> bool:
    found_bytes = found_files = 0
    for place, folders, files in os.walk(folder):
        found_files += len(files) + len(folders)
        if found_files > most_files:
            return True
        for file in files:
            with contextlib.suppress(OSError):
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
    """So much lies in files that are open, and in files without a name that are mapped."""

    def shows(processes: Sequence[Process]) -> bool:
        files = {}
        for process in processes:
            for facts in process.files():
                if stat.S_ISREG(facts.st_mode):
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
