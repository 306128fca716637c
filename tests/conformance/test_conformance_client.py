"""`SGLangClient` on each engine."""

import asyncio

import pytest
from engine_api import IDS, wait_for_load
from prompts import random_prompt
from served_engine import WITNESSES, witnesses

from strands_rollout.client.client import SGLangClient
from strands_rollout.errors import EngineOverlongError
from strands_rollout.model.replay_data import missing_replay_data


@pytest.fixture
async def client(engine):
    async with SGLangClient(engine.base_url) as client:
        yield client


async def test_sglang_client_generate_accepts_every_token(engine, client):
    await engine.flush()
    generation = await client.generate(IDS, {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0.7}, rid="r1")
    assert len(generation.output_ids) == len(generation.logprobs) == generation.completion_tokens == 8
    assert (generation.finish_reason.type, generation.finish_reason.length) == ("length", 8)
    assert (generation.prompt_tokens, generation.cached_tokens, generation.attempts) == (40, 0, 1)
    assert (generation.weight_versions, generation.meta_info["id"]) == ([(generation.weight_version, 0, 8)], "r1")


async def test_sglang_client_learns_context_length_from_refusal(engine, client):
    context = engine.facts.context_length
    too_long = [(random_prompt(context), 1), (random_prompt(context - 20), 21)]
    for prompt, new in too_long:
        with pytest.raises(EngineOverlongError) as caught:
            await client.generate(prompt, {"max_new_tokens": new})
        assert (caught.value.context_length, caught.value.status_code) == (context, 400)
    with pytest.raises(EngineOverlongError):
        await client.generate(random_prompt(context - 6), {"max_new_tokens": 1})


async def test_sglang_client_continues_aborted_generation(shipped):
    greedy = {**shipped.long, "temperature": 0}
    async with SGLangClient(shipped.base_url) as client:
        task = asyncio.create_task(client.generate(IDS, greedy, rid="r1"))
        await wait_for_load(shipped, 1)
        await client.abort("r1")
        begun = (await task).output_ids
        rest = await client.generate([*IDS, *begun], {**greedy, "max_new_tokens": 10}, rid="r1-2")
        assert rest.cached_tokens == len(IDS) + len(begun) - 1
        await shipped.flush()
        whole = await client.generate(IDS, {**greedy, "max_new_tokens": len(begun) + 10})
    assert whole.output_ids == begun + rest.output_ids


async def test_sglang_client_refuses_missing_replay_data(client):
    asked = ({"return_routed_experts": True}, {}), ({}, {"custom_params": {"return_top_p_token_ids": True}})
    for extra, params in asked:
        generation = await client.generate(IDS, {"max_new_tokens": 1, **params}, extra=extra)
        missing = missing_replay_data(extra, params, generation.meta_info)
        assert missing is not None
        assert missing.startswith("lacks the ")


async def test_sglang_client_cancel_aborts_at_engine(engine, client):
    async with witnesses(engine):
        task = asyncio.create_task(client.generate(IDS, engine.long))
        await wait_for_load(engine, WITNESSES + 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
