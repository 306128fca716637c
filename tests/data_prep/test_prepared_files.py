"""Data files: written whole or not at all, not made twice, and never over a file that they should not replace."""

import hashlib
import json
from pathlib import Path

import pytest
from fake_sglang import dead_url
from prep_support import Prepare, dapo_row
from preparation.files import atomic_write
from preparation.prepare import arguments_of
from preparation.request import Request, check_usage
from preparation.rows import PreparationError
from preparation.source import open_source
from stand_in_hub import served

import strands_rollout
from strands_rollout.errors import ConfigError


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_atomic_write_keeps_the_earlier_file_on_an_error(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("earlier")
    with pytest.raises(KeyboardInterrupt), atomic_write(path):
        raise KeyboardInterrupt
    with pytest.raises(PreparationError, match=r"can't write .*out\.jsonl: No space left"), atomic_write(path):
        raise OSError(28, "No space left on device")
    assert (names_in(tmp_path), path.read_text()) == ({"out.jsonl"}, "earlier")
    with pytest.raises(PreparationError, match="can't write .*--out"), atomic_write(path / "other.jsonl"):
        pass


def test_manifest_holds_source_counts_and_checksum(prepare: Prepare, tmp_path: Path) -> None:
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


def test_prepare_runs_again_for_other_settings_or_files(prepare: Prepare, tmp_path: Path) -> None:
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


def hub_request(tmp_path: Path, **settings: str) -> Request:
    return Request(**{"dataset": "someone/problems", "out": tmp_path / "out.jsonl", **settings})


@pytest.mark.parametrize("force", [False, True])
def test_prepare_never_overwrites_its_inputs(prepare: Prepare, tmp_path: Path, *, force: bool) -> None:
    lines = "".join(json.dumps(dapo_row(number)) + "\n" for number in (2, 3))
    (tmp_path / "out.jsonl").write_text(lines)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "out.jsonl")
    for path in (tmp_path / "out.jsonl", tmp_path / "link.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="--from reads"):
            prepare(path, force=force)
    with pytest.raises(ConfigError, match="would overwrite .*--against reads"):
        prepare([dapo_row(2)], against=(tmp_path / "out.jsonl",), force=force)
    (tmp_path / "out.jsonl.rejected.jsonl").write_text(lines)
    with pytest.raises(ConfigError, match="would overwrite .*rejected.jsonl"):
        prepare(tmp_path / "out.jsonl.rejected.jsonl", force=True)
    assert (tmp_path / "out.jsonl").read_text() == lines


def test_prepare_replaces_a_foreign_file_only_with_force(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match=r"exists without out\.jsonl\.manifest\.json.*--force"):
        prepare([dapo_row(2)])
    assert (tmp_path / "out.jsonl").read_text() == "mine"
    assert prepare([dapo_row(2)], force=True).labels == ["8"]


def test_mirror_password_is_in_no_manifest_or_error(tmp_path: Path) -> None:
    bare = dead_url()
    request = hub_request(tmp_path, endpoint=bare.replace("://", "://someone:hidden@"))
    check_usage(request, force=False)
    assert arguments_of(request)["endpoint"] == bare
    with pytest.raises(PreparationError, match=f"asked {bare} for it") as refused:
        open_source(request)
    assert "hidden" not in str(refused.value)
    with served(status=500) as hub, pytest.raises(PreparationError, match="500") as refused:
        open_source(hub_request(tmp_path, endpoint=hub.base_url.replace("://", "://someone:hidden@")))
    assert "hidden" not in str(refused.value)
