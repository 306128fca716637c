"""Abort, disconnect, pause, continue, flush and weight updates, in the middle of generations."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest
from engine_api import IDS

LONG = {"max_new_tokens": 15000, "ignore_eos": True}


async def _until(condition, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - the state polled is the server's
            await asyncio.sleep(0.005)


async def _until_running(api, running: int, waiting: int = 0) -> None:
    async def reached() -> bool:
        return await api.load() == (running, waiting)

    await _until(reached)


async def _started(api, **fields) -> asyncio.Task:
    """A streamed generation that has made its first tokens; the task's result is the last state of its answer."""
    under_way = asyncio.Event()
    body = {"input_ids": IDS, "sampling_params": fields, "stream": True, "return_logprob": True}

    async def read() -> dict:
        states = []
        async for event in api.events("/generate", body):
            if event != "[DONE]":
                states.append(event)
            if len(states) == 3:
                under_way.set()
        return json.loads(states[-1])

    task = asyncio.create_task(read())
    await under_way.wait()
    return task


@asynccontextmanager
async def _in_flight(api, *rids: str, **fields):
    """Long generations that run while the block does; yields their tasks."""
    tasks = [asyncio.create_task(api.generate(rid=rid, **(LONG | fields))) for rid in rids]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_aborting_a_running_request_returns_what_it_has(start, long_dir):
    api = await start(long_dir)
    async with _in_flight(api, "r1", return_logprob=True) as [task]:
        await _until_running(api, 1)
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
    async with _in_flight(api, "r1", "r2", return_logprob=True) as [_, queued]:
        await _until_running(api, 1, 1)
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
    async with _in_flight(api, "a", "b", "c", "d") as tasks:
        await _until_running(api, 2, 2)
        await api.post("/abort_request", {"rid": "", "abort_all": True})
        bodies = await asyncio.gather(*tasks)
    assert {body["meta_info"]["finish_reason"]["type"] for body in bodies} == {"abort"}
    assert sorted(len(body["output_ids"]) > 0 for body in bodies) == [False, False, True, True]


@pytest.mark.parametrize("body", [{"rid": "unknown"}, {"rid": ""}, {}])
async def test_aborting_nothing_disturbs_no_one(start, long_dir, body):
    api = await start(long_dir)
    async with _in_flight(api, "r1") as [task]:
        await _until_running(api, 1)
        assert (await api.post("/abort_request", body)).status == 200
        await asyncio.sleep(0.02)
        assert not task.done()


async def test_a_request_id_in_use_is_refused(start, long_dir):
    api = await start(long_dir)
    async with _in_flight(api, "r1"):
        await _until_running(api, 1)
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
        await _until_running(api, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await _until_running(api, 0)


async def test_flushing_is_refused_while_busy(start, long_dir):
    api = await start(long_dir)
    async with _in_flight(api, "r1"):
        await _until_running(api, 1)
        answer = await api.post("/flush_cache")
        assert (answer.status, answer.body) == (400, "Flush cache failed.\n")
    await _until_running(api, 0)
    assert (await api.post("/flush_cache")).status == 200


async def test_pausing_by_abort_ends_requests_with_partial_output_and_holds_new_ones(start, long_dir):
    api = await start(long_dir)
    async with _in_flight(api, "r1") as [running]:
        await _until_running(api, 1)
        await asyncio.sleep(0.05)
        paused = await api.post("/pause_generation", {"mode": "abort"})
        assert (paused.status, paused.body["status"]) == (200, "ok")
        body = await running
        assert body["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(body["output_ids"]) > 0
        held = asyncio.create_task(api.generate(max_new_tokens=3, ignore_eos=True))
        await _until_running(api, 0, 1)
        await asyncio.sleep(0.05)
        assert not held.done()
        assert (await api.post("/continue_generation", {})).status == 200
        assert len((await held)["output_ids"]) == 3


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_paused_generation_stands_still_and_then_goes_on_as_if_nothing_had_been(start, long_dir, mode):
    api = await start(long_dir)
    fields = {"max_new_tokens": 150, "ignore_eos": True, "sampling_seed": 5}
    whole = await api.generate(**fields, return_logprob=True)
    await api.post("/flush_cache")
    task = await _started(api, **fields)
    await api.post("/pause_generation", {"mode": mode})
    await asyncio.sleep(0.05)
    assert not task.done()
    assert await api.load() == ((1, 0) if mode == "in_place" else (0, 1))
    await api.post("/continue_generation", {})
    answer = await task
    assert answer["output_ids"] == whole["output_ids"]
    assert answer["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)
    pairs = zip(answer["meta_info"]["output_token_logprobs"], whole["meta_info"]["output_token_logprobs"], strict=True)
    assert all(abs(one[0] - other[0]) < 1e-4 for one, other in pairs)


async def test_a_paused_request_can_be_aborted(start, long_dir):
    api = await start(long_dir)
    async with _in_flight(api, "r1") as [task]:
        await _until_running(api, 1)
        await api.post("/pause_generation", {"mode": "in_place"})
        await api.post("/abort_request", {"rid": "r1"})
        assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_new_weights_change_the_answer_the_version_and_empty_the_cache(api, tiny_dir, other_dir, start):
    before = await api.generate(max_new_tokens=10, temperature=0)
    answer = await api.post("/update_weights_from_disk", {"model_path": str(other_dir), "weight_version": "v7"})
    assert (answer.status, answer.body) == (
        200,
        {
            "success": True,
            "message": "Succeeded to update model weights. Weight version updated to v7.",
            "num_paused_requests": 0,
        },
    )
    after = await api.generate(max_new_tokens=10, temperature=0)
    fresh = await (await start(other_dir)).generate(max_new_tokens=10, temperature=0)
    assert after["output_ids"] == fresh["output_ids"] != before["output_ids"]
    assert after["meta_info"]["cached_tokens"] == 0
    assert after["meta_info"]["weight_version"] == "v7"
    info = (await api.get("/model_info")).body
    assert (info["weight_version"], info["model_path"]) == ("v7", str(other_dir))
    assert info["tokenizer_path"] == str(tiny_dir)


async def test_without_a_version_the_old_one_stays(api, other_dir):
    answer = await api.post("/update_weights_from_disk", {"model_path": str(other_dir)})
    assert answer.body["message"] == "Succeeded to update model weights."
    assert (await api.generate(max_new_tokens=1))["meta_info"]["weight_version"] == "default"


@pytest.fixture
def long_other_dir(tmp_path):
    from tiny_qwen3 import TinyQwen3

    return TinyQwen3(context_length=16384, seed=1).write(tmp_path / "long_other")


@pytest.mark.parametrize(("mode", "flush"), [("in_place", False), ("retract", True)])
async def test_an_update_in_mid_generation_reports_both_versions(start, long_dir, long_other_dir, mode, flush):
    api = await start(long_dir)
    task = await _started(api, max_new_tokens=150, ignore_eos=True)
    await api.post("/pause_generation", {"mode": mode})
    update = {"model_path": str(long_other_dir), "weight_version": "v2", "flush_cache": flush}
    answer = await api.post("/update_weights_from_disk", update)
    assert (answer.status, answer.body["success"]) == (200, True)
    await api.post("/continue_generation", {})
    meta = (await task)["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], first["start"], second["version"], second["end"]) == ("default", 0, "v2", 150)
    assert 0 < first["end"] == second["start"] < 150
    assert meta["weight_version"] == "v2"


async def test_an_update_under_a_frozen_generation_changes_weights_but_fails_to_flush(start, long_dir, long_other_dir):
    api = await start(long_dir)
    async with _in_flight(api, "r1"):
        await _until_running(api, 1)
        await api.post("/pause_generation", {"mode": "in_place"})
        answer = await api.post("/update_weights_from_disk", {"model_path": str(long_other_dir)})
        assert answer.status == 400
        assert answer.body["message"].startswith("Weights were updated, but the cache was not flushed")


async def test_an_update_without_a_pause_waits_for_what_runs_and_holds_what_comes(start, long_dir, long_other_dir):
    api = await start(long_dir)
    running = await _started(api, max_new_tokens=200, ignore_eos=True)
    update = {"model_path": str(long_other_dir), "weight_version": "v2"}
    updating = asyncio.create_task(api.post("/update_weights_from_disk", update))
    await asyncio.sleep(0.02)
    late = asyncio.create_task(api.generate(max_new_tokens=2, ignore_eos=True))
    assert (await running)["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 200}]
    assert (await updating).status == 200
    meta = (await late)["meta_info"]
    assert (meta["weight_version"], meta["cached_tokens"]) == ("v2", 0)


async def test_an_update_can_abort_what_runs(start, long_dir, long_other_dir):
    api = await start(long_dir)
    async with _in_flight(api, "r1") as [task]:
        await _until_running(api, 1)
        update = {"model_path": str(long_other_dir), "abort_all_requests": True}
        assert (await api.post("/update_weights_from_disk", update)).status == 200
        assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("kind", ["missing", "foreign", "shape", "broken"])
async def test_weights_that_do_not_fit_leave_the_old_ones(api, tmp_path, kind):
    from tiny_qwen3 import TinyQwen3

    folder = tmp_path / "new"
    if kind != "missing":
        TinyQwen3(hidden=64 if kind == "shape" else 32).write(folder)
    if kind == "foreign":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    if kind == "broken":
        (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 garbage")
    before = await api.generate(max_new_tokens=10, temperature=0)
    answer = await api.post("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "v2"})
    assert (answer.status, answer.body["success"]) == (400, False)
    assert str(folder) in answer.body["message"]
    after = await api.generate(max_new_tokens=10, temperature=0)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == "default"
