"""Follows one piece of code to its end, and ends it at a limit: time, output, disk, files, threads, memory mappings.

To measure the disk takes time, and the kernel reports no writes. So one timer asks every few milliseconds how much the
file system has left, a single system call, and a place is measured when as much is gone as could take it to its
limit; in slices, between which the event loop does other work: what one run has made holds up no other.

Space in deleted files that are still open or mapped is found in /proc/PID/fd and maps, which the kernel shows to
processes of the same user (proc(5), ptrace(2): PTRACE_MODE_READ_FSCREDS), so that is what the calling thread
is for a moment (setfsuid(2)).
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
from strands_rollout.code_tool.sandbox.code_runner import signal_words
from strands_rollout.code_tool.sandbox.kernel import files_as, shared_thread_limit

_MAX_MAPS_BYTES: Final = 1 << 20  # ten times what numpy and sympy come to


class TooManyMappingsError(Exception):
    """A process has mapped more pieces of memory than anybody needs."""


class HiddenFilesError(Exception):
    """A process keeps others from looking at what it holds open."""


@dataclass(slots=True)
class UnnamedFiles:
    """Files without a name that processes hold open or have in their memory."""

    sizes: dict[int, int] = field(default_factory=dict)  # of those that are open: inode -> bytes on disk
    mapped: set[int] = field(default_factory=set)  # inodes of those in memory
    moved: bool = False  # a process ended meanwhile; it may have left its files to one that was not there before

    def bytes(self, mapped_file_bytes: int) -> int:
        """Bytes on disk, where each file of which the size can't be seen counts as so many."""
        return sum(self.sizes.values()) + len(self.mapped - self.sizes.keys()) * mapped_file_bytes

    def add(self, pid: int, user: int | None, root: str, within: str | None = None) -> None:
        """Add those of a process. Its user is None where that is ours.

        Mapped files count if they lay in the root, whose name is its own: an upgrade deletes libraries that every
        process has in memory. The size of one that is mapped and no longer open can't be seen.

        Args:
            pid: The process.
            user: The process's user.
            root: The folder of all places.
            within: Add only what lay in this folder.

        Raises:
            HiddenFilesError: It has seen to it that it can't be looked at.
            TooManyMappingsError: It has too many.
        """
        if sys.platform != "linux":
            return
        thread = _living_thread(pid)
        if thread is None:
            self.moved = True
            return
        try:
            with files_as(user):
                self.sizes |= _open_files(thread, root, within)
                self.mapped |= _mapped_files(thread, within or f"/{os.path.basename(root)}/")  # noqa: PTH119
        except OSError as e:
            if isinstance(e, PermissionError) and _has_memory(thread):  # what is about to end can't be looked at either
                raise HiddenFilesError from None
            self.moved = True


def _has_memory(thread: str) -> bool:
    """Tell whether a thread, given by its folder in /proc, has not ended: memory is what it loses first."""
    try:
        return b"\nVmSize:" in Path(thread, "status").read_bytes()
    except OSError:
        return False


def _living_thread(pid: int) -> str | None:
    """The folder in /proc of a thread that has not ended: the first may end while others still run."""
    try:
        numbers = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - each 50 ms for each child
    except OSError:
        return None
    return next(filter(_has_memory, (f"/proc/{pid}/task/{number}" for number in numbers)), None)


def _open_files(thread: str, root: str, within: str | None) -> dict[int, int]:
    """Unnamed files behind a process's descriptors, and the one that it runs if it lay in the root: inode -> bytes."""
    found = {}
    places = {f"{thread}/fd/{number}": within or "" for number in os.listdir(f"{thread}/fd")}  # noqa: PTH208
    for link, folder in {f"{thread}/exe": within or root, **places}.items():
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(link)  # noqa: PTH116
            is_unnamed = stat.S_ISREG(status.st_mode) and status.st_nlink == 0
            if is_unnamed and os.readlink(link).startswith(folder):  # noqa: PTH115
                found[status.st_ino] = status.st_blocks * 512
    return found


def _mapped_files(thread: str, within: str) -> set[int]:
    """Inodes of the unnamed files in a process's memory that lay in such a folder, wherever it is mounted.

    Their devices don't tell them apart: some file systems give other numbers here than to stat(2).
    """
    found = set()
    with open(f"{thread}/maps", "rb") as maps:  # noqa: PTH123
        listing = maps.read(_MAX_MAPS_BYTES)
    if len(listing) == _MAX_MAPS_BYTES:
        raise TooManyMappingsError
    for line in listing.split(b"\n"):  # the one character that the kernel escapes in names
        if line.endswith(b" (deleted)"):
            *_, inode, name = line.split(maxsplit=5)
            if os.fsencode(within) in name:
                found.add(int(inode))
    return found


def descendants(pid: int) -> Iterator[int]:
    """A process, and those that it and they have started; what ends meanwhile is left out."""
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
    """Tell whether a process is a user's; the owner of its folder in /proc is another where it can't be looked at."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False
    found = re.search(rb"^Uid:\s+(\d+)", status, re.MULTILINE)
    return found is not None and int(found[1]) == user


_MEBIBYTE: Final = 1024 * 1024
_TICK_S: Final = 0.004
_SLICE_S: Final = 0.0005
_LEAST: Final = (_MEBIBYTE // 2, 2048)  # bytes and files that are worth a look; others use the disk as well
_LOOK_S: Final = 0.0005  # about what a look costs, and what each file adds to that
_FILE_S: Final = 0.000005
_REST: Final = 2  # times what looks at all places cost, after a look for nothing
_MAX_REST_S: Final = 0.2
_SHORTAGE_S: Final = 5.0  # until then the disk may be full of what is being deleted, or has just been written


@dataclass(slots=True)
class _Place:
    """What is known of one place since the last look; pairs are bytes and files."""

    left: tuple[int, int]  # on the disk
    held: tuple[int, int] = (0, 0)  # by the place
    moved: bool = False  # that look may have missed something
    rests_until: float = 0.0  # on the monotonic clock: no look is due before
    due: asyncio.Future[None] | None = None  # resolved when a look is due; None unless it is awaited


class DiskWatch:
    """Watches what all places hold.

    Args:
        limits: Whose `disk_mb` and `max_files` count.
        root: The folder of all places.
        evict: Ends what is kept at a place without running.
        fork_server: Where code may start programs: the parent of those that have lost theirs. Else None.
    """

    def __init__(
        self,
        limits: Mapping[str, Any],
        root: str,
        evict: Callable[[int], None],
        fork_server: ForkServerLink | None = None,
    ) -> None:
        self._limits = (limits["disk_mb"] * _MEBIBYTE, limits["max_files"])
        self._words = (f"disk limit of {limits['disk_mb']} MiB", f"limit of {limits['max_files']} files")
        self._root = root
        self._evict = evict
        self._fork_server = fork_server
        self._places: dict[int, _Place] = {}
        self._timer: asyncio.Task[None] | None = None
        self._short_since: float | None = None

    @contextlib.contextmanager
    def watching(self, place: int) -> Iterator[None]:
        """Let looks at a place fall due."""
        state = self._places.setdefault(place, _Place(scratch.free_space(self._root)))
        state.due = asyncio.get_running_loop().create_future()
        if self._timer is None or self._timer.done():
            self._timer = asyncio.get_running_loop().create_task(self._tick())
        try:
            yield
        finally:
            state.due = None

    def forget(self, place: int) -> None:
        """Count a place as empty: its directory has been deleted."""
        self._places.pop(place, None)

    def held(self, place: int) -> tuple[int, int]:
        """Bytes and files that a place held at the last look."""
        state = self._places.get(place)
        return (0, 0) if state is None else state.held

    def due(self, place: int) -> asyncio.Future[None]:
        """Resolved when the next look at a place is due; it must be watched."""
        due = self._places[place].due
        assert due is not None  # noqa: S101
        return due

    def has_grown(self, place: int) -> bool:
        """Whether it may hold noticeably more than at the last look."""
        return _is_below(scratch.free_space(self._root), self._places[place].left, _LEAST)

    async def passed_limit(self, child: RunningChild) -> str | None:
        """Measure a child's place: the limit that it has passed, as a result's `killed_by` names it."""
        state = self._places[child.place]
        left = scratch.free_space(self._root)
        state.due = asyncio.get_running_loop().create_future()  # what is written from now on is the next look's
        try:
            used = await self._measured(child.place)
            files = await self._unnamed_files(child)
            unnamed = files.bytes(self._limits[0])
        except TooManyMappingsError:
            return "limit of memory mappings"
        except HiddenFilesError:
            return "a process that hides which files it holds open"
        except OSError:  # this process is out of descriptors or memory: it looks again later
            return None
        if used.fault is not None:
            return used.fault
        if used.disk_bytes > self._limits[0]:
            return self._words[0]
        if used.disk_bytes + unnamed > self._limits[0]:
            return f"{self._words[0]}, counting deleted files that are open"
        if used.entries > self._limits[1]:
            return self._words[1]
        now, held = time.monotonic(), (used.disk_bytes + unnamed, used.entries)
        if held[0] < state.held[0] + _LEAST[0] and held[1] < state.held[1] + _LEAST[1]:
            watched = sum(other.due is not None for other in self._places.values())
            state.rests_until = now + min((_LOOK_S + used.entries * _FILE_S) * watched * _REST, _MAX_REST_S)
        state.left, state.held, state.moved = left, held, used.moved or files.moved
        return self._shortage(child.place, left, now)

    async def _unnamed_files(self, child: RunningChild) -> UnnamedFiles:
        """The unnamed files of all processes of a run.

        Who has lost its parent is the fork server's child. Where runs have no users of their own, only its files tell
        whose it was, by where they lay; without that it is ended.
        """
        files = UnnamedFiles()
        if child.pid is None:
            return files
        if self._fork_server is None:
            with contextlib.suppress(HiddenFilesError):  # not by its own doing: this machine does not show such things
                files.add(child.pid, child.user, self._root)
            files.moved = False
            return files
        for pid in descendants(child.pid):
            files.add(pid, child.user, self._root)
            await asyncio.sleep(0)
        within = f"{self._root}/{child.place}/" if child.user is None else None
        for orphan in self._fork_server.orphans():
            for pid in descendants(orphan):
                if child.user is not None and not _has_user(pid, child.user):
                    continue
                try:
                    files.add(pid, child.user, self._root, within)
                except HiddenFilesError:
                    if child.user is not None:
                        raise
                    if orphan in self._fork_server.orphans():  # still; if it was another's, that one follows
                        os.kill(orphan, signal.SIGKILL)
                await asyncio.sleep(0)
        return files

    async def _measured(self, place: int) -> scratch.Usage:
        folder = os.path.join(self._root, str(place))  # noqa: PTH118 - each 50 ms
        used, slice_ends = scratch.Usage(), time.monotonic() + _SLICE_S
        with contextlib.closing(scratch.measure(folder, *self._limits)) as slices:
            for found in slices:
                used = found
                if time.monotonic() > slice_ends:
                    await asyncio.sleep(0)
                    slice_ends = time.monotonic() + _SLICE_S
        return used

    def _shortage(self, place: int, left: tuple[int, int], now: float) -> str | None:
        """Who is to blame for a full disk: who holds the most of it, if it would not be full without what runs here."""
        if not scratch.is_scarce(left):
            self._short_since = None
            return None
        held = [sum(state.held[i] for state in self._places.values()) for i in range(2)]
        if scratch.is_scarce((left[0] + held[0], left[1] + held[1])):
            self._short_since = self._short_since or now
            if now - self._short_since > _SHORTAGE_S:
                raise RuntimeError(f"the disk of {self._root} is almost full, and not with what runs here")
            return None
        self._short_since = None
        kind = 0 if scratch.is_scarce((left[0], left[1] + held[1])) else 1
        biggest = max(self._places, key=lambda other: self._places[other].held[kind])
        if biggest == place:
            return "a disk that is almost full, of which it held the most"
        due = self._places[biggest].due
        if due is None:
            self._evict(biggest)
        elif not due.done():
            due.set_result(None)
        return None

    async def _tick(self) -> None:
        """Tell who waits when a look is due, while anybody does."""
        while any(state.due is not None for state in self._places.values()):
            await asyncio.sleep(_TICK_S)
            left, now = scratch.free_space(self._root), time.monotonic()
            for state in self._places.values():
                margin = [max((self._limits[i] - state.held[i]) // 2, _LEAST[i]) for i in range(2)]
                is_due = (state.moved or _is_below(left, state.left, margin)) and now >= state.rests_until
                if is_due and state.due is not None and not state.due.done():
                    state.due.set_result(None)


def _is_below(left: tuple[int, int], before: tuple[int, int], margin: Sequence[int]) -> bool:
    return any(now < then - least for now, then, least in zip(left, before, margin, strict=True))


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
_LEAST_MEMORY: Final = 512 * _MEBIBYTE  # what others have just freed is counted late


def unnamed_memory() -> int:
    """Bytes of the machine's memory that no process, cache or table of the kernel accounts for; 0 if not known.

    Drivers have some. So has whoever finds a way to keep memory without having it mapped, since no limit counts that.
    """
    try:
        lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
        kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
        return max(kib["MemTotal"] - sum(kib.get(name, 0) for name in _NAMED_MEMORY), 0) * 1024
    except (OSError, LookupError, ValueError):
        return 0


class MemoryWatch:
    """Notices a run beyond whose end the machine has more memory than its process had: what it held was not its own.

    Args:
        memory_mb: What a process may have.
        tell: Takes the words about a run that had more.
    """

    def __init__(self, memory_mb: int, tell: Callable[[str], None]) -> None:
        self._most = max(memory_mb * _MEBIBYTE, _LEAST_MEMORY)
        self._memory_mb = memory_mb
        self._tell = tell
        self._before: dict[int, int] = {}

    def starts(self, place: int) -> None:
        """Take note of the state before the first code of a child."""
        self._before[place] = unnamed_memory()

    @contextlib.contextmanager
    def ending(self, place: int) -> Iterator[None]:
        """Judge the end of a child: others take and give back memory too, but not with its start and its end."""
        before, at_end = self._before.pop(place, None), unnamed_memory()
        yield
        came_back = at_end - unnamed_memory()
        if before is not None and min(at_end - before, came_back) > self._most:
            self._tell(
                f"{came_back >> 20} MiB of memory that belonged to no process were free again when a piece of code "
                f"ended, which may have {self._memory_mb} MiB: it may know a way around that limit. Look at what it "
                "does; where code attacks on purpose, run it with a remote executor"
            )


_END_LIMIT_S: Final = 10.0
_POLL_S: Final = 0.05
_MAX_POLL_S: Final = 2.0
_PAGE_TABLES_KIB: Final = 32 * 1024
_PAGE_TABLES_KIB_PER_MIB: Final = 4  # twice what memory takes that lies together; a page here and there takes 8 KiB
_SHARE_OF_POLLING: Final = 0.1  # of the time, for all children; where looking takes long, it is done less often


class RunWatch:
    """Follows code under one set of limits."""

    def __init__(self, limits: Mapping[str, Any], disk: DiskWatch, fork_server: ForkServerLink) -> None:
        self._limits = limits
        self._disk = disk
        self._fork_server = fork_server
        self._following = 0

    async def follow(
        self, child: RunningChild, started: float, timeout_s: float, start: Coroutine[Any, Any, None] | None = None
    ) -> dict[str, Any]:
        """Wait until the code is done, or a limit is passed; `start`, if given, is part of it."""
        end = asyncio.create_task(_wait(child, start))
        self._following += 1
        try:
            with self._disk.watching(child.place):
                killed_by, timed_out = await self._passed_limit(child, started, timeout_s, end)
            exit_code = await end if killed_by is None else await self._killed(child, end)
        finally:
            self._following -= 1
            end.cancel()
        duration_s = time.monotonic() - started
        if exit_code is None:  # the process has ended
            exit_code = child.ended.result()
            killed_by = killed_by or signal_words(exit_code)
        facts = {"exit_code": exit_code, "timed_out": timed_out, "duration_s": duration_s, "killed_by": killed_by}
        return child.printed() | facts

    async def _killed(self, child: RunningChild, end: asyncio.Task[int | None]) -> int | None:
        """End a child and take its last output. Nobody waits long for one that the kernel can't end yet."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_LIMIT_S):
                await self.kill(child)
        if not child.ended.done():
            return -signal.SIGKILL
        await end
        return None

    async def _passed_limit(
        self, child: RunningChild, started: float, timeout_s: float, end: asyncio.Task[int | None]
    ) -> tuple[str | None, bool]:
        """Wait until a limit is passed, or the code has ended: what kills it, and whether that is the clock."""
        limits = self._limits
        pause_s = _POLL_S
        while True:
            self.allow_threads(child)  # not before the last look has found that it has no more than it may have
            left_s = started + timeout_s - time.monotonic()
            if left_s <= 0:
                return f"time limit of {timeout_s:g} s", True
            news: list[asyncio.Future[Any]] = [end, self._disk.due(child.place), child.alarm]
            await asyncio.wait(news, timeout=min(pause_s, left_s), return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                may_hold_more = not child.ended.done() and self._disk.has_grown(child.place)
                return await self._disk.passed_limit(child) if may_hold_more else None, False
            if child.is_broken:
                return "writing to the sandbox's own descriptor", False
            if child.output_bytes > limits["max_output_mb"] * _MEBIBYTE:
                return f"output limit of {limits['max_output_mb']} MiB", False
            looked_at = time.monotonic()
            passed = self._passed_kernel_limit(child) or await self._disk.passed_limit(child)
            if passed is not None:
                return passed, False
            looks_s = (time.monotonic() - looked_at) * self._following
            pause_s = min(max(_POLL_S, looks_s / _SHARE_OF_POLLING), _MAX_POLL_S)

    def _passed_kernel_limit(self, child: RunningChild) -> str | None:
        """What no rlimit bounds: threads where the user is not the child's alone, and page tables."""
        threads, page_tables_kib = _threads_and_page_tables(child.pid)
        if threads > self._limits["max_threads"]:
            return f"limit of {self._limits['max_threads']} threads"
        if page_tables_kib > _PAGE_TABLES_KIB + self._limits["memory_mb"] * _PAGE_TABLES_KIB_PER_MIB:
            return "limit of memory for page tables"
        return None

    def allow_threads(self, child: RunningChild) -> None:
        """Let a child whose user is ours start threads: as many as all calls together may, beside those there are."""
        if child.user is not None:
            return
        max_threads = self._limits["max_threads"]
        limit = shared_thread_limit(max_threads * self._limits["max_concurrency"])
        if limit is not None and abs(limit - child.thread_limit) > max_threads // 4:
            child.thread_limit = limit
            self._fork_server.limit_threads(child, limit)

    async def kill(self, child: RunningChild) -> None:
        """End a child; it may take the kernel some time."""
        while not child.ended.done():
            if not child.kill():
                self._fork_server.signal(child, signal.SIGKILL)
            await asyncio.wait([child.ended], timeout=_END_LIMIT_S)


async def _wait(child: RunningChild, start: Coroutine[Any, Any, None] | None) -> int | None:
    """The exit code of a piece of code, None if its process has ended; it may still have to be started."""
    if start is not None:
        try:
            await start
        except RuntimeError:  # ended before: by what an earlier piece of code has left behind
            return None
    return await child.wait()


def _threads_and_page_tables(pid: int | None) -> tuple[int, int]:
    """Threads of a process, and KiB in its page tables; zeros where there is no /proc."""
    threads, page_tables_kib = _numbers(f"/proc/{pid}/status")
    if threads and not page_tables_kib:  # its first thread has ended, others still run
        with contextlib.suppress(OSError):
            others = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - each 50 ms
            page_tables_kib = max((_numbers(f"/proc/{pid}/task/{number}/status")[1] for number in others), default=0)
    return threads, page_tables_kib


def _numbers(path: str) -> tuple[int, int]:
    """Threads and VmPTE of a /proc/PID/status; bytes, since the name in it is the code's to choose."""
    try:
        status = Path(path).read_bytes()
    except OSError:
        return 0, 0
    found = [re.search(rb"^%b:\s+(\d+)" % name, status, re.MULTILINE) for name in (b"Threads", b"VmPTE")]
    threads, page_tables_kib = (int(match[1]) if match else 0 for match in found)
    return threads, page_tables_kib
