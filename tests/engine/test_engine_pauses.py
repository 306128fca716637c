"""Pauses in each mode: what becomes of generations, and of requests that come meanwhile."""

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


async def _held(api, rid: str, **fields) -> asyncio.Task:
    """A request that has come while the engine is paused."""
    task = asyncio.create_task(api.generate(rid=rid, **({"max_new_tokens": 3, "ignore_eos": True} | fields)))
    await asyncio.sleep(0.05)
    assert not task.done()
    return task


@pytest.mark.parametrize("body", [{}, {"mode": "abort"}])
async def test_pausing_by_abort_ends_what_runs_with_partial_output_and_what_is_queued(start, long_dir, body):
    api = await start(long_dir, max_running_requests=1)
    async with in_flight(api, "r1", "r2") as tasks:
        await until_load(api, 1, 1)
        await asyncio.sleep(0.05)
        assert (await api.post("/pause_generation", body)).status == 200
        running, queued = await asyncio.gather(*tasks)
    assert running["meta_info"]["finish_reason"]["message"] == "Aborted"
    assert len(running["output_ids"]) > 0
    assert queued["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
    assert queued["output_ids"] == []


@pytest.mark.parametrize("mode", MODES)
async def test_requests_that_come_during_a_pause_wait_uncounted_until_it_ends(embedded, mode):
    assert (await embedded.get("/ready")).status == 200
    await _pause(embedded, mode)
    held = await _held(embedded, "r1")
    assert await embedded.load() == (0, 0)
    assert (await embedded.get("/ready")).status == 503
    taken = await embedded.post("/generate", {"input_ids": IDS, "rid": "r1"})
    assert taken.body == {"error": {"message": "Duplicate request ID detected: r1"}}
    await _continue(embedded)
    assert len((await held)["output_ids"]) == 3
    assert (await embedded.get("/ready")).status == 200


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("abort", [{"rid": "r1"}, {"abort_all": True}])
async def test_an_abort_during_a_pause_does_not_reach_a_request_that_came_during_it(embedded, mode, abort):
    await _pause(embedded, mode)
    held = await _held(embedded, "r1")
    await embedded.post("/abort_request", abort)
    await asyncio.sleep(0.02)
    assert not held.done()
    await _continue(embedded)
    assert (await held)["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


async def test_another_pause_by_abort_does_not_end_what_waits_for_the_first_to_end(embedded):
    await _pause(embedded, "abort")
    held = await _held(embedded, "r1")
    await _pause(embedded, "abort")
    await _continue(embedded)
    assert len((await held)["output_ids"]) == 3


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_disconnects_during_a_pause_leaves_nothing(start, long_dir, mode):
    api = await start(long_dir)
    async with aiohttp.ClientSession() as session:
        async with in_flight(api, "running"):
            await until_load(api, 1)
            await _pause(api, mode)
            body = {"input_ids": IDS, "rid": "held", "sampling_params": {"max_new_tokens": 15000, "ignore_eos": True}}
            held = asyncio.create_task(session.post(api.base_url + "/generate", json=body))
            await asyncio.sleep(0.05)
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
    fields = {"max_new_tokens": 400, "ignore_eos": True, "sampling_seed": 5}
    whole = await api.generate(**fields, return_logprob=True)
    await api.post("/flush_cache")
    task = await streaming(api, **fields)
    await _pause(api, mode)
    await asyncio.sleep(0.05)
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


async def test_a_frozen_generation_that_is_aborted_ends_after_the_pause_with_one_more_token(start, long_dir):
    api = await start(long_dir)
    async with in_flight(api, "r1") as [task]:
        await until_load(api, 1)
        await _pause(api, "in_place")
        await api.post("/abort_request", {"rid": "r1"})
        await asyncio.sleep(0.05)
        assert not task.done()
        assert await api.load() == (1, 0)
        await api.post("/update_weight_version", {"new_version": "v2"})
        await _continue(api)
        body = await task
    meta, count = body["meta_info"], len(body["output_ids"])
    assert meta["finish_reason"]["message"] == "Aborted"
    assert meta["weight_versions"] == [
        {"version": "default", "start": 0, "end": count - 1},
        {"version": "v2", "start": count - 1, "end": count},
    ]


async def test_a_pause_by_abort_ends_frozen_generations_at_once(start, long_dir):
    api = await start(long_dir)
    async with in_flight(api, "r1") as [task]:
        await until_load(api, 1)
        await _pause(api, "in_place")
        await _pause(api, "abort")
        assert (await task)["meta_info"]["finish_reason"]["message"] == "Aborted"


async def test_a_retracted_generation_that_is_aborted_keeps_what_sglangs_front_end_has_of_it(start, long_dir):
    api = await start(long_dir)
    async with in_flight(api, "whole", return_logprob=True) as [task]:
        await until_load(api, 1)
        stream = await streaming(api, tokens=60, rid="streamed", max_new_tokens=15000, ignore_eos=True)
        await _pause(api, "retract")
        await api.post("/abort_request", {"abort_all": True})
        body, streamed = await asyncio.gather(task, stream)
    count = len(body["output_ids"])
    assert count % 50 == 0
    assert count > 0
    for answer in (body, streamed):
        meta, end = answer["meta_info"], len(answer["output_ids"])
        assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
        assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & set(meta)
        assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == end
        assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": end}]


@pytest.mark.parametrize("body", [{"mode": "x"}, {"mode": 1}, [], None])
async def test_a_pause_of_the_wrong_shape_is_refused_and_pauses_nothing(embedded, body):
    assert (await embedded.post("/pause_generation", body)).status == 400
    assert len((await embedded.generate(max_new_tokens=1))["output_ids"]) == 1


async def test_going_on_without_a_pause_changes_nothing_but_needs_a_body(embedded):
    await _continue(embedded)
    assert (await embedded.post("/continue_generation")).status == 400
    assert len((await embedded.generate(max_new_tokens=1))["output_ids"]) == 1
