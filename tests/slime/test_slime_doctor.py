"""The doctor on the slime of these tests: found as THUDM's, and an episode goes through its loop."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from strands_rollout.diagnostics.diagnosis import Question
from strands_rollout.diagnostics.slime_episode import check_slime, check_slime_episode

pytestmark = pytest.mark.slime


def asked(slime_package: Path, tmp_path: Path, **env: str) -> Question:
    return Question(env={**os.environ, **env}, repository=tmp_path, slime_dir=slime_package)


def test_slime_is_recognized_and_its_version_is_told(slime_package: Path, tmp_path: Path) -> None:
    [found] = check_slime(asked(slime_package, tmp_path), lambda _: None)
    git = subprocess.run(["git", "-C", str(slime_package), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert found.status == "ok"
    assert f"slime 0.{2 if '0.2' in found.found else 3}" in found.found
    assert (git.stdout.strip()[:8] or "not known") in found.found


def test_an_episode_through_its_loop_comes_back_completed(slime_package: Path, tmp_path: Path) -> None:
    [found] = check_slime_episode(asked(slime_package, tmp_path), lambda _: None)
    assert found.status == "ok", found
    assert "as completed" in found.found
    assert "reward 1.0" in found.found


def test_an_episode_that_fails_in_it_is_an_error_that_says_why(slime_package: Path, tmp_path: Path) -> None:
    """The newest slime's Sample with a field that this package can't fill stands for a slime of the future."""
    broken = tmp_path / "slime"
    broken.mkdir()
    for file in slime_package.iterdir():
        (broken / file.name).symlink_to(file)
    (broken / "slime").unlink()
    subprocess.run(["cp", "-r", str(slime_package / "slime"), str(broken / "slime")], check=True)
    types = broken / "slime" / "utils" / "types.py"
    text = types.read_text()
    text += """

def _refused(self, *args, **kwargs):
    raise RuntimeError("this slime appends tokens in another way")


Sample.append_response_tokens = _refused
"""
    types.write_text(text)
    [found] = check_slime_episode(asked(broken, tmp_path), lambda _: None)
    assert found.status == "error"
    assert "came back from slime's loop as failed" in found.found
    assert "this slime appends tokens in another way" in found.found
