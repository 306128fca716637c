"""Interrupted episodes on the embedded engine with its real model: the same tokens as without interruptions."""

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from harness import args_for

from strands_rollout import Sample, generate
from strands_rollout.engine import engine_process
from strands_rollout.play.rows import shipped_rows, take_rows

EPISODES = 6
SETTINGS = {"executor": {"name": "local", "isolation": "rlimits"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[str]:
    async with engine_process() as url:
        yield url


@pytest.fixture(scope="module")
def undisturbed(engine: str, shipped_tokenizer: Any) -> list[Sample]:
    return asyncio.run(played(engine, shipped_tokenizer, new_samples()))


async def post(url: str, path: str, **body: Any) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{url}{path}", json=body) as answer:
        assert answer.status == 200, await answer.text()


async def wait_for_generation(url: str, running: asyncio.Task[Any]) -> bool:
    """Wait until the engine generates; return False if `running` ends first."""
    async with aiohttp.ClientSession() as session:
        while not running.done():
            async with session.get(f"{url}/v1/loads") as answer:
                if (await answer.json())["loads"][0]["num_running_reqs"]:
                    return True
    return False


def new_samples() -> list[Sample]:
    rows = take_rows(shipped_rows(), EPISODES)
    return [Sample(prompt=row.prompt, label=row.label, index=n) for n, row in enumerate(rows)]


async def played(
    url: str, tokenizer, samples: Sequence[Sample], *, max_concurrent: int = EPISODES, **settings
) -> list[Sample]:
    args = args_for(url, tokenizer, strands_rollout={**SETTINGS, **settings})
    slots = asyncio.Semaphore(max_concurrent)

    async def play(sample: Sample) -> Sample:
        params = {"temperature": 1.0, "max_new_tokens": 512, "sampling_seed": 100 + (sample.index or 0)}
        async with slots:
            return await generate(args, sample, params)

    return list(await asyncio.gather(*map(play, samples)))


def tokens_of(samples: Sequence[Sample]) -> list[list[int]]:
    return [sample.tokens for sample in samples]


async def test_generate_keeps_tokens_under_weight_updates(engine, shipped_tokenizer, undisturbed):
    running = asyncio.create_task(played(engine, shipped_tokenizer, new_samples()))
    for version in range(2, 8):
        if not await wait_for_generation(engine, running):
            break
        await post(engine, "/pause_generation", mode="abort")
        # the same weights under another version, so the tokens stay the same
        await post(
            engine, "/update_weights_from_disk", model_path=shipped_tokenizer.name_or_path, weight_version=str(version)
        )
        await post(engine, "/continue_generation")
    samples = await running
    assert tokens_of(samples) == tokens_of(undisturbed)
    facts = [sample.metadata["strands_rollout"] for sample in samples]
    assert sum(fact["engine_aborts"] for fact in facts) > 0
    assert max(len(fact["weight_versions"]) for fact in facts) > 1
    for sample, fact in zip(samples, facts, strict=True):
        covered = [position for _, start, end, _ in fact["spans"] for position in range(start, end)]
        prompt = len(sample.tokens) - sample.response_length
        assert covered == [prompt + n for n, mask in enumerate(sample.loss_mask or []) if mask]


def is_open(sample: Sample) -> bool:
    return sample.status in (Sample.Status.PENDING, Sample.Status.ABORTED)


async def test_generate_resumes_to_the_tokens_of_an_undisturbed_run(engine, shipped_tokenizer, undisturbed) -> None:
    for first_limit in range(20, 600, 40):  # until an abort interrupts an episode
        samples, limit, aborts = new_samples(), first_limit, 0
        while any(map(is_open, samples)):
            count = itertools.count()
            again = [copy.deepcopy(sample) for sample in samples if is_open(sample)]
            # the limit counts reads of the flag, not seconds, so each round gets further than the previous one
            back = await played(engine, shipped_tokenizer, again, should_abort=lambda c=count, n=limit: next(c) >= n)
            aborts += sum(map(is_open, back))
            limit += 20
            by_index = {sample.index: sample for sample in back}
            samples = [by_index.get(sample.index, sample) for sample in samples]
        assert tokens_of(samples) == tokens_of(undisturbed)
        assert [sample.loss_mask for sample in samples] == [sample.loss_mask for sample in undisturbed]
        resumes = sum(sample.metadata["strands_rollout"]["resumes"] for sample in samples)
        if resumes:
            break
    assert aborts >= resumes > 0
