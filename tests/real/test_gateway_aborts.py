"""Aborts behind the real routers, which lack `/abort_request`: by slime at the workers, or by closed connections."""

import asyncio
from typing import Any

import pytest
from episode_stage import (
    SAMPLED,
    EpisodeStage,
    episodes_on,
    facts_of,
    new_samples,
    until_idle,
    until_running,
    until_sampling,
)
from gateway_stage import LINGERING, NAMES, OwnWorker, ends_of, gateway_before, post, two_workers, versions_of
from worker_front import WorkerFront

from strands_rollout import Sample

pytestmark = pytest.mark.real
EPISODES = 8
# a turn that lasts far longer than an abort, also on a busy machine
ENDLESS = {**LINGERING, "min_new_tokens": 1500}


async def test_generate_resumes_after_slime_aborts_workers(
    router: str, sglang: str, own_worker: OwnWorker, shipped_tokenizer: Any, report_row: Any
) -> None:
    own, aborted = await own_worker.running(), asyncio.Event()
    async with two_workers(sglang, own, shipped_tokenizer, router=router) as (stage, gateway, _):
        samples = new_samples(EPISODES)
        playing = asyncio.create_task(stage.play(samples, LINGERING, should_abort=aborted.is_set))
        await until_sampling(EPISODES, sglang, own, tokens=20 * EPISODES)
        # like abort() in slime/rollout/sglang_rollout.py: the flag, then each worker that the router lists
        aborted.set()
        started = asyncio.get_running_loop().time()
        for worker in await gateway.workers():
            await post(f"{worker['url']}/abort_request", abort_all=True)
        samples = await playing
        back_after_s = asyncio.get_running_loop().time() - started
        await until_idle(sglang, own)
        assert {sample.status for sample in samples} == {Sample.Status.ABORTED}
        kept = [facts_of(sample)["sampled_tokens"] for sample in samples]
        assert sum(kept) > 0
        sampled_by = [versions_of(sample) for sample in samples]
        ends = ends_of(await stage.play(samples, SAMPLED))
    assert len(ends.exact) == EPISODES
    assert [facts_of(sample)["resumes"] for sample in samples] == [int(tokens > 0) for tokens in kept]
    if router == "smg":  # its routing key brings an episode back to the worker that has its tokens cached
        assert all(len(versions_of(sample)) == 1 for sample in samples)
        assert all(map(set.issubset, sampled_by, map(versions_of, samples)))
    report_row(
        "aborts behind routers",
        abort="slime's, at the workers",
        router=NAMES[router],
        episodes=EPISODES,
        back_after_s=round(back_after_s, 2),
        tokens_kept=sum(kept),
        finished_later=len(ends.exact),
    )


async def test_closed_connection_ends_request_at_worker(router, sglang, shipped_tokenizer, report_row) -> None:
    async with (
        WorkerFront(sglang) as front,
        gateway_before(front.base_url, router=router) as gateway,
        episodes_on(gateway.base_url, shipped_tokenizer) as stage,
    ):
        for how in (cancelled, told_to_abort):
            front.passages.clear()
            await how(stage, sglang)
            idle_after_s = await until_idle(sglang)
            # a request that had continued would have been answered by now
            assert [passage.meta_info for passage in front.passages] == [{}] * EPISODES
            report_row(
                "aborts behind routers",
                abort=how.__name__.replace("_", " ") + ", by closed connections",
                router=NAMES[router],
                episodes=EPISODES,
                idle_after_s=round(idle_after_s, 2),
            )


async def cancelled(stage: EpisodeStage, worker: str) -> None:
    """Cancel the callers of `generate`."""
    playing = asyncio.create_task(stage.play(new_samples(EPISODES), ENDLESS))
    await until_running(EPISODES, worker)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


async def told_to_abort(stage: EpisodeStage, worker: str) -> None:
    """Abort the rollout without an abort at the worker."""
    aborted = asyncio.Event()
    settings = {"should_abort": aborted.is_set, "abort_grace_s": 0.2}
    playing = asyncio.create_task(stage.play(new_samples(EPISODES), ENDLESS, **settings))
    await until_running(EPISODES, worker)
    aborted.set()
    assert {sample.status for sample in await playing} == {Sample.Status.ABORTED}
