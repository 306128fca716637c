"""The host's view of sandboxed processes while they run, from /proc; independent of executors.

A sandboxed process is recognized by the attack's name, by an argument (`StartedProgram`), or as this process's
descendant.
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

_CLEANUP_TIMEOUT_S: Final = 30.0  # a killed process remains visible for a moment


@dataclass(frozen=True)
class Process:
    """A process; each access reads /proc again, and missing or hidden values are empty."""

    pid: int
    hidden: list[str] = field(default_factory=list, compare=False)  # files of the process that the host may not read

    def text(self, file: str) -> str:
        try:
            return Path("/proc", str(self.pid), file).read_bytes().decode("utf-8", "replace")
        except OSError as e:
            self._note(e, file)
            return ""

    def status(self, field: str) -> str:
        """Return the value of a line of /proc/PID/status."""
        return next((line.partition(":")[2].strip() for line in self.text("status").splitlines()
                     if line.startswith(f"{field}:")), "")  # fmt: skip

    def number(self, field: str) -> int:
        """Return the first number in a line of /proc/PID/status; 0 if there is none."""
        words = self.status(field).split()
        return int(words[0]) if words else 0

    def link(self, file: str) -> str:
        try:
            return str(Path(f"/proc/{self.pid}/{file}").readlink())
        except OSError as e:
            self._note(e, file)
            return ""

    def _note(self, error: OSError, file: str) -> None:
        if isinstance(error, PermissionError) and self.number("VmSize"):  # an ending process is hidden from everybody
            self.hidden.append(file)

    def hides_handles(self) -> bool:
        """Return whether the process is alive and hides its open handles."""
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
    """Return the ids of all processes of the machine."""
    return {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()}


def descendants(of: int) -> set[int]:
    parents = {pid: Process(pid).number("PPid") for pid in pids()}
    found, last = {of}, 0
    while len(found) > last:
        last = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {of}


class ObservedProcesses(Target):
    """Sandboxed processes, observed during the run, or only `after` the run if they must not outlive it.

    Args:
        stage: Environment of the attack.
        sign: Returns whether the processes with the attack's name show that the attack worked.
        after: Check only after the run.
        judges_hidden: The sign also evaluates processes that hide their handles.
        facts: What the attacker knows besides the attack's name.
    """

    def __init__(
        self,
        stage: Stage,
        sign: Callable[[Sequence[Process]], bool],
        *,
        after: bool = False,
        judges_hidden: bool = False,
        **facts,
    ) -> None:
        super().__init__(stage)
        self.facts |= facts
        self._hidden: list[str] = []
        self._sign = sign
        self._checks_after = after
        self._judges_hidden = judges_hidden
        # the plain backend ends no processes after the run
        self._cleanup_timeout_s = _CLEANUP_TIMEOUT_S if stage.has_helpers else 1.0
        self._is_finished = False
        self._is_detected = False

    def _has_name(self, process: Process) -> bool:
        return process.text("comm").strip() == self.name

    @property
    def is_blind(self) -> bool:
        """Return whether the sign needs files of processes that the host, without CAP_SYS_PTRACE, could not read."""
        return bool(self._hidden) and not self._judges_hidden

    def _named_processes(self) -> list[Process]:
        processes = (Process(pid, self._hidden) for pid in sorted(pids()))
        return [process for process in processes if self._has_name(process) and process.is_alive()]

    def check_damage(self) -> bool:
        if not self._is_detected and (self._is_finished or not self._checks_after):
            self._is_detected = self._sign(self._named_processes())
        return self._is_detected

    def finish(self) -> None:
        deadline = time.monotonic() + self._cleanup_timeout_s
        while self._checks_after and self._named_processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._is_finished = True

    def close(self) -> None:
        for process in self._named_processes():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)


class Usage(Target):
    """Scratch directories, damaged if they exceed these limits of bytes, or of files, folders and links."""

    def __init__(self, stage: Stage, mebibytes: int = 2**40, files: int = 2**40) -> None:
        super().__init__(stage)
        self._root, self._max_bytes, self._max_files = stage.scratch_root, mebibytes * 2**20, files
        deadline = time.monotonic() + _CLEANUP_TIMEOUT_S
        while _exceeds(self._root, 2**20, 50) and time.monotonic() < deadline:  # an earlier run's files are deleted
            time.sleep(0.02)

    def check_damage(self) -> bool:
        return _exceeds(self._root, self._max_bytes, self._max_files)


def _exceeds(folder: Path, max_bytes: int, max_files: int) -> bool:
    found_bytes = found_files = 0
    for place, folders, files in os.walk(folder):
        found_files += len(files) + len(folders)
        if found_files > max_files:
            return True
        for file in files:
            with contextlib.suppress(OSError):
                found_bytes += Path(place, file).lstat().st_blocks * 512
    return found_bytes > max_bytes


_MEMINFO_FIELDS: Final = (
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
    """Memory of the machine that belongs to no process, damaged if it grows by more than `mebibytes`.

    Args:
        stage: Environment of the attack.
        mebibytes: Growth that counts as damage.
        counted: Field of /proc/meminfo to read; None for memory that is in none of `_MEMINFO_FIELDS`.
    """

    _STABLE_S = 0.3  # the kernel counts freed memory with a delay

    def __init__(self, stage: Stage, mebibytes: int, counted: str | None = None) -> None:
        super().__init__(stage)
        self._counted = counted
        self._more_kib = mebibytes << 10
        self._least_kib = self._now_kib()  # memory of an earlier attack may still be released
        self._above_since: float | None = None
        self._is_detected = False

    def _now_kib(self) -> int:
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
        if self._counted is not None:
            return kib[self._counted]
        return kib["MemTotal"] - sum(kib.get(name, 0) for name in _MEMINFO_FIELDS)

    def check_damage(self) -> bool:
        now_kib = self._now_kib()
        self._least_kib = min(self._least_kib, now_kib)
        if now_kib <= self._least_kib + self._more_kib:
            self._above_since = None
        elif self._above_since is None:
            self._above_since = time.monotonic()
        elif time.monotonic() > self._above_since + self._STABLE_S:
            self._is_detected = True
        return self._is_detected


class StartedProgram(ObservedProcesses):
    """A program that the attack starts, recognized by `nap` among the program's arguments."""

    def __init__(self, stage: Stage) -> None:
        self._nap = f"9.{secrets.randbelow(10**9):09}"
        super().__init__(stage, bool, nap=self._nap)

    def _has_name(self, process: Process) -> bool:
        return self._nap in process.text("cmdline")
