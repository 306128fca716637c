"""slime's own logging calls `strands_rollout.log_rollout` and `log_eval`, and logs its own metrics as well."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from slime_install import observability
from slime_policy import ANSWER, WRONG, call, prompt, turn
from slime_run import CONTEXT_LENGTH, chat_row, write_rows
from slime_stage import Start

from strands_rollout import samples as finished_sample

pytestmark = pytest.mark.slime

PLANS = {
    "calls": [turn(call("multiply", a=17, b=2)), turn(call("wait", seconds=0.2)), ANSWER],
    "errs": [WRONG],
    "rambles": [turn("thinking " * 2 * CONTEXT_LENGTH)],
}
LOGGERS = {
    "custom_rollout_log_function_path": "strands_rollout.log_rollout",
    "custom_eval_rollout_log_function_path": "strands_rollout.log_eval",
}


@pytest.fixture(autouse=True)
def nothing_reported_yet() -> None:
    finished_sample._reported.clear()


def ours(caplog: pytest.LogCaptureFixture) -> dict[str, float]:
    """What our one line says."""
    (line,) = (message for message in caplog.messages if message.startswith("agent metrics"))
    return {name: float(value) for name, value in re.findall(r"(\S+)=(\S+)", line)}


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("metric failed")]


async def test_a_rollout_is_logged_by_us_and_by_slime(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    stage = await start(PLANS, **LOGGERS)
    await stage.rollouts.train()
    found = {name.removeprefix("rollout/agent/"): value for name, value in ours(caplog).items()}
    assert (found["samples"], found["turns/max"], found["tool_calls/max"]) == (6.0, 3.0, 2.0)
    assert found["stop_reason/completed"] == pytest.approx(2 / 3, abs=1e-3)
    assert (found["truncation/response_length"], found["removed"]) == (1.0, 0.0)
    assert (found["drift_measured"], found["weight_versions/max"]) == (6.0, 1.0)
    assert found["budget/response/max"] == 1.0
    assert failures(caplog) == []
    (slimes_own,) = (message for message in caplog.messages if message.startswith("perf 0"))
    assert "'rollout/truncated_ratio': 0.33" in slimes_own
    assert "'perf/non_generation_time/max'" in slimes_own
    # the slowest sample is split, with the time of its reward
    assert 0.2 <= found["slowest/tool_s"] <= found["slowest/total_s"]
    parts = [found[f"slowest/{name}"] for name in ("generate_s", "tool_s", "score_s", "other_s")]
    assert sum(parts) == pytest.approx(found["slowest/total_s"], rel=0.01)
    assert found["slowest/score_s"] > 0.0


async def test_an_evaluation_is_logged_by_us_and_by_slime(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    tasks = ["calls", "errs", "rambles"]
    rows = write_rows(tmp_path / "eval.jsonl", [chat_row(prompt(task, n)) for n, task in enumerate(tasks)])
    stage = await start(PLANS, **LOGGERS)
    stage.rollouts.evaluate_on({"name": "demo", "path": str(rows), "n_samples_per_eval_prompt": 2})
    await stage.rollouts.evaluate()
    found = ours(caplog)
    assert (found["eval/demo/agent/samples"], found["eval/demo/agent/turns/max"]) == (6.0, 3.0)
    assert failures(caplog) == []
    (slimes_own,) = (message for message in caplog.messages if message.startswith("eval 0"))
    assert "'eval/demo': 0.33" in slimes_own


@pytest.mark.parametrize(("train_steps", "step"), [(False, 6), (True, 12)])
async def test_the_step_is_the_one_that_slime_logs_under(
    start: Start, caplog: pytest.LogCaptureFixture, train_steps: bool, step: int
) -> None:
    caplog.set_level("INFO")
    stage = await start(PLANS, **LOGGERS, wandb_always_use_train_step=train_steps, global_batch_size=3)
    await stage.rollouts.train(6)
    found = ours(caplog)
    assert (found["rollout_id"], found["rollout/step"]) == (6.0, step)


class Writer:
    """A TensorBoard writer that keeps what it is given."""

    scalars: ClassVar[list[tuple[str, float, int]]] = []

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, float(value), step))


async def test_slimes_tensorboard_gets_the_numbers_once(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tensorboard_utils = observability("tensorboard_utils")
    monkeypatch.setattr(tensorboard_utils, "SummaryWriter", Writer)
    monkeypatch.setattr(Writer, "scalars", [])
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    stage = await start(PLANS, **LOGGERS, use_tensorboard=True, tb_project_name=None, tb_experiment_name=None)
    try:
        await stage.rollouts.train(4)
    finally:
        tensorboard_utils._TensorboardAdapter.clear_instances()
    assert [entry for entry in Writer.scalars if entry[0] == "rollout/agent/turns/max"] == [
        ("rollout/agent/turns/max", 3.0, 4)
    ]
    assert any(name == "rollout/truncated_ratio" for name, _, _ in Writer.scalars)
    assert failures(caplog) == []


SLIMES_STEP = """
import sys
from pathlib import Path

import wandb
from slime_install import observability
from slime_run import arguments

from strands_rollout.diagnostics.slime_episode import importable

with importable(Path(sys.argv[1])):
    from slime.utils.types import Sample

    log_rollout_data = observability("rollout_metrics.log_rollout_data")

    class Writer:
        def __init__(self, folder):
            pass

        def add_scalar(self, name, value, step):
            float(value)

    observability("tensorboard_utils").SummaryWriter = Writer
    facts = {"stop_reason": "completed", "turns": 2}
    sample = Sample(index=0, tokens=[1, 2], response="34", response_length=1, loss_mask=[1], reward={"score": 1.0},
                    status=Sample.Status.COMPLETED, metadata={"strands_rollout": facts})
    args = arguments("", use_wandb=True, use_tensorboard=True, tb_project_name="agents", tb_experiment_name="one",
                     custom_rollout_log_function_path="strands_rollout.log_rollout")
    with wandb.init(project="agents", settings=wandb.Settings(silent=True)) as run:
        observability("wandb_utils._init_wandb_common")()
        log_rollout_data(5, args, [sample], None, 1.0)
    print(run.settings.sync_dir)
"""


def test_in_slimes_wandb_run_both_are_on_the_same_step_and_each_is_there_once(
    slime_package: Path, tmp_path: Path
) -> None:
    pytest.importorskip("wandb")
    tests = Path(__file__).parents[1]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "XDG_"))},
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(map(str, [tests / "slime", tests / "support", tests, tests.parent])),
    }

    def output_of(*arguments: str) -> str:
        child = [sys.executable, *arguments]
        done = subprocess.run(child, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    folder = output_of("-c", SLIMES_STEP, str(slime_package)).splitlines()[-1]
    by_us, by_slime = json.loads(output_of(str(tests / "support" / "wandb_file.py"), folder))
    assert by_us["rollout/step"] == by_slime["rollout/step"] == 5
    assert by_us["rollout/agent/turns/mean"] == 2
    assert by_us["rollout/agent/transcripts"]["data"][0][0] == 5
    assert by_slime["rollout/response_len/mean"] == 1
