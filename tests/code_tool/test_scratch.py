"""Directories of code: measured whatever is in them, emptied whatever is in them."""

import os
import time
from pathlib import Path

import pytest

from strands_rollout.code_tool.local.sandbox import scratch
from strands_rollout.code_tool.local.sandbox.scratch import settle
from strands_rollout.code_tool.local.supervisor_link import ScratchRoot


def measured(folder: Path, max_bytes: int = 1 << 40, max_entries: int = 10_000) -> scratch.Usage:
    *_, last = scratch.measure(str(folder), max_bytes, max_entries)
    return last


def nest(folder: Path, depth: int, name: str) -> None:
    """Make directories inside each other, also where their path is too long to be named."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        for _ in range(depth):
            Path(name).mkdir()
            os.chdir(name)
    finally:
        os.chdir(here)


def open_descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def test_usage_counts_every_entry_and_the_blocks_of_every_file_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").write_bytes(b"x" * 100_000)
    (tmp_path / "again").hardlink_to(tmp_path / "a" / "file")
    (tmp_path / "link").symlink_to("/usr")
    used = measured(tmp_path)
    assert used.entries == 5
    assert 100_000 <= used.disk_bytes < 200_000
    assert (used.fault, used.moved) == (None, False)


def test_a_sparse_file_counts_as_what_it_takes(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    assert measured(tmp_path).disk_bytes < 1 << 20


def test_measuring_stops_at_the_limits(tmp_path: Path) -> None:
    for n in range(50):
        (tmp_path / str(n)).write_bytes(bytes(8192))
    assert measured(tmp_path, max_entries=10).entries == 11
    assert measured(tmp_path, max_bytes=20_000).entries < 10


@pytest.mark.parametrize(("depth", "is_fault"), [(scratch.MAX_DEPTH - 1, False), (1900, True)])
def test_a_deep_tree_is_a_fault_of_the_code_and_is_deleted(tmp_path: Path, depth: int, is_fault: bool) -> None:
    place = tmp_path / "place"
    place.mkdir()
    nest(place, depth, "d" * 200)
    before = open_descriptors()
    used = measured(place)
    assert (used.fault == f"more than {scratch.MAX_DEPTH} folders inside each other") == is_fault
    assert used.entries <= scratch.MAX_DEPTH + 1
    assert open_descriptors() <= before
    assert scratch.delete(str(place))
    assert not place.exists()


def test_many_entries_are_measured_in_slices_and_an_unfinished_look_keeps_no_descriptor(tmp_path: Path) -> None:
    nest(tmp_path, 5, "d")
    for n in range(1000):
        (tmp_path / "d" / "d" / str(n)).touch()
    before = open_descriptors()
    looks = scratch.measure(str(tmp_path), 1 << 40, 10_000)
    assert [next(looks).entries for _ in range(4)] == [130, 258, 386, 514]
    looks.close()
    assert open_descriptors() <= before


@pytest.mark.parametrize("swapped", ["link", "file", "nothing"])
def test_what_is_swapped_while_it_is_measured_leads_nowhere_and_is_no_fault(tmp_path: Path, swapped: str) -> None:
    outside, place = tmp_path / "outside", tmp_path / "place"
    (place / "inner").mkdir(parents=True)
    outside.mkdir()
    for folder in (outside, place):
        for n in range(400):
            (folder / str(n)).write_bytes(bytes(8192))
    looks = scratch.measure(str(place), 1 << 40, 10_000)
    assert next(looks).entries < 401
    (place / "inner").rmdir()
    if swapped == "link":
        (place / "inner").symlink_to(outside)
    elif swapped == "file":
        (place / "inner").touch()
    *_, used = looks
    assert 400 <= used.entries <= 401
    assert used.fault is None


def test_a_look_leaves_no_access_time(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    os.utime(tmp_path / "inner", (1, 2))
    measured(tmp_path)
    assert (tmp_path / "inner").stat().st_atime == 1


def test_deleting_follows_no_link_and_stops_at_nothing(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    outside.chmod(0o755)
    (outside / "precious").write_text("kept")
    place = tmp_path / "place"
    (place / "a" / "b" / "c").mkdir(parents=True)
    (place / "a" / "to-file").symlink_to(outside / "precious")
    (place / "a" / "to-dir").symlink_to(outside)
    (place / "to-dir").symlink_to(outside)
    (place / "hard").hardlink_to(outside / "precious")
    os.mkfifo(place / "a" / "fifo")
    (place / os.fsdecode(b"odd \xff\n\x01 name")).mkdir()
    (place / "a" / "b").chmod(0)
    place.chmod(0)
    assert scratch.delete(str(place))
    assert not place.exists()
    assert (outside / "precious").read_text() == "kept"
    assert outside.stat().st_mode & 0o777 == 0o755
    assert scratch.delete(str(place))  # it is gone already
    place.symlink_to(outside)
    assert not scratch.delete(str(place))
    assert (outside / "precious").exists()


def test_a_root_is_made_where_it_is_asked_for_and_deleted_with_all_it_holds(tmp_path: Path) -> None:
    root = ScratchRoot(str(tmp_path))
    (Path(root.path) / "0").mkdir()
    assert Path(root.path).stat().st_mode & 0o777 == 0o711
    root.delete()
    root.delete()
    assert list(tmp_path.iterdir()) == []


_DAY_S = 24 * 3600


def _leaves_times(folder: Path) -> bool:
    file = folder / "probe"
    file.write_text("x")
    os.utime(file, (1, 2))
    file.read_text()
    return file.stat().st_atime > 2


def test_what_reading_would_change_is_changed_before(tmp_path: Path) -> None:
    if not _leaves_times(tmp_path):
        pytest.skip("this file system is mounted with noatime")
    now = time.time()
    inner = tmp_path / "inner"
    inner.mkdir()
    files = {"old": now - 2 * _DAY_S, "unread": now - 2 * _DAY_S, "fresh": now + 100}
    for name, accessed in files.items():
        (inner / name).write_text("x" * 5000)
        os.utime(inner / name, (accessed, now - 3 * _DAY_S))
    (inner / "link").symlink_to("old")
    (inner / "empty").touch()
    (inner / "dangling").symlink_to("nowhere")
    os.mkfifo(inner / "fifo")
    assert 0 < settle([str(tmp_path), str(tmp_path / "missing")]) <= _DAY_S

    def times() -> list[int]:
        return [path.lstat().st_atime_ns for path in (inner, *sorted(inner.iterdir()))]

    before = times()
    for name in (*files, "link", "empty"):
        (inner / name).read_text()
    assert times() == before
    assert (inner / "fresh").stat().st_atime == now + 100


def test_it_is_to_be_done_again_before_the_oldest_time_is_a_day_old(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    now = time.time()
    os.utime(file, (now + 60, now))  # not older than the change that this is itself
    assert settle([str(file)]) == pytest.approx(_DAY_S, abs=120)
    assert settle([]) == pytest.approx(_DAY_S, abs=60)
