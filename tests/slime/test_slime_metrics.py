"""`log_rollout` and `log_eval` called by slime's own logging, which also logs its own metrics."""

import re

import pytest
from slime_policy import ANSWER, WRONG, call, prompt, turn
from slime_run import CONTEXT_LENGTH, chat_row, write_rows
from slime_stage import Start

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


def ours(caplog: pytest.LogCaptureFixture) -> dict[str, float]:
    """Return the metrics in this package's log line."""
    (line,) = (message for message in caplog.messages if message.startswith("agent metrics"))
    return {name: float(value) for name, value in re.findall(r"(\S+)=(\S+)", line)}


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("metric failed")]


async def test_log_rollout_logs_beside_slime(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    stage = await start(PLANS, **LOGGERS)
    await stage.rollouts.train()
    found = {name.removeprefix("rollout/agent/"): value for name, value in ours(caplog).items()}
    assert (found["samples"], found["turns/max"], found["tool_calls/max"]) == (6.0, 3.0, 2.0)
    assert found["stop_reason/completed"] == pytest.approx(2 / 3, abs=1e-3)
    assert (found["truncation/response_length"], found["removed"]) == (1.0, 0.0)
    assert (found["drift_measured"], found["weight_versions/max"]) == (6.0, 1.0)
    assert (found["budget/response/max"], failures(caplog)) == (1.0, [])
    (slimes_own,) = (message for message in caplog.messages if message.startswith("perf 0"))
    assert "'rollout/truncated_ratio': 0.33" in slimes_own
    assert "'perf/non_generation_time/max'" in slimes_own
    # the time of the reward comes from slime's trace
    assert found["slowest/score_s"] > 0.0


async def test_log_eval_logs_beside_slime(start, tmp_path, caplog) -> None:
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
async def test_log_rollout_uses_slimes_step(start, caplog, train_steps, step) -> None:
    caplog.set_level("INFO")
    stage = await start(PLANS, **LOGGERS, wandb_always_use_train_step=train_steps, global_batch_size=3)
    await stage.rollouts.train(6)
    found = ours(caplog)
    assert (found["rollout_id"], found["rollout/step"]) == (6.0, step)
