"""`DiskWatch` and `RunWatch`: disk limits, the run that is ended on a full disk, and how a run is ended."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strands_rollout.code_tool.sandbox import scratch
from strands_rollout.code_tool.sandbox import watch as disk_watch
from strands_rollout.code_tool.sandbox import watch as run_watch
from strands_rollout.code_tool.sandbox.children import RunningChild
from strands_rollout.code_tool.sandbox.watch import DeletedFiles, DiskWatch, HiddenFilesError, RunWatch

MEBIBYTE = 1 << 20
PLENTY = 1 << 40


class StandInDisk:
    """A file system of known size with the files of the slots and `others` bytes of other programs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root, self.size, self.files, self.others = root, PLENTY, PLENTY, 0
        monkeypatch.setattr(scratch, "free_space", self.free_space)

    def free_space(self, folder: str) -> tuple[int, int]:
        *_, used = scratch.measure(str(self.root), PLENTY, PLENTY)
        return self.size - self.others - used.disk_bytes, self.files - used.entries

    def put(self, slot: int, mebibytes: int, files: int = 1) -> Any:
        """Write files like a child in this slot, and return the child."""
        folder = self.root / str(slot)
        folder.mkdir(exist_ok=True)
        for number in range(files):
            (folder / f"{mebibytes}-{number}").write_bytes(bytes(mebibytes * MEBIBYTE))
        return SimpleNamespace(slot=slot, pid=None, user=None)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandInDisk]:
    return StandInDisk(monkeypatch, tmp_path)


def make_watch(
    disk: StandInDisk, evicted: list[int] | None = None, disk_mb: int = 64, max_files: int = 100
) -> DiskWatch:
    return DiskWatch(
        {"disk_mb": disk_mb, "max_files": max_files}, str(disk.root), (evicted if evicted is not None else []).append
    )


@pytest.mark.parametrize(
    ("mebibytes", "files", "message"), [(1, 1, None), (9, 8, "disk limit of 64 MiB"), (0, 101, "limit of 100 files")]
)
async def test_find_exceeded_limit_names_the_limit(
    disk: StandInDisk, mebibytes: int, files: int, message: str | None
) -> None:
    watch, child = make_watch(disk), disk.put(0, mebibytes, files)
    with watch.watching(0):
        assert await watch.find_exceeded_limit(child) == message


@pytest.mark.parametrize("is_forking", [True, False])
async def test_hidden_orphan_is_killed_unless_a_fork_is_pending(
    disk: StandInDisk, monkeypatch: pytest.MonkeyPatch, is_forking: bool
) -> None:
    def hide(self: DeletedFiles, pid: int, user: int | None, root: str, within: str | None = None) -> None:
        if within is not None:  # a search for the files of an orphan
            raise HiddenFilesError

    process = await asyncio.create_subprocess_exec("sleep", "60")
    monkeypatch.setattr(DeletedFiles, "add", hide)
    fork_server: Any = SimpleNamespace(orphans=lambda: {process.pid}, is_forking=is_forking)
    watch = DiskWatch({"disk_mb": 64, "max_files": 100}, str(disk.root), lambda _slot: None, fork_server)
    child = disk.put(0, 1)
    child.pid = os.getpid()
    with watch.watching(0):
        await watch.find_exceeded_limit(child)
    if is_forking:
        assert process.returncode is None
        process.kill()
    assert await process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("short_of", ["bytes", "files"])
async def test_full_disk_ends_only_the_largest_run(disk: StandInDisk, short_of: str) -> None:
    evicted: list[int] = []
    watch = make_watch(disk, evicted, max_files=2000)
    small, big, idle = disk.put(1, 1, 2), disk.put(2, 4, 3), disk.put(3, 8, 4)
    with watch.watching(1), watch.watching(2):
        with watch.watching(3):
            for child in (small, big, idle):
                assert await watch.find_exceeded_limit(child) is None
            if short_of == "bytes":
                disk.size = scratch.RESERVE_BYTES + 8 * MEBIBYTE
            else:
                disk.files = scratch.RESERVE_FILES + 3 + 2  # the three slots are folders too
            due = watch.due(3)
            assert await watch.find_exceeded_limit(small) is None
            assert due.done()  # the run is checked and ended immediately
            assert await watch.find_exceeded_limit(idle) == "a disk that is almost full, of which it held the most"
        assert await watch.find_exceeded_limit(small) is None
        assert evicted == [3]  # no call waits for the idle run, so the watch ends it
        scratch.delete(str(disk.root / "3"))
        watch.forget(3)
        assert await watch.find_exceeded_limit(small) is None
        if short_of == "files":
            disk.files = scratch.RESERVE_FILES + 2 + 4
        assert await watch.find_exceeded_limit(big) == "a disk that is almost full, of which it held the most"


async def test_disk_full_for_other_reasons_raises_after_a_while(disk, monkeypatch):
    watch, child = make_watch(disk), disk.put(0, 8)
    with watch.watching(0):
        disk.size, disk.others = 1 << 30, 1 << 30
        assert await watch.find_exceeded_limit(child) is None  # the run may already be ending
        monkeypatch.setattr(disk_watch, "_SHORTAGE_S", -1.0)
        with pytest.raises(RuntimeError, match="almost full, and not because of the code"):
            await watch.find_exceeded_limit(child)
        disk.others = 0
        assert await watch.find_exceeded_limit(child) is None


@pytest.mark.parametrize("ends", [True, False])
async def test_follow_does_not_wait_long_for_a_kill(ends, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run_watch, "_END_TIMEOUT_S", 0.2)
    sizes = {"memory_mb": 64, "disk_mb": 1, "max_output_mb": 1}
    limits = sizes | {"max_files": 9, "max_threads": 9, "max_concurrency": 1}
    signals = []
    child = RunningChild(0, 100, 1000)

    def signal(_: Any, number: int) -> None:
        signals.append(number)
        if ends and not child.ended.done():
            child.close_child_descriptors()
            child.ended.set_result(-9)

    fork_server: Any = SimpleNamespace(signal=signal, limit_threads=lambda *_: None)
    watch = RunWatch(limits, DiskWatch(limits, str(tmp_path), lambda _: None), fork_server)
    (tmp_path / "0").mkdir()
    async with asyncio.timeout(30):
        result = await watch.follow(child, time.monotonic(), 0.05)
    assert (result["exit_code"], result["timed_out"], result["killed_by"]) == (-9, True, "time limit of 0.05 s")
    assert signals[0] == 9
    assert child.is_ending
    child.close()
    if not ends:
        child.close_child_descriptors()
