"""What slime's settings make of the requests, and what the engine's replay data makes of the samples."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_sglang import Reply
from slime_policy import ANSWER, Asked, call, turn
from slime_run import CONTEXT_LENGTH
from slime_stage import Start
from slime_trainer import trained_tokens

pytestmark = pytest.mark.slime

MULTIPLY = turn(call("multiply", a=17, b=2))
LAYERS, TOP_K = 2, 3
TOO_LONG = "The input (9 tokens) is longer than the model's context length (5 tokens)."


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
    keys = {
        request.headers["X-SMG-Routing-Key"]: request.body["sampling_params"]["sampling_seed"]
        for request in stage.engine.requests
    }
    assert sorted(keys.values()) == [7, 8]
    assert set(keys) == {sample.session_id for sample in stage.rollouts.samples}


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


def with_top_p(tokenizer: Any, text: str) -> Reply:
    """A turn with two kept ids for each token, as an engine that replays top-p answers."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    kept = [kept for token in ids for kept in (token, token + 1)]
    return Reply.tokens(ids, top_p_token_ids=kept, top_p_token_offsets=list(range(0, len(kept) + 1, 2)))


async def test_top_p_replay_data_stays_aligned_with_the_tokens(start: Start) -> None:
    stage = await start({"calls": [MULTIPLY, ANSWER]}, rollout_top_p=0.9)
    stage.policy.plans["calls"] = [with_top_p(stage.tokenizer, text) for text in (MULTIPLY, ANSWER)]
    ranks = await stage.rollouts.train()
    assert stage.engine.requests[0].body["sampling_params"]["custom_params"] == {"return_top_p_token_ids": True}
    for sample in stage.rollouts.samples:
        kept = np.diff(np.asarray(sample.rollout_top_p_token_offsets)).tolist()
        assert kept == [2 * mask for mask in sample.loss_mask]
    assert all(trained_tokens(rank) for rank in ranks)


@pytest.mark.parametrize("plan", ["faulty", "faultylater", "overlong"])
async def test_a_sample_without_replay_data_does_not_break_a_top_p_batch(start: Start, plan: str) -> None:
    stage = await start({"answers": [ANSWER], "other": [ANSWER]}, rollout_top_p=0.9)
    answer, calls = (with_top_p(stage.tokenizer, text) for text in (ANSWER, MULTIPLY))
    refused = Reply.status(422, "refused")
    stage.policy.plans["answers"] = [answer]
    stage.policy.plans["other"] = {
        "faulty": [refused],
        "faultylater": [calls, refused],
        "overlong": [Reply.status(400, {"error": {"message": TOO_LONG}})],
    }[plan]
    ranks = await stage.rollouts.train()
    assert sum(map(trained_tokens, ranks)) == 2 * len(answer.ids)


def with_experts(tokenizer: Any, text: str) -> Callable[[Asked], Reply]:
    """A turn with the routed experts of the whole sequence but its last token."""

    def reply(asked: Asked) -> Reply:
        ids = tokenizer.encode(text, add_special_tokens=False)
        rows = asked.input_length + len(ids) - 1
        experts = np.arange(1, 1 + rows * LAYERS * TOP_K, dtype=np.int32)
        return Reply.tokens(ids, routed_experts=base64.b64encode(experts.tobytes()).decode())

    return reply


ROUTING = {"use_rollout_routing_replay": True, "num_layers": LAYERS, "moe_router_topk": TOP_K}


async def test_routing_replay_is_asked_for_and_covers_the_whole_sample(start: Start) -> None:
    stage = await start({"calls": [MULTIPLY, ANSWER]}, **ROUTING)
    stage.policy.plans["calls"] = [with_experts(stage.tokenizer, text) for text in (MULTIPLY, ANSWER)]
    await stage.rollouts.train()
    assert all(request.body.get("return_routed_experts") for request in stage.engine.requests)
    for sample in stage.rollouts.samples:
        assert tuple(sample.rollout_routed_experts.shape) == (len(sample.tokens) - 1, LAYERS, TOP_K)


async def test_a_sample_without_routing_data_does_not_break_a_replayed_batch(start: Start) -> None:
    stage = await start({"calls": [MULTIPLY, ANSWER], "refused": [Reply.status(422, "refused")]}, **ROUTING)
    stage.policy.plans["calls"] = [with_experts(stage.tokenizer, text) for text in (MULTIPLY, ANSWER)]
    ranks = await stage.rollouts.train()
    for rank in ranks:
        for tokens, experts in zip(rank["tokens"], rank["rollout_routed_experts"], strict=True):
            assert tuple(experts.shape) == (len(tokens) - 1, LAYERS, TOP_K)
