"""The host's view of sandboxed processes while they run: /proc, from outside. Independent of executors. A process is
the sandbox's when it bears the attack's name or descends from this process.
"""

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from attack_targets import Stage, Target

_ENDING_S: Final = 30.0  # a process that was killed may be seen for a moment


@dataclass(frozen=True)
class Process:
    """One process, read anew at each question; what is gone or hidden reads as empty."""

    pid: int  # its number
    hidden: list[str] = field(default_factory=list, compare=False)  # gets what this process was not allowed to look at

    def text(self, file: str) -> str:
        try:
            return Path("/proc", str(self.pid), file).read_bytes().decode("utf-8", "replace")
        except OSError as e:
            self._note(e, file)
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
        try:
            return str(Path(f"/proc/{self.pid}/{file}").readlink())
        except OSError as e:
            self._note(e, file)
            return ""

    def _note(self, error: OSError, file: str) -> None:
        if isinstance(error, PermissionError) and self.number("VmSize"):  # what is about to end is hidden from all
            self.hidden.append(file)

    def hides_handles(self) -> bool:
        """Return whether the process lives and hides its open handles."""
        before = len(self.hidden)
        self.handles()
        return len(self.hidden) > before

    def handles(self) -> dict[int, str]:
        try:
            return {int(path.name): self.link(f"fd/{path.name}") for path in Path(f"/proc/{self.pid}/fd").iterdir()}
        except OSError as e:
            self._note(e, "fd")
            return {}

    def files(self) -> Iterator[os.stat_result]:
        for handle in self.handles():
            with contextlib.suppress(OSError):
                yield Path(f"/proc/{self.pid}/fd/{handle}").stat()

    def is_alive(self) -> bool:
        """Return whether the process exists and is not a zombie."""
        return self.status("State")[:1] not in ("", "Z", "X")


def pids() -> set[int]:
    """All processes of the machine."""
    return {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()}


def descendants(of: int) -> set[int]:
    parents = {pid: Process(pid).number("PPid") for pid in pids()}
    found, last = {of}, 0
    while len(found) > last:
        last = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {of}


class Sight(Target):
    """What sandboxed processes do is seen while they do it, or only `after` the run: what must not outlive it.

    `shows` says whether processes that bear the name of the attack show that it worked, and `judges_hidden` ones too;
    the attacker knows the facts.
    """

    def __init__(
        self,
        stage: Stage,
        shows: Callable[[Sequence[Process]], bool],
        *,
        after: bool = False,
        judges_hidden: bool = False,
        **facts,
    ) -> None:
        super().__init__(stage)
        self.facts |= facts
        self._hidden: list[str] = []
        self._shows = shows
        self._only_after = after
        self._judges_hidden = judges_hidden
        self._ending_s = _ENDING_S if stage.has_helpers else 1.0  # the plain backend ends nothing later
        self._over = False
        self._seen = False

    def _is_ours(self, process: Process) -> bool:
        return process.text("comm").strip() == self.name

    @property
    def is_blind(self) -> bool:
        """Return whether this process could not inspect them (CAP_SYS_PTRACE), so that it saw nothing."""
        return bool(self._hidden) and not self._judges_hidden

    def _ours(self) -> list[Process]:
        processes = (Process(pid, self._hidden) for pid in sorted(pids()))
        return [process for process in processes if self._is_ours(process) and process.is_alive()]

    def seen(self) -> bool:
        if not self._seen and (self._over or not self._only_after):
            self._seen = self._shows(self._ours())
        return self._seen

    def finish(self) -> None:
        give_up_at = time.monotonic() + self._ending_s
        while self._only_after and self._ours() and time.monotonic() < give_up_at:
            time.sleep(0.02)
        self._over = True

    def close(self) -> None:
        for process in self._ours():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)


class Usage(Target):
    """The content of the scratch directories exceeds a run's limit: bytes, or files, folders and links."""

    def __init__(self, stage: Stage, mebibytes: int = 2**40, files: int = 2**40) -> None:
        super().__init__(stage)
        self._root, self._most_bytes, self._most_files = stage.scratch_root, mebibytes * 2**20, files
        give_up_at = time.monotonic() + _ENDING_S
        while _is_above(self._root, 2**20, 50) and time.monotonic() < give_up_at:  # an earlier run is still tidied up
            time.sleep(0.02)

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
                found_bytes += Path(place, file).lstat().st_blocks * 512
    return found_bytes > most_bytes


_NAMED_MEMORY: Final = (
    "MemFree",
    "Buffers",
    "Cached",
    "SwapCached",
    "AnonPages",
    "Slab",
    "PageTables",
    "KernelStack",
    "Percpu",
    "Hugetlb",
)


class MachineMemory(Target):
    """The machine has lost more memory than a run may have, to nothing that a process shows as its own.

    Args:
        stage: Where the attack takes place.
        mebibytes: So much more than before.
        counted: The field of /proc/meminfo to look at; None for what no field of it names.
    """

    _STAYS_S = 0.3  # the kernel takes a moment to count what others on this machine have just freed

    def __init__(self, stage: Stage, mebibytes: int, counted: str | None = None) -> None:
        super().__init__(stage)
        self._counted = counted
        self._more_kib = mebibytes << 10
        self._least_kib = self._now_kib()  # what an earlier attack held may still be on its way back
        self._above_since: float | None = None
        self._seen = False

    def _now_kib(self) -> int:
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
        if self._counted is not None:
            return kib[self._counted]
        return kib["MemTotal"] - sum(kib.get(name, 0) for name in _NAMED_MEMORY)

    def seen(self) -> bool:
        now_kib = self._now_kib()
        self._least_kib = min(self._least_kib, now_kib)
        if now_kib <= self._least_kib + self._more_kib:
            self._above_since = None
        elif self._above_since is None:
            self._above_since = time.monotonic()
        elif time.monotonic() > self._above_since + self._STAYS_S:
            self._seen = True
        return self._seen


class Program(Sight):
    """Another program was started, with `nap` among its arguments."""

    def __init__(self, stage: Stage) -> None:
        self._nap = f"9.{secrets.randbelow(10**9):09}"
        super().__init__(stage, bool, nap=self._nap)

    def _is_ours(self, process: Process) -> bool:
        return self._nap in process.text("cmdline")
