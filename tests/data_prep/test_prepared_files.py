"""Requests that would read or overwrite something else than they name are refused, and nobody's password is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_sglang import dead_url
from prep_scripts import run_script
from preparation.data_set import DataSet
from preparation.errors import PreparationError
from preparation.manifest import arguments_of
from preparation.request import Request
from preparation.source import open_source
from preparation.usage import check_usage
from prepared_result import Prepare
from problem_files import dapo_row, problem, write_parquet
from stand_in_hub import served

from strands_rollout.errors import ConfigError


def hub_request(tmp_path: Path, **settings: str) -> Request:
    return Request(**{"dataset": "someone/problems", "out": tmp_path / "out.jsonl", **settings})


def test_a_local_folder_of_the_hub_ids_name_is_never_read_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_usage(hub_request(tmp_path), force=False)
    write_parquet([dapo_row(2)], tmp_path / "someone/problems/data/train-00000-of-00001.parquet")
    with pytest.raises(ConfigError, match=r"there is a local .*someone/problems.*--from someone/problems"):
        check_usage(hub_request(tmp_path), force=True)


@pytest.mark.parametrize("force", [False, True])
def test_what_is_read_is_never_overwritten(prepare: Prepare, tmp_path: Path, *, force: bool) -> None:
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


def test_a_file_without_a_manifest_is_replaced_only_if_forced(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match=r"is there without out\.jsonl\.manifest\.json.*--force"):
        prepare([dapo_row(2)])
    assert (tmp_path / "out.jsonl").read_text() == "mine"
    assert prepare([dapo_row(2)], force=True).labels == ["8"]


@pytest.mark.parametrize(
    "endpoint", ["mirror.invalid", "someone:hidden@mirror.invalid", "ftp://someone:hidden@a.invalid"]
)
def test_a_mirror_without_a_scheme_is_wrong_usage(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(ConfigError, match="no scheme http or https") as refused:
        check_usage(hub_request(tmp_path, endpoint=endpoint), force=False)
    assert "hidden" not in str(refused.value)


def test_the_mirrors_password_is_in_no_manifest_and_no_error(tmp_path: Path) -> None:
    bare = dead_url()
    request = hub_request(tmp_path, endpoint=bare.replace("://", "://someone:hidden@"))
    check_usage(request, force=False)
    assert arguments_of(request, None)["endpoint"] == bare
    with pytest.raises(PreparationError, match=f"asked {bare} for it") as refused:
        open_source(request)
    assert "hidden" not in str(refused.value)
    with served(status=500) as hub, pytest.raises(PreparationError, match="500") as refused:
        open_source(hub_request(tmp_path, endpoint=hub.base_url.replace("://", "://someone:hidden@")))
    assert "hidden" not in str(refused.value)


def test_the_mirrors_password_is_in_nothing_that_a_run_writes(tmp_path: Path) -> None:
    parquet = write_parquet([dapo_row(2), dapo_row(3)], tmp_path / "served.parquet")
    out = tmp_path / "out.jsonl"
    with served("someone/problems", {"data/train-00000-of-00001.parquet": parquet}) as hub:
        finished = run_script(
            *("aime_2024.py", "--dataset", "someone/problems", "--out", str(out)),
            HF_ENDPOINT=hub.base_url.replace("://", "://someone:hidden@"),
            HF_HOME=str(tmp_path / "home"),
        )
    written = "".join(path.read_text() for path in tmp_path.glob("out.jsonl*"))
    assert "hidden" not in finished.stdout + finished.stderr + written
    assert finished.returncode == 0, finished.stderr
    assert json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["arguments"]["endpoint"] == hub.base_url


@pytest.mark.parametrize("split", ["train", "train[:5]", "train[:1%]+train[9%:]", "train+test", "all"])
def test_a_part_of_a_split_is_compared_as_the_split_is(tmp_path: Path, split: str) -> None:
    shown = DataSet("x.py", "a/b", "someone says so", None, "train", "gsm8k-{split}", ("gsm8k-test",))
    assert shown.evaluation_files(tmp_path, split) == (tmp_path / "gsm8k-test.jsonl",)
    assert shown.evaluation_files(tmp_path, "test[:5]") == ()


def test_a_file_whose_name_looks_like_a_pattern_is_read_and_such_a_folder_is_wrong_usage(
    prepare: Prepare, tmp_path: Path
) -> None:
    path = tmp_path / "a[1]*b" / "x[2]?.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps(dapo_row(2)) + "\n")
    assert prepare(path).problems == [problem(2)]
    with pytest.raises(ConfigError, match="rename it, or name one of its files"):
        prepare(path.parent)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_source_is_said_to_be_empty(prepare: Prepare, tmp_path: Path, content: str) -> None:
    (tmp_path / "empty.jsonl").write_text(content)
    with pytest.raises(PreparationError, match=r"can't read .*empty\.jsonl as a data set: it is empty"):
        prepare(tmp_path / "empty.jsonl")
