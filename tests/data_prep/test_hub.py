"""The hub, its mirrors, and what is said where neither can be reached."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fake_sglang import dead_url
from prep_scripts import run_script, start_script
from preparation.request import Request
from preparation.rows import PreparationError
from preparation.source import open_source
from problem_files import dapo_row, write_parquet
from stand_in_hub import REVISION, served

from strands_rollout.errors import ConfigError


def request(tmp_path: Path, endpoint: str, **settings: str) -> Request:
    return Request(**{"dataset": "someone/problems", **settings}, endpoint=endpoint, out=tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (
            404,
            "RepoNotFound",
            "knows no data set someone/problems, or it is private; give the right one with --dataset",
        ),
        (403, "GatedRepo", "is gated: accept its terms on its page, then log in"),
        (404, "RevisionNotFound", "has no revision 'main'; see --revision"),
        (
            500,
            "",
            "500 .*Internal Server Error.*hf download --repo-type dataset someone/problems .* add --from problems",
        ),
        (200, "", "can't reach the data set someone/problems"),
    ],
)
def test_what_a_hub_refuses_is_said_with_what_to_do(tmp_path: Path, status: int, error: str, said: str) -> None:
    with served(status=status, error=error) as hub, pytest.raises(PreparationError, match=said):
        open_source(request(tmp_path, hub.base_url))
    assert len([line for line in hub.asked if "/api/datasets/" in line]) == 1, "asked once, not again and again"


def test_a_hub_that_cannot_be_reached_is_an_error_that_says_what_was_tried(tmp_path: Path) -> None:
    endpoint = dead_url()
    with pytest.raises(PreparationError, match=f"asked {endpoint} for it, and got .*--mirror URL"):
        open_source(request(tmp_path, endpoint))


def test_an_impossible_name_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dataset a/b/c: "):
        open_source(request(tmp_path, dead_url(), dataset="a/b/c"))


def test_a_mirror_serves_what_the_manifest_names_and_offline_the_cache_does_or_it_is_an_error(tmp_path: Path) -> None:
    parquet = write_parquet([dapo_row(2), dapo_row(3)], tmp_path / "served.parquet")
    out = tmp_path / "out.jsonl"
    with served("someone/problems", {"data/train-00000-of-00001.parquet": parquet}) as hub:
        arguments = ("--dataset", "someone/problems", "--out", str(out), "--json")
        more = ("--mirror", hub.base_url, "--revision", "v2")
        finished = run_script("aime_2024.py", *arguments, *more, HF_HOME=str(tmp_path / "home"))
    assert finished.returncode == 0, finished.stderr
    facts = json.loads(finished.stdout)
    assert (facts["source"], facts["revision"], facts["rows"]) == ("mirror", REVISION, 2)
    asked = [line for line in hub.asked if "someone/problems" in line]
    assert asked[0].endswith("/revision/v2")
    assert all(REVISION in line for line in asked[1:]), "what is read is the commit that the manifest names"
    offline = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    with start_script("aime_2024.py", *arguments, "--force", **offline) as cached:
        absent = run_script("aime_2025.py", "--out", str(tmp_path / "absent.jsonl"), **offline)
        stdout, stderr = cached.communicate()
    assert cached.returncode == 0, stderr
    facts = json.loads(stdout)
    assert (facts["revision"], facts["rows"]) == (None, 2)
    assert "HF_HUB_OFFLINE" in facts["revision_reason"]
    assert absent.returncode == 1
    assert absent.stderr.lstrip().startswith("error: HF_HUB_OFFLINE")
    assert "Traceback" not in absent.stderr
    assert not (tmp_path / "absent.jsonl").exists()


def test_without_the_datasets_package_it_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    source = write_parquet([dapo_row(2)], tmp_path / "source.parquet")
    asked = Request(dataset="someone/problems", path=source, out=tmp_path / "out.jsonl")
    said = r"the package 'datasets' is not installed; run: pip install -e '.\[data\]' \(in the repository\)"
    with pytest.raises(PreparationError, match=said):
        open_source(asked)
