"""`experiments/run.sh` with stand-ins for its commands: which runs it makes, and that none is made twice."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "experiments/run.sh"


def run(tmp_path: Path, *words: str) -> list[str]:
    """The command lines of one call of the script."""
    commands, calls = tmp_path / "bin", tmp_path / "calls"
    commands.mkdir(exist_ok=True)
    # leaves what tells that it is over in the folder that follows --out
    lines = ['echo "python $*" >> "$CALLS"', 'while [[ "$1" != --out ]]; do shift; done', 'mkdir -p "$2"']
    (commands / "python").write_text("\n".join(["#!/usr/bin/env bash", *lines, 'touch "$2"/{summary,training}.json\n']))
    (commands / "python").chmod(0o755)
    calls.write_text("")
    told = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "CALLS": str(calls)}
    command = ["bash", str(SCRIPT), str(tmp_path / "runs"), *words]
    subprocess.run(command, check=True, env=told, timeout=300)
    return calls.read_text().splitlines()


def command_line(tmp_path: Path, rollout: str, name: str, options: str) -> str:
    return f"python -m experiments --rollout {rollout} train --out {tmp_path}/runs/{name} {options}"


def test_both_policies_are_trained_in_every_way_with_every_seed(tmp_path: Path) -> None:
    calls = run(tmp_path)
    assert calls[0] == command_line(tmp_path, "tito", "tito-1", "--steps 30 --json --seed 1")
    assert sum("--steps 30" in call for call in calls) == 3 * 3 + 1 + 1
    assert sum("--steps 10" in call for call in calls) == 3 * 2
    assert sum("--steps 1 " in call for call in calls) == 4 * 2
    model = f"{tmp_path}/runs/respelled-model"
    options = f"--steps 10 --json --seed 3 --model {model}"
    assert command_line(tmp_path, "tito", "respelled-tito-3", options) in calls
    assert sum("-m experiments.shipped_model " in call for call in calls) == 1
    assert "--ablation tool-output-rewarded train" in calls[-1]


def test_a_run_that_is_over_is_not_made_again(tmp_path: Path) -> None:
    assert len(run(tmp_path, "shipped")) == 9
    (tmp_path / "runs/tito-1/summary.json").unlink()
    again = run(tmp_path, "shipped")
    assert again == [command_line(tmp_path, "tito", "tito-1", "--steps 30 --json --seed 1")]
