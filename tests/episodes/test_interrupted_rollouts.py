"""Rollouts that are interrupted wherever they can be: no sample is invalid, nothing is sampled or done twice."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import recorded_tools
from interruption_stage import PARAMS, QUICK, latencies, report, run_steps, served, smooth_samples, stage_of
from rough_weather import Weather, prompts
from stand_in_rollout import Buffer, StandInWorker, StepSize, update_weights

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


@pytest.mark.parametrize(("kept_as", "mask_offpolicy", "router"), [("json", False, False), ("pickle", True, True)])
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
