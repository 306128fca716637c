"""What wandb itself writes of a step, read back from its file: numbers and table in one row, on slime's step."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb_file

pytestmark = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")

STEPS = """
import runpy, sys
from argparse import Namespace

import wandb

from strands_rollout import Sample, log_eval, log_rollout

def sample(index, turns, reward):
    facts = {"stop_reason": "completed", "turns": turns, "tool_calls": turns - 1, "weight_versions": ["3", "4"]}
    return Sample(index=index, group_index=1, prompt="What is 17 * 2?", response=f"It is 3{index}. \\U0001f642",
                  label=34, reward={"score": reward}, status=Sample.Status.COMPLETED,
                  metadata={"strands_rollout": facts})

args = Namespace(use_wandb=True, reward_key="score")
samples = [sample(4, 1, 1.0), sample(5, 4, -1.0)]
assert log_rollout(0, args, samples, None, 1.0) is False  # no run yet: nothing to log to
with wandb.init(project="agents", settings=wandb.Settings(silent=True)) as run:
    folder = run.settings.sync_dir
    log_rollout(7, args, samples, None, 1.0)
    wandb.log({"rollout/response_len/mean": 5.0, "rollout/step": 7})
    log_eval(8, args, {"aime": {"rewards": [1.0], "samples": samples[:1]}}, None)
reader, sys.argv[1] = sys.argv[1], folder
runpy.run_path(reader, run_name="__main__")
"""


def child_output(tmp_path: Path, *arguments: str) -> str:
    """The last line that Python prints, with wandb offline and all that it writes in a folder of the test's own."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "XDG_"))},
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        **{f"WANDB_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT")},
    }
    command = [sys.executable, *arguments]
    child = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    assert "metric failed" not in child.stderr
    return child.stdout.splitlines()[-1]


def test_wandb_gets_the_numbers_and_the_transcripts_of_a_step_in_one_row(tmp_path: Path) -> None:
    training, slimes_own, evaluation = json.loads(child_output(tmp_path, "-c", STEPS, wandb_file.__file__))
    assert training["rollout/step"] == slimes_own["rollout/step"] == 7
    assert (training["rollout/agent/turns/mean"], training["rollout/agent/turns/max"]) == (2.5, 4)
    assert (training["rollout/agent/samples"], training["rollout/agent/weight_version_spread/max"]) == (2, 1)
    assert (evaluation["eval/step"], evaluation["eval/aime/agent/turns/max"]) == (8, 1)
    # wandb's own step is left alone: it counts calls
    assert [row["_step"] for row in (training, slimes_own, evaluation)] == [0, 1, 2]
    first, second = rows_of(training["rollout/agent/transcripts"])
    same = {"step": 7, "group": 1, "weight versions": "3, 4", "prompt": "What is 17 * 2?", "label": "34"}
    assert same.items() <= first.items() & second.items()
    assert [(row["index"], row["why"], row["reward"], row["response"]) for row in (first, second)] == [
        (4, "best", 1.0, "It is 34. 🙂"),
        (5, "worst, median, most tool calls", -1.0, "It is 35. 🙂"),
    ]
    assert [row["index"] for row in rows_of(evaluation["eval/aime/agent/transcripts"])] == [4]


def rows_of(table: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
