"""Hundreds of episodes at once on one loop, with tools, aborts, weight updates and a failing engine in between."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import recorded_tools
from engine_thread import on_a_thread
from interruption_stage import QUICK, Stage, latencies, report, smooth_samples, stage_of
from rough_weather import ALL_FAULTS, Weather, prompts
from stand_in_rollout import Buffer, StepSize, update_weights
from strain import measured

EPISODES = 512
_MOST_S = 120.0


@pytest.fixture(autouse=True)
def _new_record() -> Iterator[None]:
    recorded_tools.forget()
    yield
    recorded_tools.forget()


async def all_at_once(stage: Stage) -> int:
    """Steps that begin everything there is, until all are finished; new weights come in the midst of each."""
    buffer = Buffer(prompts(QUICK, EPISODES), samples_per_group=1, kept_as="pickle")
    steps = 0
    while len(stage.finished) < EPISODES:
        steps += 1
        left = EPISODES - len(stage.finished)
        rollout = stage.rollout(buffer, StepSize(groups=max(1, left * 2 // 3), begun=left, concurrency=EPISODES))
        updating = asyncio.create_task(_update_often(stage, steps))
        stage.finished += [sample for group in await rollout.step() for sample in group]
        updating.cancel()
        await asyncio.gather(updating, return_exceptions=True)
        await update_weights(stage.fake.worker_url, f"{steps}.0")  # also goes on, where an update was cut
    return steps


async def _update_often(stage: Stage, step: int) -> None:
    for number in range(1, 1000):
        await asyncio.sleep(0.5)
        await update_weights(stage.fake.worker_url, f"{step}.{number}", for_s=0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_hundreds_of_episodes_at_once_are_all_finished(
    shipped_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    smooth = await smooth_samples(shipped_tokenizer, QUICK, EPISODES, per_group=1)
    weather = Weather(5, ALL_FAULTS, token_s=0.02)
    stage = stage_of(shipped_tokenizer, weather)
    with on_a_thread(stage.fake):
        stage.connect()
        gc.collect()
        async with asyncio.timeout(_MOST_S), measured() as strain:
            steps = await all_at_once(stage)
    record = stage.record
    per_episode_mb, dropped = strain.memory_mb / EPISODES, len(stage.fake.episodes.dropped)
    median_s, most_s, worst_s = (strain.lag_s(share) for share in (0.5, 0.99, 1))
    requests = stage.fake.requests_seen
    report(capsys, f"{EPISODES} episodes at once, {steps} steps, {requests} requests; faults: {weather.met}")
    report(capsys, f"memory {strain.memory_mb:.0f} MiB at the peak, {per_episode_mb * 1024:.0f} KiB per episode")
    report(capsys, f"loop late by {median_s:.3f} s (median), {most_s:.3f} s (99%), {worst_s:.3f} s (worst)")
    report(capsys, f"aborted in {record.phases()}; {latencies(record)}; {dropped} partial answers came too late")
    assert record.most_pending == EPISODES
    assert sorted(sample.index for sample in stage.finished) == [*range(EPISODES)]
    assert record.pending == 0
    stage.check(smooth, most_dropped=EPISODES // 10)
    assert per_episode_mb < 1.0
    assert strain.computed_s(0.99) < 1.0
