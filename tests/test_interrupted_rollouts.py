"""Rollouts that are interrupted wherever they can be: no sample is invalid, nothing is sampled or done twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import recorded_tools
from fake_sglang import FakeSGLang
from fake_sglang_reply import Reply
from harness import args_for
from interruptible_policy import Asked, Disturb, InterruptiblePolicy
from rollout_record import RolloutRecord, untruths
from rough_weather import ALL_FAULTS, ENDS, PLANS, Weather, prompts
from stand_in_buffer import Buffer
from stand_in_process import finish_elsewhere
from stand_in_rollout import StandInRollout, StepSize, run_group, update_weights
from stand_in_worker import StandInWorker

from strands_rollout import Sample

PARAMS = {"temperature": 1.0, "max_new_tokens": 700}
# prompts have 500 tokens, so the engine's context ends before the budget does; behind a router nobody is told
CONTEXT_LENGTH = 1100
_MOST_STEPS = 200
_ON_ITS_WAY_S = 0.02
_ENGINE_FAULTS = ("aborted", "dequeued", "delayed")
QUICK = ("calls", "lingers", "mixed", "slowtool", "answers", "slowmodel", "parallel", "slowboth", "failing")


@pytest.fixture(autouse=True)
def _new_record() -> Iterator[None]:
    recorded_tools.forget()
    yield
    recorded_tools.forget()


@dataclass
class Stage:
    """An engine in rough weather, and what is to be found out about a rollout on it."""

    fake: FakeSGLang
    policy: InterruptiblePolicy
    record: RolloutRecord
    args: SimpleNamespace
    tokenizer: Any
    finished: list[Any]

    def rollout(self, buffer: Buffer, size: StepSize, *, mask_offpolicy: bool = False) -> StandInRollout:
        rollout = StandInRollout(self.args, PARAMS, buffer, self.record, size, mask_offpolicy=mask_offpolicy)
        self.args.strands_rollout["should_abort"] = rollout.is_aborted
        return rollout

    def task_of(self, sample: Any) -> str:
        return str(sample.prompt[2:].partition("]]")[0])

    def check(self, *, most_dropped: int = 0) -> None:
        """Everything that must hold whatever has happened; tokens may be dropped only where nobody had time to read."""
        assert self.record.raised == []
        assert self.record.violations == []
        assert self.fake.violations == self.policy.violations == []
        assert self.fake.episodes.dropped[most_dropped:] == []
        assert recorded_tools.ended_twice() == []
        found: list[str] = []
        for sample in self.finished:
            task = self.task_of(sample)
            reason = sample.metadata["strands_rollout"]["stop_reason"]
            if reason not in ENDS.get(task.partition("/")[0], ("completed",)):
                found.append(f"{task}: ended by {reason}: {sample.metadata['strands_rollout']['error']}")
            elif not sample.remove_sample:
                masked = self.record.masked.get(sample.index, 0)
                found += untruths(sample, self.fake.episodes, task, masked_below=masked)
        assert found == []


def stage_of(
    tokenizer: Any, weather: Disturb, *, router: bool = False, keeps_requests: bool = False, **settings: Any
) -> Stage:
    policy = InterruptiblePolicy(tokenizer, PLANS, weather)
    fake = FakeSGLang(
        policy, context_length=CONTEXT_LENGTH, weight_version="1", router=router, keeps_requests=keeps_requests
    )
    ours = {"tools": list(recorded_tools.PATHS), "max_tool_iterations": 5, **settings}
    args = SimpleNamespace(strands_rollout=ours, partial_rollout=True)
    return Stage(fake, policy, RolloutRecord(tokenizer.decode), args, tokenizer, [])


async def run_steps(stage: Stage, buffer: Buffer, rollout: StandInRollout, groups: int) -> int:
    """Steps until so many groups are finished, with new weights after each; how many steps."""
    found, steps = 0, 0
    while found < groups and steps < _MOST_STEPS:
        done = await rollout.step()
        found += len(done)
        stage.finished += [sample for group in done for sample in group]
        steps += 1
        await update_weights(stage.fake.worker_url, str(steps + 1))
    return steps


def report(capsys: pytest.CaptureFixture[str], words: str) -> None:
    with capsys.disabled():
        print(f"\n{words}", end="")


def latencies(record: RolloutRecord) -> str:
    seconds = sorted(record.abort_latencies_s) or [0.0]
    return f"{len(seconds)} calls, median {seconds[len(seconds) // 2]:.3f} s, worst {seconds[-1]:.3f} s after the flag"


@pytest.mark.parametrize(
    ("kept_as", "mask_offpolicy", "router"),
    [("json", False, False), ("pickle", True, True)],
)
async def test_partial_rollouts_lose_nothing_and_do_nothing_twice(
    shipped_tokenizer: Any, capsys: pytest.CaptureFixture[str], kept_as: str, mask_offpolicy: bool, router: bool
) -> None:
    weather = Weather(1, dict.fromkeys(_ENGINE_FAULTS, 0.05))
    stage = stage_of(shipped_tokenizer, weather, router=router)
    async with stage.fake:
        vars(stage.args).update(vars(args_for(stage.fake.base_url, shipped_tokenizer)))
        buffer = Buffer(prompts(QUICK, 16), samples_per_group=2, kept_as=kept_as)
        rollout = stage.rollout(buffer, StepSize(groups=3, begun=6), mask_offpolicy=mask_offpolicy)
        await run_steps(stage, buffer, rollout, 16)
    aborted = len(stage.record.returned("aborted"))
    report(capsys, f"partial rollout kept as {kept_as}: aborted in {stage.record.phases()}; {latencies(stage.record)}")
    assert len(stage.finished) == 32
    assert aborted > 5
    assert buffer.handed_out["again"] > 2
    stage.check()
    assert max(stage.record.abort_latencies_s) < 0.3


async def test_weight_updates_interrupt_a_fully_async_rollout_that_goes_on_in_place(
    shipped_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = stage_of(shipped_tokenizer, Weather(2, {}))
    async with stage.fake:
        vars(stage.args).update(vars(args_for(stage.fake.base_url, shipped_tokenizer)))
        buffer = Buffer(prompts(QUICK, 16), samples_per_group=2)
        with StandInWorker(stage.args, PARAMS, buffer, stage.record, pool=8) as worker:
            version, groups = 1, []
            while len(groups) < 16 and version < _MOST_STEPS:
                groups += await worker.take(3, 0.25)
                version += 1
                mode = ("abort", "in_place")[version % 2]
                await update_weights(stage.fake.worker_url, str(version), mode=mode, for_s=0.05)
    stage.finished += [sample for group in groups for sample in group]
    continued = sum(s.metadata["strands_rollout"].get("engine_aborts", 0) for s in stage.finished)
    report(capsys, f"fully async: {version - 1} updates, {continued} requests continued in place")
    assert worker.raised == []
    assert len(stage.finished) == 32
    assert continued > 3
    assert stage.record.returned("aborted") == []
    assert any(len(set(sample.weight_versions)) > 1 for sample in stage.finished)
    stage.check()


async def test_no_request_is_tried_again_once_the_rollout_is_aborted(shipped_tokenizer: Any) -> None:
    def busy_first(asked: Asked) -> Reply | None:
        return Reply.status(503, "busy") if asked.attempt == 1 else None

    stage = stage_of(shipped_tokenizer, busy_first, router=True, keeps_requests=True)
    async with stage.fake:
        known = {"rollout_max_context_len": CONTEXT_LENGTH}
        vars(stage.args).update(vars(args_for(stage.fake.base_url, shipped_tokenizer, **known)))
        buffer = Buffer(prompts(["slowmodel"], 24), samples_per_group=1)
        rollout = stage.rollout(buffer, StepSize(groups=0, begun=24))
        running = [asyncio.create_task(run_group(rollout, group)) for group in buffer.get(24)]
        await stage.fake.arrived(24)
        await asyncio.sleep(0.19)  # the first retries come after 0.125 s, the last after 0.25 s
        stage.record.flag_at_s = flag_at_s = time.monotonic()
        await asyncio.gather(*running)
    assert stage.record.raised == stage.record.violations == []
    late = [request.rid for request in stage.fake.requests if request.at_s > flag_at_s + _ON_ITS_WAY_S]
    assert late == []
    assert 24 < len(stage.fake.requests) < 48
    assert max(stage.record.abort_latencies_s) < 0.3


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_all_faults_at_once_in_partial_rollouts(
    shipped_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    weather = Weather(3, ALL_FAULTS)
    stage = stage_of(shipped_tokenizer, weather, router=True)
    async with stage.fake:
        vars(stage.args).update(vars(args_for(stage.fake.base_url, shipped_tokenizer)))
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
    stage.check()
    # behind a router a request that was on its way when the flag went up runs on
    seconds = sorted(stage.record.abort_latencies_s)
    assert seconds[len(seconds) * 95 // 100] < 0.3


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_all_faults_at_once_in_a_fully_async_rollout(
    shipped_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    weather = Weather(4, ALL_FAULTS)
    stage = stage_of(shipped_tokenizer, weather, router=True)
    count = 9 * len(PLANS)
    async with stage.fake:
        vars(stage.args).update(vars(args_for(stage.fake.base_url, shipped_tokenizer)))
        buffer = Buffer(prompts([*PLANS], count), samples_per_group=2, kept_as="json")
        with StandInWorker(stage.args, PARAMS, buffer, stage.record, pool=24) as worker:
            version, groups = 1, []
            while len(groups) < count and version < 4 * _MOST_STEPS:
                groups += await worker.take(8, 0.3)
                version += 1
                mode = ("abort", "in_place", "abort", "retract")[version % 4]
                await update_weights(stage.fake.worker_url, str(version), mode=mode, for_s=0.05)
    stage.finished += [sample for group in groups for sample in group]
    continued = sum(s.metadata["strands_rollout"].get("engine_aborts", 0) for s in stage.finished)
    report(capsys, f"fully async: {len(stage.finished)} samples, {version - 1} updates, {continued} continued in place")
    report(capsys, f"faults: {weather.met}")
    assert worker.raised == []
    assert sorted(sample.index for sample in stage.finished) == [*range(2 * count)]
    assert stage.record.returned("aborted") == []
    stage.check()
