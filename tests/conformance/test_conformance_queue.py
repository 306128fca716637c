"""Queued requests, on engines that run one generation at a time and read prompts in small chunks."""

import asyncio

import pytest
from engine_api import in_flight, start_stream, wait_for_load
from prompts import random_prompt
from reference_qwen3 import log_softmax, shipped_reference
from served_engine import ABORTED, ABORTED_IN_QUEUE, LOGPROB_KEYS, QUEUED_META_KEYS


def _check_never_ran(answer) -> None:
    meta = answer["meta_info"]
    assert (answer["output_ids"], answer["text"], meta["finish_reason"]) == ([], "", ABORTED_IN_QUEUE)
    assert set(meta) - LOGPROB_KEYS == QUEUED_META_KEYS
    assert (meta["completion_tokens"], meta["weight_versions"]) == (0, [{"version": "default", "start": 0, "end": 0}])


async def test_abort_request_of_queued_request_has_no_output(narrow):
    async with in_flight(narrow, "r1", "r2", **narrow.long, return_logprob=True) as [_, queued]:
        await wait_for_load(narrow, 1, 1)
        await narrow.post("/abort_request", {"rid": "r2"})
        answer = await queued
    _check_never_ran(answer)
    assert answer["meta_info"]["output_token_logprobs"] == []


async def test_abort_all_ends_running_and_queued_requests(narrow):
    first = await start_stream(narrow, rid="sampling all", **narrow.long)
    async with in_flight(narrow, "b", "c", **narrow.long) as tasks:
        await wait_for_load(narrow, 1, 2)
        await narrow.post("/abort_request", {"rid": "", "abort_all": True})
        running, *queued = await asyncio.gather(first, *tasks)
    assert running["meta_info"]["finish_reason"] == ABORTED
    assert len(running["output_ids"]) > 0
    for answer in queued:
        _check_never_ran(answer)


async def test_chunked_prefill_gives_the_same_output(narrow):
    prompt = random_prompt(150)
    answer = await narrow.generate(prompt, temperature=0, max_new_tokens=8, ignore_eos=True, return_logprob=True)
    rows = log_softmax(shipped_reference().logits([*prompt, *answer["output_ids"]]))[len(prompt) - 1 : -1]
    assert answer["output_ids"] == rows.argmax(axis=-1).tolist()
    reported = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert reported == pytest.approx(rows.max(axis=-1), abs=1e-3)
