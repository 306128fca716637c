"""Aborts, disconnects and flushes, in the middle of generations."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from engine_api import IDS, LONG, in_flight, until_load


async def test_aborting_a_running_request_returns_what_it_has(start, long_dir):
    api = await start(long_dir)
    async with in_flight(api, "r1", return_logprob=True) as [task]:
        await until_load(api, 1)
        await asyncio.sleep(0.05)
        answer = await api.post("/abort_request", {"rid": "r1"})
        assert (answer.status, answer.body) == (200, "")
        body = await task
    meta = body["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert 0 < len(body["output_ids"]) < 15000
    assert meta["completion_tokens"] == len(body["output_ids"]) == len(meta["output_token_logprobs"])
    assert meta["prompt_tokens"] == 40


async def test_aborting_a_queued_request_returns_nothing_and_no_prompt_counts(start, long_dir):
    api = await start(long_dir, max_running_requests=1)
    async with in_flight(api, "r1", "r2", return_logprob=True) as [_, queued]:
        await until_load(api, 1, 1)
        await api.post("/abort_request", {"rid": "r2"})
        body = await queued
    assert body["output_ids"] == []
    assert body["text"] == ""
    meta = body["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert "prompt_tokens" not in meta
    assert "cached_tokens" not in meta
    assert meta["completion_tokens"] == 0
    assert meta["output_token_logprobs"] == []
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]


async def test_abort_all_ends_every_request(start, long_dir):
    api = await start(long_dir, max_running_requests=2)
    async with in_flight(api, "a", "b", "c", "d") as tasks:
        await until_load(api, 2, 2)
        await api.post("/abort_request", {"rid": "", "abort_all": True})
        bodies = await asyncio.gather(*tasks)
    assert {body["meta_info"]["finish_reason"]["type"] for body in bodies} == {"abort"}
    assert sorted(len(body["output_ids"]) > 0 for body in bodies) == [False, False, True, True]


async def test_an_abort_reaches_every_request_whose_id_begins_with_the_one_given(start, long_dir):
    api = await start(long_dir, max_running_requests=2)
    async with in_flight(api, "r1", "r10", "x", "r11") as tasks:
        await until_load(api, 2, 2)
        await api.post("/abort_request", {"rid": "r1"})
        for task in (tasks[0], tasks[1], tasks[3]):
            assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
        assert not tasks[2].done()


@pytest.mark.parametrize("body", [{"rid": "unknown"}, {"rid": "r"}, {"rid": ""}, {}])
async def test_aborting_nothing_disturbs_no_one(start, long_dir, body):
    api = await start(long_dir)
    async with in_flight(api, "r1") as [task]:
        await until_load(api, 1)
        assert (await api.post("/abort_request", body)).status == 200
        await asyncio.sleep(0.02)
        assert not task.done()


async def test_a_request_id_in_use_is_refused(start, long_dir):
    api = await start(long_dir)
    async with in_flight(api, "r1"):
        await until_load(api, 1)
        answer = await api.post("/generate", {"input_ids": IDS, "rid": "r1"})
        assert (answer.status, answer.body) == (
            400,
            {"error": {"message": "Duplicate request ID detected: r1"}},
        )
    assert (await api.generate(rid="r1", max_new_tokens=1))["meta_info"]["id"] == "r1"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_has_its_request_aborted(start, long_dir, stream):
    api = await start(long_dir)
    body = {"input_ids": IDS, "sampling_params": LONG, "stream": stream}
    async with aiohttp.ClientSession() as session:

        async def read() -> None:
            async with session.post(api.base_url + "/generate", json=body) as response:
                await response.read()

        task = asyncio.create_task(read())
        await until_load(api, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until_load(api, 0)


async def test_flushing_is_refused_while_busy(start, long_dir):
    api = await start(long_dir)
    async with in_flight(api, "r1"):
        await until_load(api, 1)
        answer = await api.post("/flush_cache")
        assert (answer.status, answer.body) == (400, "Flush cache failed.\n")
    await until_load(api, 0)
    assert (await api.post("/flush_cache")).status == 200
