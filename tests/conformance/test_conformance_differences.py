"""Known differences between the engines: each still exists, and the summary of the run lists it."""

import asyncio
import json

import pytest
from engine_api import IDS, in_flight, queued_request, start_stream, wait_for_load
from prompts import random_prompt
from served_engine import ABORTED

pytestmark = pytest.mark.real
ONE = {"max_new_tokens": 1, "ignore_eos": True}
# a request without an answer for this long counts as unanswered
_SILENCE_S = 1.5


async def _is_silent(task: asyncio.Task) -> bool:
    await asyncio.wait({task}, timeout=_SILENCE_S)
    return not task.done()


@pytest.mark.parametrize(
    ("name", "path", "body", "statuses"),
    [
        (
            "several sampling_params for one prompt",
            "/generate",
            {"input_ids": IDS, "sampling_params": [ONE, ONE]},
            (400, 500),
        ),
        ("n null", "/generate", {"input_ids": IDS, "sampling_params": {**ONE, "n": None}}, (200, 500)),
        (
            "other endpoints, such as /v1/completions",
            "/v1/completions",
            {"model": "m", "prompt": "1 + 1", "max_tokens": 1},
            (404, 200),
        ),
        (
            "logit_bias",
            "/generate",
            {"input_ids": IDS, "sampling_params": {**ONE, "logit_bias": {"5": 100}}},
            (400, 200),
        ),
        (
            "more logprobs: logprob_start_len, top_logprobs_num, token_ids_logprob",
            "/generate",
            {"input_ids": IDS, "sampling_params": ONE, "return_logprob": True, "top_logprobs_num": 2},
            (400, 200),
        ),
    ],
)
async def test_status_codes_differ(both, report_difference, name, path, body, statuses):
    answers = [await engine.post(path, body) for engine in both]
    assert tuple(answer.status for answer in answers) == statuses
    report_difference(name)


async def test_sampling_seed_needs_flag_on_sglang_only(both, report_difference):
    embedded, real = both
    fields = {"max_new_tokens": 30, "ignore_eos": True, "temperature": 1.5, "sampling_seed": 5}
    repeated = [await embedded.generate(**fields) for _ in range(2)]
    assert repeated[0]["output_ids"] == repeated[1]["output_ids"]
    others = [await real.generate(**fields) for _ in range(2)]
    assert (others[0]["output_ids"] == others[1]["output_ids"]) is real.facts.heeds_seeds
    assert others[0]["output_ids"] != repeated[0]["output_ids"]
    report_difference("seeds")


async def test_health_fails_during_pause_on_sglang_only(both, report_difference):
    embedded, real = both
    for engine in (embedded, real):
        await engine.post("/pause_generation", {"mode": "retract"})
    assert (await embedded.get("/health")).status == 200
    asking = asyncio.create_task(real.get("/health"))
    assert await _is_silent(asking)
    for engine in (embedded, real):
        await engine.post("/continue_generation", {})
    assert (await asking).status == 200
    report_difference("/health during a pause")


async def test_second_pause_by_abort_locks_sglang_only(both, report_difference):
    embedded, real = both
    for engine in (embedded, real):
        async with in_flight(engine, "frozen", disconnects=True, **engine.long) as [task]:
            await wait_for_load(engine, 1)
            await engine.post("/pause_generation", {"mode": "in_place"})
            pausing = asyncio.create_task(engine.post("/pause_generation", {"mode": "abort"}))
            if engine is embedded:
                assert (await pausing).status == 200
                assert (await task)["meta_info"]["finish_reason"] == ABORTED
            else:
                assert await _is_silent(pausing)
                assert not task.done()
                continuing = asyncio.create_task(engine.post("/continue_generation", {}))
                assert await _is_silent(continuing)
    assert [answer.status for answer in (await pausing, await continuing)] == [200, 200]
    report_difference("a pause by abort after one in place")


async def test_disconnect_during_pause_leaves_request_on_sglang_only(both, report_difference):
    embedded, real = both
    found = []
    for engine in (embedded, real):
        await engine.flush()
        await engine.post("/pause_generation", {"mode": "retract"})
        leaving = await queued_request(engine, "gone", **engine.long)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await engine.post("/continue_generation", {})
        await engine.generate(random_prompt(5), **ONE)  # sent after the client has left
        await engine.until_idle()
        found.append((await engine.generate(IDS, **ONE))["meta_info"]["cached_tokens"])
    assert found == [0, len(IDS) - 1]
    report_difference("a client that leaves during a pause")


async def test_stream_rid_is_aborted_again_by_sglang_only(both, report_difference):
    embedded, real = both
    reasons = []
    for engine in (embedded, real):
        await (await start_stream(engine, tokens=1, rid="again", **ONE))
        answer = await engine.generate(rid="again", **engine.long)
        reasons.append(answer["meta_info"]["finish_reason"]["type"])
    assert reasons == ["length", "abort"]
    report_difference("a stream's id")


async def test_loads_are_stale_during_pause_on_sglang_only(both, report_difference):
    embedded, real = both
    found = []
    for engine in (embedded, real):
        async with in_flight(engine, "r1", **engine.long):
            await wait_for_load(engine, 1)
            await engine.post("/pause_generation", {"mode": "retract"})
            found.append(await engine.load())
            await engine.post("/continue_generation", {})
    assert found == [(0, 1), (1, 0)]
    report_difference("/v1/loads")


async def test_batch_streams_interleave_on_sglang_only(both, report_difference):
    embedded, real = both
    body = {"input_ids": [IDS, IDS], "sampling_params": ONE, "stream": True}
    refused, streamed = [[event async for event in engine.events("/generate", body)] for engine in (embedded, real)]
    assert "not supported" in refused[0]
    assert {json.loads(event)["index"] for event in streamed if event != "[DONE]"} == {0, 1}
    report_difference("several prompts in one stream")
