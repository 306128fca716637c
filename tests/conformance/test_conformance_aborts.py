"""`/abort_request`, disconnects and `/flush_cache` during generations."""

import asyncio

import pytest
from engine_api import IDS, client_session, in_flight, start_stream, wait_for_load
from served_engine import ABORTED, WITNESSES, witnesses


async def test_abort_request_returns_partial_output(engine):
    async with in_flight(engine, "r1", **engine.long, return_logprob=True) as [task]:
        await wait_for_load(engine, 1)
        answer = await engine.post("/abort_request", {"rid": "r1"})
        assert (answer.status, answer.body) == (200, "")
        body = await task
    ids, meta = body["output_ids"], body["meta_info"]
    assert meta["finish_reason"] == ABORTED
    assert 0 < len(ids) < engine.long["max_new_tokens"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (40, len(ids))
    assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
    assert [(span["start"], span["end"]) for span in meta["weight_versions"]] == [(0, len(ids))]
    assert meta["id"] == "r1"


async def test_abort_request_ends_stream_with_partial_output(engine):
    # the id is unique because SGLang aborts a stream's id again 2 s after its end
    task = await start_stream(engine, rid="stream", **engine.long)
    await engine.post("/abort_request", {"rid": "stream"})
    last = await task
    assert last["meta_info"]["finish_reason"] == ABORTED
    assert len(last["output_ids"]) == last["meta_info"]["completion_tokens"] >= 3


async def test_abort_request_matches_rid_prefix(engine):
    async with in_flight(engine, "r1", "r10", "x", "r11", **engine.long) as tasks:
        await wait_for_load(engine, 4)
        await engine.post("/abort_request", {"rid": "r1"})
        for task in (tasks[0], tasks[1], tasks[3]):
            assert (await task)["meta_info"]["finish_reason"] == ABORTED
        assert not tasks[2].done()


@pytest.mark.parametrize("body", [{"rid": "unknown"}, {"rid": "r"}, {"rid": ""}, {}])
async def test_abort_request_with_unknown_rid_has_no_effect(engine, body):
    async with in_flight(engine, "r1", **engine.long) as [task]:
        await wait_for_load(engine, 1)
        assert (await engine.post("/abort_request", body)).status == 200
        await engine.generate(max_new_tokens=3)
        assert not task.done()


async def test_generate_refuses_duplicate_rid_until_it_is_free(engine):
    async with in_flight(engine, "r1", **engine.long):
        await wait_for_load(engine, 1)
        answer = await engine.post("/generate", {"input_ids": IDS, "rid": "r1"})
        assert (answer.status, answer.body) == (400, {"error": {"message": "Duplicate request ID detected: r1"}})
    await engine.until_idle()
    assert (await engine.generate(rid="r1", max_new_tokens=1))["meta_info"]["id"] == "r1"


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_aborts_request(engine, stream):
    body = {"input_ids": IDS, "sampling_params": engine.long, "stream": stream}
    async with witnesses(engine), client_session() as session:

        async def read() -> None:
            async with session.post(engine.base_url + "/generate", json=body) as response:
                await response.read()

        task = asyncio.create_task(read())
        await wait_for_load(engine, WITNESSES + 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
