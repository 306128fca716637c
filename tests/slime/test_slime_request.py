"""Requests to the engine: sampling parameters, seeds and context limits that follow from slime's arguments."""

from typing import Any

import pytest
from slime_policy import ANSWER, call, turn
from slime_run import CONTEXT_LENGTH
from slime_stage import Start

from strands_rollout.model.sampling import turn_seed

pytestmark = pytest.mark.slime

MULTIPLY = turn(call("multiply", a=17, b=2))


async def test_sampling_params_and_seed_reach_engine(start: Start) -> None:
    asked = {"rollout_temperature": 0.7, "rollout_top_k": 50, "rollout_stop": ["\n\n\n"]}
    seeded = {"sglang_enable_deterministic_inference": True, "rollout_seed": 7}
    stage = await start({"calls": [MULTIPLY, ANSWER]}, **asked, **seeded)
    await stage.rollouts.train()
    seeds: dict[str | None, list[int]] = {}
    for request in stage.engine.requests:
        sent = request.body["sampling_params"]
        seeds.setdefault(request.key, []).append(sent["sampling_seed"])
        assert (sent["temperature"], sent["top_k"], sent["top_p"], sent["stop"]) == (0.7, 50, 1.0, ["\n\n\n"])
        assert (sent["skip_special_tokens"], sent["no_stop_trim"]) == (False, True)
        assert request.body["return_logprob"] is True
    assert stage.rollouts.changed_params == []
    own = [seeds[sample.session_id] for sample in stage.rollouts.samples]
    assert own == [[7, turn_seed(7, 1)], [8, turn_seed(8, 1)]]


@pytest.mark.parametrize(
    ("limits", "length"),
    [
        ({"rollout_max_context_len": 900}, 900),
        ({"max_tokens_per_gpu": 450, "context_parallel_size": 2}, 900),
        ({"max_tokens_per_gpu": None, "context_length": 900}, 899),
        ({"rollout_max_context_len": 2000, "context_length": 900}, 899),
    ],
)
async def test_smallest_context_limit_holds(start: Start, limits: dict[str, Any], length: int) -> None:
    rambles = turn("thinking " * 2 * CONTEXT_LENGTH)
    budgets = {"rollout_max_response_len": 3000, "use_dynamic_batch_size": False}
    stage = await start({"rambles": [MULTIPLY, rambles]}, **budgets, **limits)
    await stage.rollouts.train()
    for sample in stage.rollouts.samples:
        assert (sample.status.value, len(sample.tokens)) == ("truncated", length)
        assert sample.metadata["strands_rollout"]["stop_reason"] == "context_length"
