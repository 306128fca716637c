"""Requests that wait, on engines that make one generation at a time and read prompts in small chunks."""

import asyncio

import pytest
from engine_api import in_flight, streaming, until_load
from prompts import random_prompt
from reference_qwen3 import log_softmax, shipped_reference
from served_engine import ABORTED, ABORTED_IN_QUEUE, LOGPROB_KEYS, QUEUED_META_KEYS


def _check_never_ran(answer) -> None:
    meta = answer["meta_info"]
    assert (answer["output_ids"], answer["text"]) == ([], "")
    assert meta["finish_reason"] == ABORTED_IN_QUEUE
    assert set(meta) - LOGPROB_KEYS == QUEUED_META_KEYS
    assert meta["completion_tokens"] == 0
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]


async def _has_begun(engine) -> bool:
    """Whether part of a prompt has been read; SGLang does not count its request as running yet."""
    load = (await engine.get("/v1/loads")).body["loads"][0]
    return load["num_running_reqs"] > 0 or load.get("num_used_tokens", 0) > 0


async def test_aborting_a_queued_request_returns_nothing_and_no_prompt_counts(narrow):
    async with in_flight(narrow, "r1", "r2", **narrow.long, return_logprob=True) as [_, queued]:
        await until_load(narrow, 1, 1)
        await narrow.post("/abort_request", {"rid": "r2"})
        answer = await queued
    _check_never_ran(answer)
    assert answer["meta_info"]["output_token_logprobs"] == []


async def test_abort_all_ends_what_runs_and_what_waits(narrow):
    first = await streaming(narrow, rid="sampling all", **narrow.long)
    async with in_flight(narrow, "b", "c", **narrow.long) as tasks:
        await until_load(narrow, 1, 2)
        await narrow.post("/abort_request", {"rid": "", "abort_all": True})
        running, *queued = await asyncio.gather(first, *tasks)
    assert running["meta_info"]["finish_reason"] == ABORTED
    assert len(running["output_ids"]) > 0
    for answer in queued:
        _check_never_ran(answer)


async def test_an_abort_between_two_chunks_of_a_prompt_counts_as_one_in_the_queue(narrow):
    # so many chunks that few aborts miss them: then another prompt is read
    for seed in range(20):
        task = asyncio.create_task(narrow.generate(random_prompt(1000, seed), rid=f"chunks {seed}", max_new_tokens=4))
        while not await _has_begun(narrow) and not task.done():  # noqa: ASYNC110 - the state is the server's
            await asyncio.sleep(0.002)
        await narrow.post("/abort_request", {"rid": f"chunks {seed}"})
        if (answer := await task)["output_ids"] == []:
            break
        await narrow.until_idle()
    _check_never_ran(answer)


async def test_a_queued_request_whose_client_disconnects_never_runs(narrow):
    # SGLang takes 4 s to notice, for which one long request does not last
    async with in_flight(narrow, "r1", "r2", **narrow.long) as [_, second]:
        await until_load(narrow, 1, 1)
        async with in_flight(narrow, "r3", disconnects=True, **narrow.long):
            await until_load(narrow, 1, 2)
        await until_load(narrow, 1)
        assert not second.done()


async def test_retracted_generations_go_to_the_end_of_the_queue(narrow):
    async with in_flight(narrow, "r1", **narrow.long) as [first]:
        await until_load(narrow, 1)
        second = asyncio.create_task(narrow.generate(rid="s", max_new_tokens=2, ignore_eos=True))
        await until_load(narrow, 1, 1)
        await narrow.post("/pause_generation", {"mode": "retract"})
        await narrow.post("/continue_generation", {})
        assert len((await second)["output_ids"]) == 2
        assert not first.done()


async def test_a_prompt_read_in_chunks_is_the_same_prompt(narrow):
    prompt = random_prompt(150)
    answer = await narrow.generate(prompt, temperature=0, max_new_tokens=8, ignore_eos=True, return_logprob=True)
    rows = log_softmax(shipped_reference().logits([*prompt, *answer["output_ids"]]))[len(prompt) - 1 : -1]
    assert answer["output_ids"] == rows.argmax(axis=-1).tolist()
    told = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert told == pytest.approx(rows.max(axis=-1), abs=1e-3)


async def test_a_context_length_that_the_server_was_given_is_told(narrow):
    assert (await narrow.get("/server_info")).body["context_length"] == narrow.facts.context_length == 1024
