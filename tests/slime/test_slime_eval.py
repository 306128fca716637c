"""slime's own evaluation with `strands_rollout.generate` and `reward_func`."""

from collections import Counter
from pathlib import Path

import pytest
from slime_policy import ANSWER, WRONG, call, prompt, turn
from slime_run import CONTEXT_LENGTH, chat_row, write_rows
from slime_stage import Start

pytestmark = pytest.mark.slime

PLANS = {
    "calls": [turn(call("multiply", a=17, b=2)), ANSWER],
    "errs": [WRONG],
    "rambles": [turn("thinking " * 2 * CONTEXT_LENGTH)],
}


async def staged(start, tmp_path, tasks, dataset=None, **more):
    rows = write_rows(tmp_path / "eval.jsonl", [chat_row(prompt(task, n)) for n, task in enumerate(tasks)])
    stage = await start(PLANS, **more)
    stage.rollouts.evaluate_on({"name": "demo", "path": str(rows), "n_samples_per_eval_prompt": 4, **(dataset or {})})
    return stage


async def test_eval_rollout_reports_accuracy(start: Start, tmp_path: Path) -> None:
    stage = await staged(start, tmp_path, ["calls", "errs", "rambles"])
    result = (await stage.rollouts.evaluate())["demo"]
    assert (result["rewards"], result["truncated"]) == ([1.0] * 4 + [0.0] * 8, [False] * 8 + [True] * 4)
    assert (stage.rollouts.raised, stage.engine.violations) == ([], [])
    # slime gives evaluated samples no session; both turns of an episode have the same key
    assert {sample.session_id for sample in result["samples"]} == {None}
    assert sorted(Counter(request.key for request in stage.engine.requests).values()) == [1] * 8 + [2] * 4
    assert stage.rollouts.calls == [True] * 12
    await stage.rollouts.train()
    assert stage.rollouts.calls[12:] == [False] * len(stage.rollouts.samples)


async def test_eval_rollout_keeps_shared_sampling_params(start: Start, tmp_path: Path) -> None:
    own = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    stage = await staged(start, tmp_path, ["calls", "rambles"], {"max_response_len": 300, **own})
    result = (await stage.rollouts.evaluate())["demo"]
    assert stage.rollouts.changed_params == []
    for request in stage.engine.requests:
        sent = request.body["sampling_params"]
        assert {name: sent[name] for name in own} == own
        assert sent["max_new_tokens"] <= 300
    assert max(sample.response_length for sample in result["samples"]) == 300


async def test_eval_rollout_uses_eval_max_context_len(start: Start, tmp_path: Path) -> None:
    stage = await staged(start, tmp_path, ["rambles"], eval_max_context_len=700, rollout_max_context_len=1200)
    stage.rollouts.args.rollout_max_response_len = 4096
    stage.rollouts.args.eval_datasets[0].max_response_len = 4096
    samples = (await stage.rollouts.evaluate())["demo"]["samples"]
    assert {len(sample.tokens) for sample in samples} == {700}
