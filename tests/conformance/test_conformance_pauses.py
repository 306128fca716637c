"""`/pause_generation` in each mode: its effect on running generations and on new requests."""

import asyncio

import pytest
from engine_api import in_flight, queued_request, start_stream, wait_for_load
from served_engine import ABORTED

MODES = ["abort", "in_place", "retract"]
# the generation is long enough to be paused before its end
GREEDY = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0}
THREE = {"max_new_tokens": 3, "ignore_eos": True}


async def _pause(engine, mode: str) -> None:
    answer = await engine.post("/pause_generation", {"mode": mode})
    assert (answer.status, answer.body) == (200, {"message": "Generation paused successfully.", "status": "ok"})


async def _continue(engine) -> None:
    answer = await engine.post("/continue_generation", {})
    assert (answer.status, answer.body) == (200, {"message": "Generation continued successfully.", "status": "ok"})


@pytest.mark.parametrize("body", [{}, {"mode": "abort"}])
async def test_pause_generation_abort_returns_partial_output(engine, body):
    async with in_flight(engine, "r1", "r2", **engine.long, return_logprob=True) as tasks:
        await wait_for_load(engine, 2)
        assert (await engine.post("/pause_generation", body)).status == 200
        for answer in await asyncio.gather(*tasks):
            ids, meta = answer["output_ids"], answer["meta_info"]
            assert meta["finish_reason"] == ABORTED
            assert 0 < len(ids) == meta["completion_tokens"] == len(meta["output_token_logprobs"])
    await _continue(engine)


@pytest.mark.parametrize("mode", MODES)
async def test_requests_during_pause_wait_and_are_not_counted(engine, mode):
    assert (await engine.get("/ready")).status == 200
    await _pause(engine, mode)
    waiting = await queued_request(engine, "r1", **THREE)
    assert await engine.load() == (0, 0)
    assert (await engine.get("/ready")).status == 503
    await _continue(engine)
    assert (await waiting).body["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert (await engine.get("/ready")).status == 200


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("abort", [{"rid": "r1"}, {"abort_all": True}])
async def test_abort_request_misses_requests_sent_during_pause(engine, mode, abort):
    await _pause(engine, mode)
    waiting = await queued_request(engine, "r1", **THREE)
    await engine.post("/abort_request", abort)
    await _continue(engine)
    assert (await waiting).body["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_continue_generation_resumes_frozen_generation(shipped, mode):
    whole = await shipped.generate(**GREEDY, return_logprob=True)
    await shipped.flush()
    task = await start_stream(shipped, **GREEDY)
    await _pause(shipped, mode)
    await asyncio.sleep(shipped.hop_s)
    assert not task.done()
    await _continue(shipped)
    answer = await task
    assert answer["output_ids"] == whole["output_ids"]
    assert answer["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)
    pairs = zip(answer["meta_info"]["output_token_logprobs"], whole["meta_info"]["output_token_logprobs"], strict=True)
    assert all(abs(one[0] - other[0]) < 1e-3 for one, other in pairs)
