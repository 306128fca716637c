"""The doctor on the slime of these tests: found as THUDM's, with all files that a run needs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from slime_install import find_slime

from strands_rollout.doctor.question import Question
from strands_rollout.doctor.slime_checkout import TESTED_COMMIT, check_slime

pytestmark = pytest.mark.slime


def test_slime_is_recognized_and_its_commit_is_told(tmp_path: Path) -> None:
    folder = find_slime()
    if folder is None:
        pytest.skip("needs THUDM/slime: set SLIME_PATH to a checkout of it")
    found = check_slime(Question(env=dict(os.environ), repository=tmp_path, slime_dir=folder), lambda _: None)
    git = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    assert [finding.name for finding in found] == ["slime"]
    assert found[0].status == ("ok" if git.stdout.strip() == TESTED_COMMIT else "warning")
    assert git.stdout.strip()[:8] in found[0].found
