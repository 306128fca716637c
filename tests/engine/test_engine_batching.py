"""Many requests at once: each gets what it would get alone, and none stands in another's way."""

from __future__ import annotations

import asyncio
import random

import pytest
from tiny_qwen3 import TinyQwen3


def _prompts(count: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(360) for _ in range(rng.randrange(3, 300))] for _ in range(count)]


@pytest.mark.parametrize("temperature", [0, 0.9])
async def test_a_batch_of_sixteen_gets_the_tokens_that_each_gets_alone(embedded, temperature):
    fields = {"max_new_tokens": 40, "temperature": temperature, "sampling_seed": 3, "ignore_eos": True}
    fields["return_logprob"] = True
    prompts = _prompts(16)
    alone = [await embedded.generate(prompt, **fields) for prompt in prompts]
    await embedded.post("/flush_cache")
    together = await asyncio.gather(*(embedded.generate(prompt, **fields) for prompt in prompts))
    assert [answer["output_ids"] for answer in together] == [answer["output_ids"] for answer in alone]
    for one, other in zip(together, alone, strict=True):
        pairs = zip(one["meta_info"]["output_token_logprobs"], other["meta_info"]["output_token_logprobs"], strict=True)
        assert all(abs(left[0] - right[0]) < 1e-5 for left, right in pairs)


async def test_more_requests_than_rows_are_all_served(start, tiny_dir):
    api = await start(tiny_dir, max_running_requests=3)
    prompts = _prompts(20)
    lengths = [1 + index % 7 for index in range(20)]
    answers = await asyncio.gather(
        *(api.generate(p, max_new_tokens=n, ignore_eos=True) for p, n in zip(prompts, lengths, strict=True))
    )
    assert [len(answer["output_ids"]) for answer in answers] == lengths


@pytest.mark.parametrize("max_running", [1, 2, 5])
async def test_rows_that_end_and_join_out_of_order_keep_their_own_tokens(start, tiny_dir, max_running):
    reference = await start(tiny_dir)
    api = await start(tiny_dir, max_running_requests=max_running, prefill_chunk_tokens=32)
    prompts = _prompts(12)
    lengths = [3 + 11 * index % 50 for index in range(12)]

    def call(to, index):
        fields = {"temperature": 0} if index % 2 else {"temperature": 1.5, "top_k": 20, "sampling_seed": index}
        return to.generate(prompts[index], max_new_tokens=lengths[index], ignore_eos=True, **fields)

    expected = [(await call(reference, index))["output_ids"] for index in range(12)]
    got = await asyncio.gather(*(call(api, index) for index in range(12)))
    assert [answer["output_ids"] for answer in got] == expected


async def test_samples_of_one_prompt_sent_together_share_its_prefill(embedded):
    answers = await asyncio.gather(*(embedded.generate([5] * 40, max_new_tokens=20) for _ in range(6)))
    assert sorted(answer["meta_info"]["cached_tokens"] for answer in answers) == [0, 39, 39, 39, 39, 39]


async def test_an_engine_with_a_random_seed_repeats_itself(start, tiny_dir):
    first, second = [await start(tiny_dir, random_seed=11) for _ in range(2)]
    samples = [await api.generate(max_new_tokens=30, ignore_eos=True) for api in (first, second, first)]
    assert samples[0]["output_ids"] == samples[1]["output_ids"] != samples[2]["output_ids"]


async def test_a_long_prompt_does_not_stall_a_running_generation(start, tmp_path):
    folder = TinyQwen3(context_length=8192).write(tmp_path / "model")
    api = await start(folder, prefill_chunk_tokens=32)
    body = {"input_ids": [5] * 9, "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}, "stream": True}
    events = api.events("/generate", body)
    await anext(events)
    long_prompt = asyncio.create_task(api.generate([7] * 1000, max_new_tokens=1))
    tokens_meanwhile = 0
    async for _ in events:
        if long_prompt.done():
            break
        tokens_meanwhile += 1
    await long_prompt
    await events.aclose()
    assert tokens_meanwhile >= 10


async def test_chunked_prefill_changes_nothing(start, tiny_dir):
    whole, chunked = await start(tiny_dir), await start(tiny_dir, prefill_chunk_tokens=7)
    for prompt in _prompts(3):
        answers = [
            await api.generate(prompt, max_new_tokens=20, temperature=0, ignore_eos=True, return_logprob=True)
            for api in (whole, chunked)
        ]
        assert answers[0]["output_ids"] == answers[1]["output_ids"]
        logprobs = [[entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5)


async def test_a_small_prefix_cache_forgets_but_stays_correct(start, tiny_dir):
    # 1 MB holds about 1950 tokens of this model.
    api, reference = await start(tiny_dir, prefix_cache_mb=1), await start(tiny_dir)
    prompts = _prompts(16)
    for _ in range(2):
        for prompt in prompts:
            fields = {"max_new_tokens": 5, "temperature": 0}
            answers = [await one.generate(prompt, **fields) for one in (api, reference)]
            assert answers[0]["output_ids"] == answers[1]["output_ids"]
    assert answers[1]["meta_info"]["cached_tokens"] == len(prompts[-1]) - 1


async def test_growing_beyond_the_first_capacity_keeps_what_was_there(start, long_dir):
    api = await start(long_dir)
    prompt = _prompts(1)[0]
    fields = {"max_new_tokens": 700, "temperature": 0, "ignore_eos": True}
    short, long = await asyncio.gather(api.generate(prompt, **fields), api.generate([9, *prompt], **fields))
    assert (await api.generate(prompt, **fields))["output_ids"] == short["output_ids"]
    await api.post("/flush_cache")
    assert (await api.generate([9, *prompt], **fields))["output_ids"] == long["output_ids"]
