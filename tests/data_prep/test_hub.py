"""The hub and its mirrors, and the errors if none of them has the data set."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prep_support import DATA_PREP, dapo_row, write_parquet
from preparation.request import Request
from preparation.rows import PreparationError
from preparation.source import open_source
from stand_in_hub import REVISION, served


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (
            404,
            "RepoNotFound",
            "has no data set someone/problems, or the data set is private; name another data set with --dataset",
        ),
        (403, "GatedRepo", "is gated: accept its terms on http://.*/datasets/someone/problems, then log in"),
        (
            500,
            "",
            "500 .*Internal Server Error.*hf download --repo-type dataset someone/problems .* add --from problems",
        ),
    ],
)
def test_open_source_error_names_the_remedy(tmp_path: Path, status: int, error: str, said: str) -> None:
    with served(status=status, error=error) as hub, pytest.raises(PreparationError, match=said):
        open_source(Request(dataset="someone/problems", endpoint=hub.base_url, out=tmp_path / "out.jsonl"))
    assert len([line for line in hub.asked if "/api/datasets/" in line]) == 1, "the request is not retried"


def in_a_process(home: Path, script: str, *arguments: str, **env: str) -> tuple[int, str, str]:
    """Run a script in a new process, because huggingface_hub reads its variables once and keeps a session."""
    finished = subprocess.run(
        [sys.executable, DATA_PREP / script, *arguments],
        env={**os.environ, "PYTHONPATH": str(DATA_PREP.parent), "HF_HOME": str(home), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return finished.returncode, finished.stdout, finished.stderr


@pytest.mark.end_to_end
def test_prepare_from_a_mirror_then_offline_from_the_cache(tmp_path: Path) -> None:
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
    assert all(REVISION in line for line in asked[1:]), "the files come from the commit in the manifest"

    code, stdout, stderr = in_a_process(home, "aime_2024.py", *arguments, "--force", HF_HUB_OFFLINE="1")
    assert code == 0, stderr
    facts = json.loads(stdout)
    assert (facts["revision"], facts["rows"]) == (None, 2)
    assert "HF_HUB_OFFLINE" in facts["revision_reason"]


def test_prepare_error_of_a_gated_data_set_names_its_page(tmp_path: Path) -> None:
    """The hub describes a gated data set to anyone, and refuses its files."""
    (tmp_path / "file").write_text("Question\n?\n")
    files = dict.fromkeys(("README.md", "gpqa_diamond.csv"), tmp_path / "file")
    with served("Idavidrein/gpqa", files, gated=True) as hub:
        arguments = ("gpqa-diamond", "--mirror", hub.base_url, "--out", str(tmp_path / "out.jsonl"))
        code, _, stderr = in_a_process(tmp_path / "home", "benchmark.py", *arguments)
    assert code == 1
    said = f"is gated: accept its terms on {hub.base_url}/datasets/Idavidrein/gpqa, then log in with `hf auth login`"
    assert said in stderr
