"""What slime's settings make of the requests."""

from __future__ import annotations

from typing import Any

import pytest
from slime_policy import ANSWER, call, turn
from slime_run import CONTEXT_LENGTH
from slime_stage import Start

from strands_rollout.model.sampling import turn_seed

pytestmark = pytest.mark.slime

MULTIPLY = turn(call("multiply", a=17, b=2))


async def test_sampling_parameters_reach_the_engine(start: Start) -> None:
    stage = await start(
        {"calls": [MULTIPLY, ANSWER]}, rollout_temperature=0.7, rollout_top_k=50, rollout_stop=["\n\n\n"]
    )
    await stage.rollouts.train()
    for request in stage.engine.requests:
        sent = request.body["sampling_params"]
        assert (sent["temperature"], sent["top_k"], sent["top_p"], sent["stop"]) == (0.7, 50, 1.0, ["\n\n\n"])
        assert (sent["skip_special_tokens"], sent["no_stop_trim"]) == (False, True)
        assert request.body["return_logprob"] is True
    assert stage.rollouts.changed_params == []


async def test_the_samples_of_a_group_have_their_own_seeds_and_routing_keys(start: Start) -> None:
    stage = await start({"calls": [MULTIPLY, ANSWER]}, sglang_enable_deterministic_inference=True, rollout_seed=7)
    await stage.rollouts.train()
    seeds: dict[str | None, list[int]] = {}
    for request in stage.engine.requests:
        seeds.setdefault(request.key, []).append(request.body["sampling_params"]["sampling_seed"])
    assert [seeds[sample.session_id] for sample in stage.rollouts.samples] == [
        [7, turn_seed(7, 1)],
        [8, turn_seed(8, 1)],
    ]


async def test_a_named_models_router_gets_the_requests(start: Start) -> None:
    settings = {"model_name": "policy", "tools": ["slime_tools.multiply"]}
    stage = await start({"calls": [MULTIPLY, ANSWER]}, strands_rollout=settings)
    host, port = stage.engine.base_url.removeprefix("http://").split(":")
    # slime's own requests go on to the router of its first model
    stage.rollouts.args.sglang_model_routers = {"judge": ("127.0.0.1", 9), "policy": (host, int(port))}
    await stage.rollouts.train()
    assert [sample.status.value for sample in stage.rollouts.samples] == ["completed"] * 2
    assert (len(stage.engine.requests), stage.gateway.most_in_flight) == (4, 0)


async def test_a_model_that_slime_does_not_serve_fails_the_samples_in_words(start: Start) -> None:
    stage = await start({"calls": [MULTIPLY, ANSWER]}, strands_rollout={"model_name": "actor"})
    stage.rollouts.args.sglang_model_routers = {"judge": ("127.0.0.1", 9)}
    await stage.rollouts.train()
    for sample in stage.rollouts.samples:
        assert sample.status.value == "failed"
        assert "'actor'" in sample.metadata["strands_rollout"]["error"]
        assert "'judge'" in sample.metadata["strands_rollout"]["error"]


@pytest.mark.parametrize(
    ("limits", "length"),
    [
        ({"rollout_max_context_len": 900}, 900),
        ({"max_tokens_per_gpu": 450, "context_parallel_size": 2}, 900),
        ({"max_tokens_per_gpu": None, "context_length": 900}, 899),
        ({"rollout_max_context_len": 2000, "context_length": 900}, 899),
    ],
)
async def test_the_smallest_context_limit_holds(start: Start, limits: dict[str, Any], length: int) -> None:
    rambles = turn("thinking " * 2 * CONTEXT_LENGTH)
    budgets = {"rollout_max_response_len": 3000, "use_dynamic_batch_size": False}
    stage = await start({"rambles": [MULTIPLY, rambles]}, **budgets, **limits)
    await stage.rollouts.train()
    for sample in stage.rollouts.samples:
        assert (sample.status.value, len(sample.tokens)) == ("truncated", length)
        assert sample.metadata["strands_rollout"]["stop_reason"] == "context_length"
