"""Directories of code: measured whatever is in them, emptied whatever is in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strands_rollout.errors import SandboxError
from strands_rollout.sandbox.inside import scratch
from strands_rollout.sandbox.scratch_root import ScratchRoot


def test_usage_counts_every_entry_and_the_blocks_on_disk(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").write_bytes(b"x" * 100_000)
    (tmp_path / "link").symlink_to("/usr")
    used = scratch.usage(str(tmp_path), 100)
    assert used.entries == 4
    assert 100_000 <= used.disk_bytes < 200_000


def test_a_sparse_file_counts_as_what_it_takes(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    assert scratch.usage(str(tmp_path), 100).disk_bytes < 1 << 20


def test_counting_stops_at_the_limit(tmp_path: Path) -> None:
    for n in range(50):
        (tmp_path / str(n)).touch()
    assert scratch.usage(str(tmp_path), 10).entries == 11


def test_a_tree_too_deep_to_name_counts_as_too_much(tmp_path: Path) -> None:
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        for _ in range(30):
            Path("d" * 200).mkdir()
            os.chdir("d" * 200)
    finally:
        os.chdir(here)
    assert scratch.usage(str(tmp_path), 1000).entries > 1000
    scratch.empty(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_emptying_follows_no_link_and_keeps_the_directory(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    place = tmp_path / "place"
    (place / "a" / "b" / "c").mkdir(parents=True)
    (place / "a" / "to-file").symlink_to(outside / "precious")
    (place / "a" / "to-dir").symlink_to(outside)
    (place / "to-dir").symlink_to(outside)
    (place / "hard").hardlink_to(outside / "precious")
    (place / "a" / "b").chmod(0)
    scratch.empty(str(place))
    assert list(place.iterdir()) == []
    assert (outside / "precious").read_text() == "kept"


def test_a_root_is_made_where_it_is_asked_for_and_deleted_with_all_it_holds(tmp_path: Path) -> None:
    root = ScratchRoot(str(tmp_path))
    (Path(root.path) / "0").mkdir()
    assert Path(root.path).stat().st_mode & 0o777 == 0o711
    root.delete()
    root.delete()
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_can_not_be_made_says_where(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="missing'.*name another as scratch_dir"):
        ScratchRoot(str(tmp_path / "missing"))
