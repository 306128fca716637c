"""slime's own training rollout with `strands_rollout.generate` and `reward_func`, up to its training data."""

from typing import Any

import pytest
from slime_install import observability
from slime_plans import PLANS, TURNS
from slime_policy import ANSWER, WRONG, call, turn
from slime_run import chat_row, trained_tokens
from slime_stage import Start

from strands_rollout.samples import rollout_id_field
from strands_rollout.slime_plugin.sample_contract import contract_violations

pytestmark = pytest.mark.slime

MULTIPLY = turn(call("multiply", a=17, b=2))


async def test_rollout_runs_code_tool(start: Start) -> None:
    code = call("execute_python_code", code="print(17 * 2)")
    stage = await start({"codes": [turn(code), ANSWER]}, ["codes"], strands_rollout={})
    await stage.rollouts.train()
    for sample in stage.rollouts.samples:
        assert "<tool_response>\n34\n</tool_response>" in sample.response
        assert sample.reward["score"] == 1.0


async def test_rollout_of_every_kind_of_episode_is_valid(start: Start) -> None:
    names = list(PLANS) * 2
    rows = [chat_row(PLANS[name].prompt(name, number)) for number, name in enumerate(names)]
    sizes = {"n_samples_per_prompt": 4, "global_batch_size": 4 * len(rows)}
    stage = await start(TURNS, rows=rows, log_multi_turn=True, **sizes)
    ranks = await stage.rollouts.train()
    samples = stage.rollouts.samples
    assert (stage.rollouts.raised, stage.rollouts.changed_params, stage.engine.violations) == ([], [], [])
    assert sorted(index for rank in ranks for index in rank["sample_indices"]) == list(range(4 * len(names)))
    turns = [sample.metadata["strands_rollout"].get("turns", 0) for sample in samples]
    assert sorted(rounds for rank in ranks for rounds in rank["round_number"]) == sorted(turns)
    for name, group in zip(names, stage.rollouts.groups, strict=True):
        plan = PLANS[name]
        for sample in group:
            facts = sample.metadata["strands_rollout"]
            assert (facts["stop_reason"], sample.status.value) == (plan.stop_reason, plan.status), (
                name,
                facts["error"],
            )
            assert any(sample.loss_mask) == plan.trained, name
            assert plan.must_read in sample.response
            assert sample.remove_sample is not plan.trained
            assert problems(sample, stage.tokenizer) == []
    assert sum(map(trained_tokens, ranks)) == sum(sum(sample.loss_mask) for sample in samples)


async def test_rollout_accepts_string_prompts_and_label_types(start: Start) -> None:
    rows = [
        {"prompt": "[[calls/0]] What is 17 times 2?", "label": 34},
        {"prompt": "[[calls/1]] What is 17 times 2?", "label": ""},
        chat_row("[[calls/2]] What is 17 times 2?", label=None),
    ]
    stage = await start({"calls": [MULTIPLY, ANSWER]}, rows=rows)
    await stage.rollouts.train()
    assert {sample.status.value for sample in stage.rollouts.samples} == {"completed"}
    scores = [[sample.reward["score"] for sample in group] for group in stage.rollouts.groups]
    assert scores == [[1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]]


@pytest.mark.parametrize("metadata", [None, {"source_name": "dapo"}, "a string"])
async def test_rollout_keeps_row_metadata_of_any_type(start: Start, metadata: Any) -> None:
    rows = [{**chat_row("[[calls/0]] What is 17 times 2?"), "metadata": metadata}]
    stage = await start({"calls": [MULTIPLY, ANSWER]}, rows=rows)
    await stage.rollouts.train()
    assert stage.rollouts.raised == []
    for sample in stage.rollouts.samples:
        assert len(sample.loss_mask) == sample.response_length
        if isinstance(metadata, dict | None):
            assert sample.status.value == "completed"
            kept = {key: value for key, value in sample.metadata.items() if key != "strands_rollout"}
            assert kept == (metadata or {})


async def test_rollout_group_rm_calls_reward_func_once(start: Start) -> None:
    stage = await start({"answers": [ANSWER], "errs": [WRONG]}, group_rm=True)
    await stage.rollouts.train()
    scores = [[sample.reward["score"] for sample in group] for group in stage.rollouts.groups]
    assert scores == [[1.0, 1.0], [-1.0, -1.0]]


async def test_rollout_metrics_of_slime_see_requests_and_tools(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    stage = await start({"calls": [MULTIPLY, turn(call("wait", seconds=0.2)), ANSWER]})
    caplog.set_level("INFO", logger=observability("rollout_metrics.log_rollout_data").__module__)
    await stage.rollouts.train()
    logged = next(message for message in caplog.messages if message.startswith("perf 0"))
    assert "'perf/non_generation_time/mean': 0.2" in logged
    if rollout_id_field(stage.rollouts.samples[0]):  # before 0.3.0 slime does not log it
        assert any("prefix_cache_hit_rate" in message for message in caplog.messages)
    for sample in stage.rollouts.samples:
        assert sample.weight_versions == ["default"] * 3
        assert sample.prefix_cache_info.total_prompt_tokens > len(sample.tokens)
    # the fake engine reports 0.001 s for every request
    if "e2e_latency" in observability("trace_utils").SGLANG_TRACE_META_KEYS:  # missing before slime 0.3.1
        assert "'perf/request/e2e_latency/mean': 0.001" in logged


def problems(sample: Any, tokenizer: Any) -> list[str]:
    """Return what this package's checker finds in a sample, without slime's trace, an attribute that slime adds."""
    trace = vars(sample).pop("trace")
    try:
        return contract_violations(sample, decode=tokenizer.decode, reward_key="score")
    finally:
        sample.trace = trace
