"""Data files are whole or not there, tell where they come from, and are not made twice."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prep_scripts import DATA_PREP
from preparation.errors import PreparationError
from preparation.output import finish, unfinished
from prepared_result import Prepare
from problem_files import dapo_row, write_parquet

import strands_rollout

# what a run does, but it tells when it begins to write and then waits
STOPS_WHILE_WRITING = """
import sys
from pathlib import Path
from preparation.prepare import prepare
from preparation.request import Request

def stage(name, rows):
    def advance(done):
        if name == "writing":
            print("writing", flush=True)
            sys.stdin.read()
    return advance

folder = Path(sys.argv[1])
prepare(Request(dataset="x", path=folder / "source.parquet", out=folder / "out.jsonl"), stage)
"""


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_killed_run_leaves_no_data_and_what_it_leaves_is_removed_by_the_next(
    prepare: Prepare, tmp_path: Path, cache: Path
) -> None:
    source = write_parquet([dapo_row(number) for number in range(5)], tmp_path / "source.parquet")
    child = subprocess.Popen(
        [sys.executable, "-c", STOPS_WHILE_WRITING, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(DATA_PREP), "HF_DATASETS_CACHE": str(cache)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"writing\n"
        child.kill()
    left = names_in(tmp_path) - {"source.parquet"}
    assert len(left) == 1
    assert all(name.startswith(".out.jsonl.") and name.endswith(".partial") for name in left)
    assert len(prepare(source).rows) == 5
    assert names_in(tmp_path) == {"source.parquet", "out.jsonl", "out.jsonl.manifest.json"}


def test_an_error_while_writing_leaves_the_earlier_file_and_no_partial_one(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("earlier")
    with pytest.raises(UnicodeEncodeError), unfinished(path) as partial:
        partial.write_text("half\ud800", encoding="utf-8")
    assert names_in(tmp_path) == {"out.jsonl"}
    assert path.read_text() == "earlier"


def test_the_unfinished_file_of_a_living_run_is_not_removed_by_another(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with unfinished(path) as first, unfinished(path) as second:
        assert names_in(tmp_path) == {first.name, second.name}
        first.write_text("first")
        second.write_text("second")
        finish(second, path)
        finish(first, path)
    assert names_in(tmp_path) == {"out.jsonl"}
    assert path.read_text() == "first"


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(PreparationError, match=r"can't write .*out\.jsonl: No space left"):  # noqa: PT012, SIM117
        with unfinished(tmp_path / "out.jsonl") as partial:
            partial.unlink()
            partial.symlink_to("/dev/full")
            with partial.open("wb", buffering=0) as file:
                file.write(b"x")
    assert names_in(tmp_path) == set()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PreparationError, match="can't write in .*--out"), unfinished(tmp_path / "file" / "out.jsonl"):
        pass


def test_the_manifest_tells_source_counts_and_checksum(prepare: Prepare, tmp_path: Path) -> None:
    manifest = prepare([dapo_row(2), dapo_row(2), dapo_row(3)], split="train").manifest
    assert json.loads((tmp_path / "out.jsonl.manifest.json").read_text()) == manifest
    expected = {
        "format": 1,
        "dataset": str(tmp_path / "source.parquet"),
        "split": "train",
        "revision_requested": "main",
        "revision": None,
        "source": "local",
        "rows": 2,
        "rows_read": 3,
        "duplicates_removed": 1,
        "rejected": 0,
        "sha256": hashlib.sha256((tmp_path / "out.jsonl").read_bytes()).hexdigest(),
        "columns": ["prompt", "label", "metadata"],
        "strands_rollout": strands_rollout.__version__,
    }
    assert {key: manifest[key] for key in expected} == expected
    assert "local files" in manifest["revision_reason"]
    assert {"instruction", "arguments", "created"} <= manifest.keys()


def test_a_second_run_with_the_same_settings_does_nothing(prepare: Prepare, tmp_path: Path) -> None:
    first = prepare([dapo_row(2)])
    written = (tmp_path / "out.jsonl").stat().st_ino
    again = prepare(tmp_path / "source.parquet")
    assert again.done_before
    assert again.manifest == first.manifest
    assert (tmp_path / "out.jsonl").stat().st_ino == written
    assert not prepare(tmp_path / "source.parquet", force=True).done_before


def test_other_settings_another_source_and_a_changed_file_are_prepared_again(prepare: Prepare, tmp_path: Path) -> None:
    prepare([dapo_row(2), dapo_row(3)])
    source, out = tmp_path / "source.parquet", tmp_path / "out.jsonl"
    assert not prepare(source, limit=1).done_before
    assert not prepare(source).done_before
    out.write_text(out.read_text().replace('"8"', '"9"'))
    restored = prepare(source)
    assert not restored.done_before
    assert restored.labels == ["8", "12"]
    out.unlink()
    assert not prepare(source).done_before
    assert not prepare([dapo_row(4)]).done_before
    (tmp_path / "out.jsonl.manifest.json").write_text("[]")
    assert not prepare(source).done_before
