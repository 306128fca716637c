"""Parameters that reach a worker behind the real routers, and the router of a named model."""

import asyncio
import base64
from array import array
from typing import Any

import pytest
from episode_stage import SAMPLED, episodes_on, facts_of, new_samples
from fake_sglang import FakeSGLang, Reply
from gateway_stage import NAMES, OWN_VERSION, SETTINGS, ends_of, gateway_before, versions_of
from harness import ANSWER, args_for, ids_of
from worker_front import WorkerFront

from strands_rollout import Sample, generate
from strands_rollout.model.sampling import turn_seed
from strands_rollout.slime_plugin.reward import reward_func

pytestmark = pytest.mark.real
EPISODES = 4
# parameters that slime may pass to `generate`, in training or evaluation; with top_k 1 the policy is
# greedy, and solves each of these problems with one call
OF_SLIME = {
    **SAMPLED,
    "top_p": 0.95,
    "top_k": 1,
    "min_new_tokens": 3,
    "sampling_seed": 7,
    "stop": ["\n\n\n"],
    "stop_token_ids": [0],
}
# the other parameters of SGLang 0.5.23; slime's evaluation sets the first one, for which SGLang on a CPU compiles code
# for 12 s
OF_SGLANG = {
    "repetition_penalty": 1.01,
    "min_p": 0.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "ignore_eos": True,
    "n": 1,
    "beam_width": 1,
    "stop_regex": "x{9}",
    "json_schema": '{"type": "object"}',
    "regex": "a+",
    "ebnf": 'root ::= "a"',
    "structural_tag": "{}",
    "stream_interval": 2,
    "logit_bias": {"5": 0.5},
    "watermark": {},
    "custom_params": {"a": 1},
}
# this parameter affects text only, and the package uses no text of an engine
NEVER_PASSED_ON = {"spaces_between_special_tokens"}
DROPPED_BY_BOTH = {"beam_width", "logit_bias", "stop_regex", "stream_interval", "structural_tag", "watermark"}
DROPPED = {"smg": DROPPED_BY_BOTH, "sglang-router": DROPPED_BY_BOTH | {"custom_params"}}


async def test_sampling_params_reach_worker(router: str, sglang: str, shipped_tokenizer: Any) -> None:
    async with (
        WorkerFront(sglang) as front,
        gateway_before(front.base_url, router=router) as gateway,
        episodes_on(gateway.base_url, shipped_tokenizer) as stage,
    ):
        ends = ends_of(await stage.play(new_samples(EPISODES), OF_SLIME))
    assert len(ends.exact) == EPISODES
    turns: dict[str, int] = {}
    for passage in front.passages:
        turn = turns[passage.key] = turns.get(passage.key, -1) + 1
        expected = {**OF_SLIME, "sampling_seed": turn_seed(7, turn)}
        arrived = passage.body["sampling_params"]
        assert {key: expected[key] for key in expected.keys() - arrived.keys()}.keys() == NEVER_PASSED_ON
        del arrived["max_new_tokens"], expected["max_new_tokens"]
        assert {key: value for key, value in expected.items() if key in arrived} == arrived
        assert (passage.body["return_logprob"], bool(passage.body["rid"])) == (True, True)
    assert sorted(turns.values()) == [1] * EPISODES


async def test_routers_drop_parameters_silently(router, shipped_tokenizer, report_row) -> None:
    sample, fake = await answered_by_a_stand_in(router, shipped_tokenizer, {**OF_SLIME, **OF_SGLANG})
    arrived = fake.requests[0].body["sampling_params"]
    assert sample.status is Sample.Status.COMPLETED
    assert {key: value for key, value in OF_SGLANG.items() if key not in DROPPED[router]}.items() <= arrived.items()
    dropped = OF_SGLANG.keys() - arrived.keys()
    assert dropped == DROPPED[router]
    report_row("sampling parameters that a router drops", router=NAMES[router], dropped=", ".join(sorted(dropped)))


@pytest.mark.parametrize(("router", "status"), [("smg", "completed"), ("sglang-router", "failed")])
async def test_sample_fails_if_router_drops_return_routed_experts(
    router: str, status: str, shipped_tokenizer: Any
) -> None:
    replay = {"use_rollout_routing_replay": True, "num_layers": 1, "moe_router_topk": 1}
    sample, fake = await answered_by_a_stand_in(router, shipped_tokenizer, SAMPLED, **replay)
    assert (sample.status.value, sample.remove_sample) == (status, status == "failed")
    assert fake.requests[0].body.get("return_routed_experts", False) is (status == "completed")
    if status == "failed":
        assert "use a router that passes return_routed_experts on" in facts_of(sample)["error"]


async def answered_by_a_stand_in(router: str, tokenizer: Any, params: Any, **args: Any) -> tuple[Sample, FakeSGLang]:
    """Return a sample and the fake worker that answered it, which accepts parameters that a real one refuses."""
    ids = ids_of(tokenizer, ANSWER)

    def answer(body: dict[str, Any], _number: int) -> Reply:
        experts = base64.b64encode(array("i", [0] * (len(body["input_ids"]) + len(ids) - 1))).decode()
        return Reply.tokens(ids, routed_experts=experts if body.get("return_routed_experts") else None)

    async with (
        FakeSGLang(answer) as fake,
        gateway_before(fake.base_url, router=router) as gateway,
        episodes_on(gateway.base_url, tokenizer, **args) as stage,
    ):
        return await stage.play_one(params), fake


async def test_model_name_selects_router(sglang, own_worker, shipped_tokenizer) -> None:
    async with (
        gateway_before(sglang) as judges,
        gateway_before(await own_worker.running(), router="sglang-router") as actors,
        episodes_on(judges.base_url, shipped_tokenizer) as judge,
        episodes_on(actors.base_url, shipped_tokenizer) as actor,
    ):
        places = {"judge": judge.recorder.url, "actor": actor.recorder.url}
        args = args_for(
            judge.recorder.url,
            shipped_tokenizer,
            reward_key="score",
            sglang_model_routers={name: url.removeprefix("http://").split(":") for name, url in places.items()},
            strands_rollout={**SETTINGS, "model_name": "actor"},
        )
        samples = new_samples(EPISODES)
        await asyncio.gather(*(generate(args, sample, SAMPLED) for sample in samples))
        for sample in samples:
            sample.reward = await reward_func(args, sample)
        assert actor.violations(samples) == []
    assert len(ends_of(samples).exact) == EPISODES
    assert judge.recorder.episodes == {}
    assert set.union(*map(versions_of, samples)) == {OWN_VERSION}
