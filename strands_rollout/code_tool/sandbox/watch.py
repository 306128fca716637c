"""Follow a piece of code to its end, and kill it at a limit.

Time, output, disk, files, threads, memory mappings and page tables are limited. If a run may have evaded its memory
limit, the executor logs a warning.

Measuring a directory is slow, and the kernel does not report writes. Therefore a timer reads the file system's free
space every few milliseconds, with a single system call. A slot's directory is measured as soon as so much space is gone
that the slot may have reached its limit. The measurement runs in slices. Between slices the event loop does other
work, so the files of one run do not delay another run.

Deleted files that are still open or mapped are found in /proc/PID/fd and maps. The kernel shows these to processes of
the same user (proc(5), ptrace(2): PTRACE_MODE_READ_FSCREDS), so the reading thread briefly accesses files as that
user (setfsuid(2)).
"""

import asyncio
import contextlib
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from strands_rollout.code_tool.sandbox import scratch
from strands_rollout.code_tool.sandbox.children import ForkServerLink, RunningChild
from strands_rollout.code_tool.sandbox.code_runner import describe_signal
from strands_rollout.code_tool.sandbox.kernel import file_access_as, shared_thread_limit

_MAX_MAPS_BYTES: Final = 1 << 20  # ten times the maps of a process with numpy and sympy


class TooManyMappingsError(Exception):
    """A process has far more memory mappings than ordinary code needs."""


class HiddenFilesError(Exception):
    """The open files of a running process can't be read: the process or this machine hides them."""


@dataclass(slots=True)
class DeletedFiles:
    """Deleted files that processes still hold open or mapped."""

    sizes: dict[int, int] = field(default_factory=dict)  # open files: inode -> bytes on disk
    mapped: set[int] = field(default_factory=set)  # inodes of mapped files
    is_incomplete: bool = False  # a process ended meanwhile; another process may hold its files now

    def bytes(self, mapped_file_bytes: int) -> int:
        """Return the bytes on disk; a file whose size is not visible counts as `mapped_file_bytes`."""
        return sum(self.sizes.values()) + len(self.mapped - self.sizes.keys()) * mapped_file_bytes

    def add(self, pid: int, user: int | None, root: str, within: str | None = None) -> None:
        """Add the deleted files of a process; do nothing on systems other than Linux.

        Mapped files are added only if they lay below the root; the root is recognized by its unique name. Other mapped
        files may be libraries of every process, deleted by a system upgrade. The size of a file that is mapped but not
        open is not visible.

        Args:
            pid: The process.
            user: The process's user; None if that is this process's user.
            root: The folder that contains all slots' directories.
            within: Add only files that lay in this folder.

        Raises:
            HiddenFilesError: The process's open files can't be read.
            TooManyMappingsError: The process has too many memory mappings.
        """
        if sys.platform != "linux":
            return
        thread = _living_thread(pid)
        if thread is None:
            self.is_incomplete = True
            return
        try:
            with file_access_as(user):
                self.sizes |= _open_files(thread, root, within)
                self.mapped |= _mapped_files(thread, within or f"/{os.path.basename(root)}/")  # noqa: PTH119
        except OSError as e:
            if isinstance(e, PermissionError) and _is_alive(thread):  # an ending process is unreadable too
                raise HiddenFilesError from None
            self.is_incomplete = True


def _is_alive(thread: str) -> bool:
    """Return whether a thread, given by its folder in /proc, is alive: an ending thread loses its memory first."""
    try:
        return b"\nVmSize:" in Path(thread, "status").read_bytes()
    except OSError:
        return False


def _living_thread(pid: int) -> str | None:
    """Return the folder in /proc of a living thread, or None; the first thread may end before the others."""
    try:
        numbers = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - runs every 50 ms for each child
    except OSError:
        return None
    return next(filter(_is_alive, (f"/proc/{pid}/task/{number}" for number in numbers)), None)


def _open_files(thread: str, root: str, within: str | None) -> dict[int, int]:
    """Find deleted files that are open, and a deleted executable from below the root: inode -> bytes on disk."""
    found = {}
    descriptors = {f"{thread}/fd/{number}": within or "" for number in os.listdir(f"{thread}/fd")}  # noqa: PTH208
    for link, folder in {f"{thread}/exe": within or root, **descriptors}.items():
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(link)  # noqa: PTH116
            is_unnamed = stat.S_ISREG(status.st_mode) and status.st_nlink == 0
            if is_unnamed and os.readlink(link).startswith(folder):  # noqa: PTH115
                found[status.st_ino] = status.st_blocks * 512
    return found


def _mapped_files(thread: str, within: str) -> set[int]:
    """Find the inodes of mapped deleted files whose path contains `within`, wherever the folder is mounted.

    Device numbers can't be compared: some file systems report other numbers in /proc than to stat(2).
    """
    found = set()
    with open(f"{thread}/maps", "rb") as maps:  # noqa: PTH123
        listing = maps.read(_MAX_MAPS_BYTES)
    if len(listing) == _MAX_MAPS_BYTES:
        raise TooManyMappingsError
    for line in listing.split(b"\n"):  # not splitlines: a newline is the only character that the kernel escapes
        if line.endswith(b" (deleted)"):
            *_, inode, name = line.split(maxsplit=5)
            if os.fsencode(within) in name:
                found.add(int(inode))
    return found


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and its descendants; a process that ends meanwhile may be missing."""
    pending = [pid]
    while pending:
        process = pending.pop()
        yield process
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):  # noqa: PTH208
                pending += _children(f"/proc/{process}/task/{thread}")


def _children(thread: str) -> list[int]:
    try:
        return [int(number) for number in Path(thread, "children").read_bytes().split()]
    except OSError:
        return []


def _has_user(pid: int, user: int) -> bool:
    try:
        # read the user from status: the owner of /proc/PID may be root instead
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False
    found = re.search(rb"^Uid:\s+(\d+)", status, re.MULTILINE)
    return found is not None and int(found[1]) == user


_MEBIBYTE: Final = 1024 * 1024
_TICK_S: Final = 0.004
_SLICE_S: Final = 0.0005
_MIN_GROWTH: Final = (_MEBIBYTE // 2, 2048)  # less growth (bytes, files) is ignored, since other programs write too
_MEASURE_S: Final = 0.0005  # approximate cost of a measurement; each file adds _MEASURE_FILE_S
_MEASURE_FILE_S: Final = 0.000005
_PAUSE_FACTOR: Final = 2  # pause after a measurement without growth, as a multiple of the cost of measuring all slots
_MAX_PAUSE_S: Final = 0.2
_SHORTAGE_S: Final = 5.0  # unfinished deletions or recent writes may fill the disk for this long


@dataclass(slots=True)
class _SlotState:
    """The latest measurement of one slot; pairs are (bytes, files)."""

    free: tuple[int, int]  # free on the disk
    usage: tuple[int, int] = (0, 0)  # used by the slot
    is_incomplete: bool = False  # the measurement may have missed something
    paused_until: float = 0.0  # no measurement is due before this monotonic time
    due: asyncio.Future[None] | None = None  # resolved when a measurement is due; None unless the slot is watched


class DiskWatch:
    """Monitor that measures the slots' disk usage, and finds runs that exceed a limit or fill the disk.

    Args:
        limits: Limits of a run; only `disk_mb` and `max_files` are read.
        root: The folder that contains all slots' directories.
        evict: Ends an idle session, given its slot.
        fork_server: The fork server if code may start programs, else None. The fork server adopts processes that have
            lost their parent.
    """

    def __init__(
        self,
        limits: Mapping[str, Any],
        root: str,
        evict: Callable[[int], None],
        fork_server: ForkServerLink | None = None,
    ) -> None:
        self._limits = (limits["disk_mb"] * _MEBIBYTE, limits["max_files"])
        self._limit_texts = (f"disk limit of {limits['disk_mb']} MiB", f"limit of {limits['max_files']} files")
        self._root = root
        self._evict = evict
        self._fork_server = fork_server
        self._slots: dict[int, _SlotState] = {}
        self._timer: asyncio.Task[None] | None = None
        self._short_since: float | None = None

    @contextlib.contextmanager
    def watching(self, slot: int) -> Iterator[None]:
        """Watch a slot while the context is open: `due(slot)` resolves when the slot should be measured."""
        state = self._slots.setdefault(slot, _SlotState(scratch.free_space(self._root)))
        state.due = asyncio.get_running_loop().create_future()
        if self._timer is None or self._timer.done():
            self._timer = asyncio.get_running_loop().create_task(self._tick())
        try:
            yield
        finally:
            state.due = None

    def forget(self, slot: int) -> None:
        """Drop the state of a slot whose directory has been deleted."""
        self._slots.pop(slot, None)

    def usage(self, slot: int) -> tuple[int, int]:
        """Return the bytes and files of a slot at the last measurement; zeros before the first."""
        state = self._slots.get(slot)
        return (0, 0) if state is None else state.usage

    def due(self, slot: int) -> asyncio.Future[None]:
        """Return a future that resolves when the next measurement of a watched slot is due."""
        due = self._slots[slot].due
        assert due is not None  # noqa: S101
        return due

    def has_grown(self, slot: int) -> bool:
        """Return whether a slot may have grown noticeably since the last measurement."""
        return _is_below(scratch.free_space(self._root), self._slots[slot].free, _MIN_GROWTH)

    async def find_exceeded_limit(self, child: RunningChild) -> str | None:
        """Measure a child's slot; return text for a result's `killed_by` if the run is at fault, else None.

        A run is at fault if it exceeds a limit or hides its files from the measurement. If the runs have almost filled
        the disk, the run that uses the most is at fault. If this process lacks descriptors or memory to measure, return
        None.

        Raises:
            RuntimeError: The disk has been almost full for some time, and the runs are not the reason.
        """
        state = self._slots[child.slot]
        free = scratch.free_space(self._root)
        state.due = asyncio.get_running_loop().create_future()  # later writes belong to the next measurement
        try:
            used = await self._measure(child.slot)
            files = await self._deleted_files(child)
            unnamed = files.bytes(self._limits[0])
        except TooManyMappingsError:
            return "limit of memory mappings"
        except HiddenFilesError:
            return "a process that hides which files it holds open"
        except OSError:  # this process is out of descriptors or memory; the next measurement may succeed
            return None
        if used.fault is not None:
            return used.fault
        if used.disk_bytes > self._limits[0]:
            return self._limit_texts[0]
        if used.disk_bytes + unnamed > self._limits[0]:
            return f"{self._limit_texts[0]}, counting deleted files that are open"
        if used.entries > self._limits[1]:
            return self._limit_texts[1]
        now, usage = time.monotonic(), (used.disk_bytes + unnamed, used.entries)
        if usage[0] < state.usage[0] + _MIN_GROWTH[0] and usage[1] < state.usage[1] + _MIN_GROWTH[1]:
            watched = sum(other.due is not None for other in self._slots.values())
            state.paused_until = now + min(
                (_MEASURE_S + used.entries * _MEASURE_FILE_S) * watched * _PAUSE_FACTOR, _MAX_PAUSE_S
            )
        state.free, state.usage, state.is_incomplete = free, usage, used.is_incomplete or files.is_incomplete
        return self._handle_shortage(child.slot, free, now)

    async def _deleted_files(self, child: RunningChild) -> DeletedFiles:
        """Collect the deleted files of all processes of a run.

        If code may start programs, the fork server adopts each process whose parent has ended. The user of such a
        process shows which run it belongs to. If runs have no users of their own, only the former folder of the
        process's deleted files shows the run. Then an adopted process that hides its files is killed.

        Raises:
            HiddenFilesError: Code may start programs, and a process of the run has made its open files unreadable.
            TooManyMappingsError: A process of the run has too many memory mappings.
        """
        files = DeletedFiles()
        if child.pid is None:
            return files
        if self._fork_server is None:
            with contextlib.suppress(HiddenFilesError):  # not the code's doing: this machine hides them
                files.add(child.pid, child.user, self._root)
            files.is_incomplete = False
            return files
        for pid in descendants(child.pid):
            files.add(pid, child.user, self._root)
            await asyncio.sleep(0)
        within = f"{self._root}/{child.slot}/" if child.user is None else None
        for orphan in self._fork_server.orphans():
            for pid in descendants(orphan):
                if child.user is not None and not _has_user(pid, child.user):
                    continue
                try:
                    files.add(pid, child.user, self._root, within)
                except HiddenFilesError:
                    if child.user is not None:
                        raise
                    # while a fork is not reported yet, the process may be the new child of another run
                    if orphan in self._fork_server.orphans() and not self._fork_server.is_forking:
                        os.kill(orphan, signal.SIGKILL)
                await asyncio.sleep(0)
        return files

    async def _measure(self, slot: int) -> scratch.Usage:
        folder = os.path.join(self._root, str(slot))  # noqa: PTH118 - runs every 50 ms
        used, slice_ends = scratch.Usage(), time.monotonic() + _SLICE_S
        with contextlib.closing(scratch.measure(folder, *self._limits)) as slices:
            for found in slices:
                used = found
                if time.monotonic() > slice_ends:
                    await asyncio.sleep(0)
                    slice_ends = time.monotonic() + _SLICE_S
        return used

    def _handle_shortage(self, slot: int, free: tuple[int, int], now: float) -> str | None:
        """Handle an almost full disk: if it is full because of runs, the run that uses the most is at fault.

        Returns:
            Text for `killed_by` if this slot's run is at fault, else None. If another run is at fault, its idle session
            is evicted, or its next measurement becomes due.

        Raises:
            RuntimeError: The disk has been almost full for some time, and the runs are not the reason.
        """
        if not scratch.is_scarce(free):
            self._short_since = None
            return None
        usage = [sum(state.usage[i] for state in self._slots.values()) for i in range(2)]
        if scratch.is_scarce((free[0] + usage[0], free[1] + usage[1])):
            self._short_since = self._short_since or now
            if now - self._short_since > _SHORTAGE_S:
                raise RuntimeError(
                    f"the disk of {self._root} is almost full, and not because of the code that runs here; free some "
                    "space, or set scratch_dir to a folder on another disk"
                )
            return None
        self._short_since = None
        kind = 0 if scratch.is_scarce((free[0], free[1] + usage[1])) else 1
        biggest = max(self._slots, key=lambda other: self._slots[other].usage[kind])
        if biggest == slot:
            return "a disk that is almost full, of which it held the most"
        due = self._slots[biggest].due
        if due is None:
            self._evict(biggest)
        elif not due.done():
            due.set_result(None)
        return None

    async def _tick(self) -> None:
        while any(state.due is not None for state in self._slots.values()):
            await asyncio.sleep(_TICK_S)
            free, now = scratch.free_space(self._root), time.monotonic()
            for state in self._slots.values():
                margin = [max((self._limits[i] - state.usage[i]) // 2, _MIN_GROWTH[i]) for i in range(2)]
                is_due = (state.is_incomplete or _is_below(free, state.free, margin)) and now >= state.paused_until
                if is_due and state.due is not None and not state.due.done():
                    state.due.set_result(None)


def _is_below(free: tuple[int, int], before: tuple[int, int], margin: Sequence[int]) -> bool:
    return any(now < then - least for now, then, least in zip(free, before, margin, strict=True))


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
_MEMORY_TOLERANCE: Final = 512 * _MEBIBYTE  # the kernel accounts for freed memory of other programs with a delay


def unaccounted_memory() -> int:
    """Return the bytes of memory that no process, cache or kernel table accounts for; 0 if unknown.

    Drivers use such memory. So does code that finds a way to keep memory without mapping it; no limit covers this.
    """
    try:
        lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
        kib = {fields[0].rstrip(":"): int(fields[1]) for fields in lines}
        return max(kib["MemTotal"] - sum(kib.get(name, 0) for name in _NAMED_MEMORY), 0) * 1024
    except (OSError, LookupError, ValueError):
        return 0


class MemoryWatch:
    """Monitor that warns about a run that may have evaded its memory limit.

    The end of such a run frees more unaccounted memory than a process may have. Up to 512 MiB, there is no warning.

    Args:
        memory_mb: Memory limit of a process.
        warn: Receives a warning about such a run.
    """

    def __init__(self, memory_mb: int, warn: Callable[[str], None]) -> None:
        self._threshold = max(memory_mb * _MEBIBYTE, _MEMORY_TOLERANCE)
        self._memory_mb = memory_mb
        self._warn = warn
        self._before: dict[int, int] = {}

    def record_start(self, slot: int) -> None:
        """Record the unaccounted memory before a child's first code runs."""
        self._before[slot] = unaccounted_memory()

    @contextlib.contextmanager
    def checking_end(self, slot: int) -> Iterator[None]:
        """Warn if the run may have evaded its memory limit; the run's child must end in the context.

        Other programs use memory too. Therefore, unaccounted memory counts only if it has grown during the run and is
        freed at its end.
        """
        before, at_end = self._before.pop(slot, None), unaccounted_memory()
        yield
        freed = at_end - unaccounted_memory()
        if before is not None and min(at_end - before, freed) > self._threshold:
            self._warn(
                f"the end of a run freed {freed >> 20} MiB of memory that belonged to no process: the run may have "
                f"evaded its limit of {self._memory_mb} MiB. Inspect the code; use a remote executor for deliberately "
                "hostile code"
            )


_END_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.05
_MAX_POLL_S: Final = 2.0
_PAGE_TABLES_KIB: Final = 32 * 1024
_PAGE_TABLES_KIB_PER_MIB: Final = 4  # twice the need of contiguous memory; an isolated page needs 8 KiB
# fraction of time for the checks of all children. Slow checks run less often, with pauses of up to _MAX_POLL_S
_SHARE_OF_POLLING: Final = 0.1


class RunWatch:
    """Monitor that kills the process of running code as soon as the code exceeds a limit."""

    def __init__(self, limits: Mapping[str, Any], disk: DiskWatch, fork_server: ForkServerLink) -> None:
        self._limits = limits
        self._disk = disk
        self._fork_server = fork_server
        self._followed_runs = 0

    async def follow(
        self, child: RunningChild, started: float, timeout_s: float, start: Coroutine[Any, Any, None] | None = None
    ) -> dict[str, Any]:
        """Wait until the code has ended; kill its process as soon as it exceeds a limit.

        Args:
            child: The process that runs the code.
            started: Monotonic time of the code's start.
            timeout_s: Time limit of the code, from `started` on.
            start: Starts the code; awaited first, under the same limits. None if the code has been started already.

        Returns:
            The fields of an `ExecutionResult`.

        Raises:
            RuntimeError: The disk is almost full, and the runs are not the reason.
        """
        end = asyncio.create_task(_start_and_wait(child, start))
        self._followed_runs += 1
        try:
            with self._disk.watching(child.slot):
                killed_by, timed_out = await self._wait_for_limit(child, started, timeout_s, end)
            exit_code = await end if killed_by is None else await self._kill_and_drain(child, end)
        finally:
            self._followed_runs -= 1
            end.cancel()
        duration_s = time.monotonic() - started
        if exit_code is None:  # the process has ended
            exit_code = child.ended.result()
            killed_by = killed_by or describe_signal(exit_code)
        facts = {"exit_code": exit_code, "timed_out": timed_out, "duration_s": duration_s, "killed_by": killed_by}
        return child.output_fields() | facts

    async def _kill_and_drain(self, child: RunningChild, end: asyncio.Task[int | None]) -> int | None:
        """Kill a child and read its last output; return -SIGKILL if the kernel ends the child too late, else None."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self.kill(child)
        if not child.ended.done():
            return -signal.SIGKILL
        await end
        return None

    async def _wait_for_limit(
        self, child: RunningChild, started: float, timeout_s: float, end: asyncio.Task[int | None]
    ) -> tuple[str | None, bool]:
        """Wait until the code exceeds a limit or has ended; return the result's `killed_by` and `timed_out`."""
        limits = self._limits
        pause_s = _POLL_S
        while True:
            self.allow_threads(child)  # only after a check that found no more threads than allowed
            left_s = started + timeout_s - time.monotonic()
            if left_s <= 0:
                return f"time limit of {timeout_s:g} s", True
            events: list[asyncio.Future[Any]] = [end, self._disk.due(child.slot), child.alarm]
            await asyncio.wait(events, timeout=min(pause_s, left_s), return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                may_hold_more = not child.ended.done() and self._disk.has_grown(child.slot)
                return await self._disk.find_exceeded_limit(child) if may_hold_more else None, False
            if child.is_broken:
                return "writing to the sandbox's own descriptor", False
            if child.output_bytes > limits["max_output_mb"] * _MEBIBYTE:
                return f"output limit of {limits['max_output_mb']} MiB", False
            checked_at = time.monotonic()
            exceeded = self._find_exceeded_kernel_limit(child) or await self._disk.find_exceeded_limit(child)
            if exceeded is not None:
                return exceeded, False
            checks_s = (time.monotonic() - checked_at) * self._followed_runs
            pause_s = min(max(_POLL_S, checks_s / _SHARE_OF_POLLING), _MAX_POLL_S)

    def _find_exceeded_kernel_limit(self, child: RunningChild) -> str | None:
        # no rlimit bounds page tables, and none bounds only the threads of a child that has no user of its own
        threads, page_tables_kib = _threads_and_page_tables(child.pid)
        if threads > self._limits["max_threads"]:
            return f"limit of {self._limits['max_threads']} threads"
        if page_tables_kib > _PAGE_TABLES_KIB + self._limits["memory_mb"] * _PAGE_TABLES_KIB_PER_MIB:
            return "limit of memory for page tables"
        return None

    def allow_threads(self, child: RunningChild) -> None:
        """Set the thread limit of a child without a user of its own, if the limit has changed noticeably.

        `shared_thread_limit` returns the limit, given `max_threads` for each of `max_concurrency` calls.
        """
        if child.user is not None:
            return
        max_threads = self._limits["max_threads"]
        limit = shared_thread_limit(max_threads * self._limits["max_concurrency"])
        if limit is not None and abs(limit - child.thread_limit) > max_threads // 4:
            child.thread_limit = limit
            self._fork_server.limit_threads(child, limit)

    async def kill(self, child: RunningChild) -> None:
        """Kill a child, and wait until it has ended."""
        while not child.ended.done():
            if not child.kill():
                self._fork_server.signal(child, signal.SIGKILL)
            await asyncio.wait([child.ended], timeout=_END_TIMEOUT_S)


async def _start_and_wait(child: RunningChild, start: Coroutine[Any, Any, None] | None) -> int | None:
    """Return the code's exit code, or None if the process itself has ended."""
    if start is not None:
        try:
            await start
        except RuntimeError:  # a timer or thread of earlier code has ended the process
            return None
    return await child.wait()


def _threads_and_page_tables(pid: int | None) -> tuple[int, int]:
    """Return the number of a process's threads and the KiB of its page tables; a value missing in /proc becomes 0."""
    threads, page_tables_kib = _read_status(f"/proc/{pid}/status")
    if threads and not page_tables_kib:  # the first thread has ended, others still run
        with contextlib.suppress(OSError):
            others = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - runs every 50 ms
            page_tables_kib = max(
                (_read_status(f"/proc/{pid}/task/{number}/status")[1] for number in others), default=0
            )
    return threads, page_tables_kib


def _read_status(path: str) -> tuple[int, int]:
    try:
        status = Path(path).read_bytes()  # not as text, since the code can choose the process's name in it
    except OSError:
        return 0, 0
    found = [re.search(rb"^%b:\s+(\d+)" % name, status, re.MULTILINE) for name in (b"Threads", b"VmPTE")]
    threads, page_tables_kib = (int(match[1]) if match else 0 for match in found)
    return threads, page_tables_kib
