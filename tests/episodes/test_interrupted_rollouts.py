"""Rollouts that are interrupted wherever they can be: no sample is invalid, nothing is sampled or done twice."""

import asyncio
import time
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest
import recorded_tools
from interruptible_policy import paced
from interruption_stage import (
    PARAMS,
    QUICK,
    Stage,
    latencies,
    report,
    run_steps,
    served,
    smooth_samples,
    stage_of,
)
from rough_weather import ALL_FAULTS, PLANS, Weather, prompts
from stand_in_process import finish_elsewhere
from stand_in_rollout import Buffer, StandInWorker, StepSize, run_group, update_weights

from strands_rollout import Sample

_ENGINE_FAULTS = ("aborted", "dequeued", "delayed")


@pytest.fixture(scope="module")
def quick_and_smooth(shipped_tokenizer: Any) -> dict[int, Any]:
    """The quick samples as they are where nothing goes wrong."""
    return asyncio.run(smooth_samples(shipped_tokenizer, QUICK, 16, per_group=2))


@pytest.fixture(autouse=True)
def _new_record() -> Iterator[None]:
    recorded_tools.forget()
    yield
    recorded_tools.forget()


@pytest.mark.parametrize(
    ("kept_as", "mask_offpolicy", "router"),
    [("json", False, False), ("pickle", True, True)],
)
async def test_partial_rollouts_lose_nothing_and_do_nothing_twice(
    shipped_tokenizer: Any,
    quick_and_smooth: dict[int, Any],
    capsys: pytest.CaptureFixture[str],
    kept_as: str,
    mask_offpolicy: bool,
    router: bool,
) -> None:
    weather = Weather(1, dict.fromkeys(_ENGINE_FAULTS, 0.05))
    stage = stage_of(shipped_tokenizer, weather, router=router)
    async with served(stage):
        buffer = Buffer(prompts(QUICK, 16), samples_per_group=2, kept_as=kept_as)
        rollout = stage.rollout(buffer, StepSize(groups=3, begun=6), mask_offpolicy=mask_offpolicy)
        await run_steps(stage, buffer, rollout, 16)
    aborted = len(stage.record.returned("aborted"))
    report(capsys, f"partial rollout kept as {kept_as}: aborted in {stage.record.phases()}; {latencies(stage.record)}")
    assert len(stage.finished) == 32
    assert aborted > 5
    assert buffer.handed_out["again"] > 2
    stage.check(quick_and_smooth)


async def test_weight_updates_interrupt_a_fully_async_rollout_that_goes_on_in_place(
    shipped_tokenizer: Any, quick_and_smooth: dict[int, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = stage_of(shipped_tokenizer, Weather(2, {}))
    async with served(stage):
        buffer = Buffer(prompts(QUICK, 16), samples_per_group=2)
        with StandInWorker(stage.args, PARAMS, buffer, stage.record, pool=8) as worker:
            groups: list[Any] = []
            for version in range(2, 8):  # an update after every third group, however long these take
                groups += await worker.take(min(3, 16 - len(groups)), 60.0)
                mode = ("abort", "in_place")[version % 2]
                await update_weights(stage.fake.worker_url, str(version), mode=mode, for_s=0.05)
    stage.finished += [sample for group in groups for sample in group]
    continued = sum(s.metadata["strands_rollout"].get("engine_aborts", 0) for s in stage.finished)
    report(capsys, f"fully async: {version - 1} updates, {continued} requests continued in place")
    assert worker.raised == []
    assert len(stage.finished) == 32
    assert continued > 0
    assert stage.record.returned("aborted") == []
    assert any(len(set(sample.weight_versions)) > 1 for sample in stage.finished)
    stage.check(quick_and_smooth)


async def test_a_turn_that_ends_after_the_flag_is_kept_and_its_tools_are_left_to_the_next_step(
    shipped_tokenizer: Any,
) -> None:
    stage = stage_of(shipped_tokenizer, lambda _asked: paced(0.01), router=True, abort_grace_s=30.0)
    async with served(stage, knows_context=True):
        await flag_raised(stage, "lingers", 4, stage.fake.arrived(4))
    assert recorded_tools.began == []
    assert stage.record.phases() == {"tools": 4}


async def flag_raised(stage: Stage, name: str, count: int, moment: Awaitable[None]) -> None:
    """Begin episodes, raise the flag at that moment, and wait for them."""
    buffer = Buffer(prompts([name], count), samples_per_group=1)
    rollout = stage.rollout(buffer, StepSize(groups=0, begun=count))
    running = [asyncio.create_task(run_group(rollout, group)) for group in buffer.get(count)]
    await moment
    stage.record.flag_at_s = time.monotonic()
    await asyncio.gather(*running)
    assert stage.record.raised == stage.record.violations == []


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_all_faults_at_once_in_partial_rollouts(
    shipped_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    smooth = await smooth_samples(shipped_tokenizer, [*PLANS], 8 * len(PLANS), per_group=2)
    weather = Weather(3, ALL_FAULTS)
    stage = stage_of(shipped_tokenizer, weather, router=True)
    async with served(stage):
        buffer = Buffer(prompts([*PLANS], 8 * len(PLANS)), samples_per_group=2, kept_as="json")
        rollout = stage.rollout(buffer, StepSize(groups=8, begun=20))
        steps = await run_steps(stage, buffer, rollout, 6 * len(PLANS))
        stage.record.flag_at_s = None
        elsewhere = [sample for group in buffer.get(len(buffer)) for sample in group]
        cut = [sample for sample in elsewhere if sample.status is Sample.Status.ABORTED]
        whole = [sample for sample in elsewhere if sample.status is not Sample.Status.ABORTED]
        stage.finished += [*await finish_elsewhere(stage.args, PARAMS, cut, stage.record), *whole]
        await run_steps(stage, buffer, rollout, 8 * len(PLANS) - len(stage.finished) // 2)
    report(capsys, f"{len(stage.finished)} samples in {steps} steps, {len(cut)} finished in another process")
    report(capsys, f"aborted in {stage.record.phases()}; {latencies(stage.record)}; faults: {weather.met}")
    assert sorted(sample.index for sample in stage.finished) == [*range(2 * 8 * len(PLANS))]
    assert len(cut) > 5
    stage.check(smooth)
