"""`tests/experiments/run.sh` with a stand-in for the command: which runs it makes, and that none is made twice."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "experiments/run.sh"
STAND_IN = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
mkdir -p "$3" && touch "$3/summary.json"
"""


def run(tmp_path: Path, *words: str) -> list[str]:
    """The command lines of one call of the script."""
    command, calls = tmp_path / "bin/strands-rollout", tmp_path / "calls"
    command.parent.mkdir(exist_ok=True)
    command.write_text(STAND_IN)
    command.chmod(0o755)
    calls.write_text("")
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "CALLS": str(calls)}
    subprocess.run(["bash", str(SCRIPT), str(tmp_path / "runs"), *words], check=True, env=environment, timeout=60)
    return calls.read_text().splitlines()


def test_every_variant_is_run_with_every_seed_and_every_fault_once(tmp_path: Path) -> None:
    calls = run(tmp_path)
    assert len(calls) == 3 * 3 + 4
    assert calls[0] == f"train --out {tmp_path}/runs/tito-0 --steps 60 --json --seed 0 --rollout tito"
    assert sum("--unchecked --ablation" in call for call in calls) == 4


def test_a_run_that_is_over_is_not_made_again(tmp_path: Path) -> None:
    assert len(run(tmp_path, "tito")) == 3
    (tmp_path / "runs/tito-1/summary.json").unlink()
    again = run(tmp_path, "tito")
    assert [call.split()[2] for call in again] == [f"{tmp_path}/runs/tito-1"]
