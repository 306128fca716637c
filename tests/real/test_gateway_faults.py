"""Episodes through the real routers while workers fail, are unreachable or missing, or a router refuses requests.

In the table "faults" at the end of the test run, `recovery_s` is the number of seconds from the repair to the end of
all episodes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from episode_stage import GREEDY, SAMPLED, EpisodeStage, episodes_on, facts_of, new_samples, until
from gateway_stage import NAMES, Gateway, ends_of, gateway_before, two_workers
from worker_front import WorkerFront

pytestmark = pytest.mark.real
EPISODES = 8
OUTAGE_S = 2.0
QUICK_BREAKER = ("--cb-failure-threshold", "3", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "3")


async def test_generate_waits_for_unreachable_worker(
    router: str, sglang: str, shipped_tokenizer: Any, report_row: Any
) -> None:
    async with (
        WorkerFront(sglang) as front,
        gateway_before(front.base_url, router=router) as gateway,
        episodes_on(gateway.base_url, shipped_tokenizer) as stage,
    ):
        playing = asyncio.create_task(stage.play(new_samples(EPISODES), SAMPLED))
        await until(lambda: len(front.passages) >= EPISODES)
        await front.close()
        await asyncio.sleep(OUTAGE_S)
        await front.open()
        await finish(playing, report_row, f"worker out of reach for {OUTAGE_S:g} s", router)


async def test_generate_survives_dead_worker_until_removed(
    sglang: str, shipped_tokenizer: Any, report_row: Any
) -> None:
    router = "sglang-router"  # its default routing policy sends all of these to one worker, also after that worker died
    async with two_workers(sglang, sglang, shipped_tokenizer, router=router) as (stage, gateway, fronts):
        await stage.play_one()  # one request: several at once could be spread over both workers
        (busy,) = [front for front in fronts if front.passages]
        busy.passages.clear()
        playing = asyncio.create_task(stage.play(new_samples(EPISODES), SAMPLED))
        await until(lambda: sum(len(front.passages) for front in fronts) >= EPISODES)
        assert len(busy.passages) >= EPISODES
        await busy.close()
        await asyncio.sleep(OUTAGE_S)
        await gateway.remove(busy.base_url)
        await finish(playing, report_row, "the only busy one of two workers dies", router)


async def test_generate_waits_for_open_circuit_breaker(
    router: str, sglang: str, shipped_tokenizer: Any, report_row: Any
) -> None:
    async with (
        WorkerFront(sglang) as front,
        gateway_before(front.base_url, router=router, flags=QUICK_BREAKER) as gateway,
        episodes_on(gateway.base_url, shipped_tokenizer) as stage,
    ):
        front.status = 500
        playing = asyncio.create_task(stage.play(new_samples(EPISODES), SAMPLED))
        await until(lambda: len(front.passages) >= 3)
        await asyncio.sleep(OUTAGE_S)
        front.status = None
        await finish(playing, report_row, "worker answers 500, breaker opens", router)


async def test_generate_waits_for_worker_registration(router, sglang, shipped_tokenizer, report_row) -> None:
    async with gateway_before(router=router) as gateway, episodes_on(gateway.base_url, shipped_tokenizer) as stage:
        playing = asyncio.create_task(stage.play(new_samples(EPISODES), SAMPLED))
        await until(lambda: len(stage.recorder.episodes) == EPISODES)
        await gateway.add(sglang)
        await finish(playing, report_row, "no worker yet", router)
        await gateway.remove(sglang)
        assert await gateway.workers() == []


async def finish(playing: asyncio.Task[Any], report_row: Any, fault: str, router: str) -> None:
    """Wait for all episodes after the repair, and check that all are exact."""
    clock = asyncio.get_running_loop().time
    repaired = clock()
    ends = ends_of(await playing)
    report_row("faults", fault=fault, router=NAMES[router], **ends.counts, recovery_s=round(clock() - repaired, 1))
    assert (len(ends.exact), ends.reasons, ends.lost) == (EPISODES, set(), [])


async def test_generate_fails_in_bounded_time_without_workers(shipped_tokenizer: Any, report_row: Any) -> None:
    async def fail(gateway: Gateway, words: str) -> None:
        clock = asyncio.get_running_loop().time
        async with episodes_on(gateway.base_url, shipped_tokenizer) as stage:
            started = clock()
            ends = ends_of(await stage.play(new_samples(EPISODES), SAMPLED, engine_patience_s=5.0))
        row = {"fault": "no worker at all", "router": NAMES[gateway.router], **ends.counts}
        report_row("faults", **row, gave_up_after_s=round(clock() - started, 1))
        assert (len(ends.masked), ends.exact, ends.lost) == (EPISODES, [], [])
        assert all(facts_of(sample)["stop_reason"] == "engine_error" for sample in ends.masked)
        assert all(f"attempts; the last failed with: {words}" in reason for reason in ends.reasons), ends.reasons

    async with gateway_before(router="smg") as smg, gateway_before(router="sglang-router") as forerunner:
        await asyncio.gather(fail(smg, "HTTP 404: "), fail(forerunner, "HTTP 503: No available workers"))


@asynccontextmanager
async def on_one(router: str, worker: str, tokenizer: Any) -> AsyncIterator[EpisodeStage]:
    """Yield a stage through a router on one worker."""
    async with gateway_before(worker, router=router) as gateway, episodes_on(gateway.base_url, tokenizer) as stage:
        yield stage


async def test_generate_does_not_retry_request_of_wrong_types(router, sglang, shipped_tokenizer) -> None:
    async with on_one(router, sglang, shipped_tokenizer) as stage:
        sample = await stage.play_one({**SAMPLED, "temperature": "hot"})
    assert len(stage.recorder.episodes[str(sample.session_id)]) == 1
    assert (sample.status.value, facts_of(sample)["stop_reason"]) == ("failed", "engine_error")
    assert "refused the request with HTTP 422: Failed to deserialize the JSON body" in facts_of(sample)["error"]
    assert 'sampling_params.temperature: invalid type: string "hot"' in facts_of(sample)["error"]


async def test_generate_learns_context_length_behind_router(router, sglang, shipped_tokenizer) -> None:
    async with on_one(router, sglang, shipped_tokenizer) as stage:
        sample = await stage.play_one({**GREEDY, "max_new_tokens": 100_000})
    assert ends_of([sample]).exact == [sample]
    refused = [exchange.output_ids is None for exchange in stage.recorder.episodes[str(sample.session_id)]]
    assert refused == [True, False, False]  # one refusal, then two turns
