"""`scratch`: measuring and deleting directories with any content."""

import os
from pathlib import Path

import pytest

from strands_rollout.code_tool.sandbox import scratch


def measure(folder: Path, max_bytes: int = 1 << 40, max_entries: int = 10_000) -> scratch.Usage:
    *_, last = scratch.measure(str(folder), max_bytes, max_entries)
    return last


def nest(folder: Path, depth: int, name: str) -> None:
    """Create nested directories, also with a path that is too long for one call."""
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


def test_measure_counts_entries_and_each_files_blocks_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").write_bytes(b"x" * 100_000)
    (tmp_path / "again").hardlink_to(tmp_path / "a" / "file")
    (tmp_path / "link").symlink_to("/usr")
    used = measure(tmp_path)
    assert used.entries == 5
    assert 100_000 <= used.disk_bytes < 200_000
    assert (used.fault, used.is_incomplete) == (None, False)


def test_measure_stops_at_limits(tmp_path: Path) -> None:
    for n in range(50):
        (tmp_path / str(n)).write_bytes(bytes(8192))
    assert measure(tmp_path, max_entries=10).entries == 11
    assert measure(tmp_path, max_bytes=20_000).entries < 10


@pytest.mark.parametrize(("depth", "is_fault"), [(scratch.MAX_DEPTH - 1, False), (1900, True)])
def test_measure_reports_deep_tree_and_delete_removes_it(tmp_path: Path, depth: int, is_fault: bool) -> None:
    place = tmp_path / "place"
    place.mkdir()
    nest(place, depth, "d" * 200)
    before = open_descriptors()
    used = measure(place)
    assert (used.fault == f"more than {scratch.MAX_DEPTH} folders inside each other") == is_fault
    assert used.entries <= scratch.MAX_DEPTH + 1
    assert open_descriptors() <= before
    assert scratch.delete(str(place))
    assert not place.exists()


@pytest.mark.parametrize("swapped", ["link", "file", "nothing"])
def test_measure_ignores_entries_swapped_meanwhile(tmp_path: Path, swapped: str) -> None:
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


def test_delete_follows_no_links_and_needs_no_permissions(tmp_path: Path) -> None:
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
    assert ((outside / "precious").read_text(), outside.stat().st_mode & 0o777) == ("kept", 0o755)
    assert scratch.delete(str(place))  # already deleted
    place.symlink_to(outside)
    assert not scratch.delete(str(place))
    assert (outside / "precious").exists()
