"""The hub, its mirrors, and what is said where neither can be reached."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_sglang import dead_url
from prep_support import DATA_PREP, dapo_row, write_parquet
from preparation.request import Request
from preparation.rows import PreparationError
from preparation.source import open_source
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


def in_a_process(home: Path, script: str, *arguments: str, **env: str) -> tuple[int, str, str]:
    """Run a script: huggingface_hub reads its variables once, and keeps a session."""
    finished = subprocess.run(
        [sys.executable, DATA_PREP / script, *arguments],
        env={**os.environ, "PYTHONPATH": str(DATA_PREP.parent), "HF_HOME": str(home), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return finished.returncode, finished.stdout, finished.stderr


def test_a_mirror_serves_what_the_manifest_names_and_offline_the_cache_does_or_it_is_an_error(tmp_path: Path) -> None:
    parquet = write_parquet([dapo_row(2), dapo_row(3)], tmp_path / "served.parquet")
    arguments = ("--dataset", "someone/problems", "--out", str(tmp_path / "out.jsonl"), "--json")
    home = tmp_path / "home"
    with served("someone/problems", {"data/train-00000-of-00001.parquet": parquet}) as hub:
        mirror = hub.base_url.replace("://", "://someone:hidden@")
        code, stdout, stderr = in_a_process(home, "aime_2024.py", *arguments, "--mirror", mirror, "--revision", "v2")
    assert code == 0, stderr
    facts = json.loads(stdout)
    assert (facts["source"], facts["revision"], facts["rows"]) == ("mirror", REVISION, 2)
    assert facts["arguments"]["endpoint"] == hub.base_url
    assert "hidden" not in stdout + stderr + "".join(path.read_text() for path in tmp_path.glob("out.jsonl*"))
    asked = [line for line in hub.asked if "someone/problems" in line]
    assert asked[0].endswith("/revision/v2")
    assert all(REVISION in line for line in asked[1:]), "what is read is the commit that the manifest names"

    code, stdout, stderr = in_a_process(home, "aime_2024.py", *arguments, "--force", HF_HUB_OFFLINE="1")
    assert code == 0, stderr
    facts = json.loads(stdout)
    assert (facts["revision"], facts["rows"]) == (None, 2)
    assert "HF_HUB_OFFLINE" in facts["revision_reason"]
    absent = tmp_path / "absent.jsonl"
    code, stdout, stderr = in_a_process(home, "aime_2025.py", "--out", str(absent), HF_HUB_OFFLINE="1")
    assert code == 1
    assert "error: HF_HUB_OFFLINE" in stderr
    assert not absent.exists()


def test_without_the_datasets_package_it_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    source = write_parquet([dapo_row(2)], tmp_path / "source.parquet")
    asked = Request(dataset="someone/problems", path=source, out=tmp_path / "out.jsonl")
    said = r"the package 'datasets' is not installed; run: pip install -e '.\[data\]' \(in the repository\)"
    with pytest.raises(PreparationError, match=said):
        open_source(asked)
