"""What only the embedded engine promises of pauses: truth about its load, seeds, health, and no deadlock."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from engine_api import IDS, in_flight, streaming, until_load

MODES = ["abort", "in_place", "retract"]


async def _pause(api, mode: str) -> None:
    answer = await api.post("/pause_generation", {"mode": mode})
    assert (answer.status, answer.body["status"]) == (200, "ok")


async def _continue(api) -> None:
    assert (await api.post("/continue_generation", {})).status == 200


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_disconnects_during_a_pause_leaves_nothing(start, long_dir, mode):
    api = await start(long_dir)
    async with aiohttp.ClientSession() as session:
        async with in_flight(api, "running", disconnects=True):
            await until_load(api, 1)
            await _pause(api, mode)
            body = {"input_ids": IDS, "rid": "held", "sampling_params": {"max_new_tokens": 15000, "ignore_eos": True}}
            held = asyncio.create_task(session.post(api.base_url + "/generate", json=body))
            await asyncio.sleep(0.02)
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)
        await until_load(api, 0)
    await _continue(api)
    for rid in ("running", "held"):
        assert (await api.generate(rid=rid, max_new_tokens=1))["meta_info"]["id"] == rid
    assert await api.load() == (0, 0)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_paused_generation_stands_still_and_then_goes_on_as_if_nothing_had_been(start, long_dir, mode):
    api = await start(long_dir)
    fields = {"max_new_tokens": 150, "ignore_eos": True, "sampling_seed": 5}
    whole = await api.generate(**fields, return_logprob=True)
    await api.post("/flush_cache")
    task = await streaming(api, **fields)
    await _pause(api, mode)
    await asyncio.sleep(0.02)
    assert not task.done()
    assert await api.load() == ((1, 0) if mode == "in_place" else (0, 1))
    await _continue(api)
    answer = await task
    assert answer["output_ids"] == whole["output_ids"]
    assert answer["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)
    pairs = zip(answer["meta_info"]["output_token_logprobs"], whole["meta_info"]["output_token_logprobs"], strict=True)
    assert all(abs(one[0] - other[0]) < 1e-5 for one, other in pairs)


async def test_retracted_generations_go_to_the_end_of_the_queue(start, long_dir):
    api = await start(long_dir, max_running_requests=1)
    async with in_flight(api, "r1") as [first]:
        await until_load(api, 1)
        second = asyncio.create_task(api.generate(max_new_tokens=2, ignore_eos=True))
        await until_load(api, 1, 1)
        await _pause(api, "retract")
        assert await api.load() == (0, 2)
        await _continue(api)
        assert len((await second)["output_ids"]) == 2
        assert not first.done()


async def test_a_pause_by_abort_ends_frozen_generations_at_once(start, long_dir):
    api = await start(long_dir)
    async with in_flight(api, "r1") as [task]:
        await until_load(api, 1)
        await _pause(api, "in_place")
        await _pause(api, "abort")
        assert (await task)["meta_info"]["finish_reason"]["message"] == "Aborted"


@pytest.mark.parametrize("mode", MODES)
async def test_a_paused_engine_is_well(embedded, mode):
    await _pause(embedded, mode)
    assert (await embedded.get("/health")).status == 200
    await _continue(embedded)
