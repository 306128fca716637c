"""An engine in rough weather, a rollout on it, and what must hold of its samples whatever has happened."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import recorded_tools
from fake_sglang import FakeSGLang
from harness import args_for
from interruptible_policy import Disturb, InterruptiblePolicy
from rollout_record import RolloutRecord, untruths
from rough_weather import PLANS, prompts
from stand_in_rollout import Buffer, StandInRollout, StepSize, update_weights

PARAMS = {"temperature": 1.0, "max_new_tokens": 700}
CONTEXT_LENGTH = 1100
MOST_STEPS = 200
QUICK = tuple(PLANS)
_SAME_FACTS = (
    "stop_reason", "final_text", "turns", "tool_iterations", "tool_calls", "tool_errors", "parse_failures",
    "sampled_tokens",
)  # fmt: skip


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

    def check(self, smooth: Mapping[int, Any]) -> None:
        """Everything that must hold whatever has happened; `smooth` has samples by index where nothing goes wrong."""
        for what, found in {
            "raised": self.record.raised,
            "invalid": self.record.violations,
            "not token-in/token-out": [*self.fake.violations, *self.policy.violations],
            "dropped": self.fake.episodes.dropped,
            "run twice": recorded_tools.ended_twice(),
            "untrue": self._untruths(smooth),
        }.items():
            assert not found, f"{what}, {len(found)}: {found[:5]}"

    def _untruths(self, smooth: Mapping[int, Any]) -> list[str]:
        found: list[str] = []
        for sample in self.finished:
            task = self.task_of(sample)
            facts = sample.metadata["strands_rollout"]
            if facts["stop_reason"] != "completed":
                found.append(f"{task}: ended by {facts['stop_reason']}: {facts['error']}")
            elif not sample.remove_sample:
                masked = self.record.masked.get(sample.index, 0)
                found += untruths(sample, self.fake.episodes, task, masked_below=masked)
                found += differences(sample, smooth[sample.index])
                told, aborts = facts.get("aborts"), self.record.aborts_of(sample.index)
                found += [f"{task}: it says aborts={told}; it came back {aborts} times"] if told != aborts else []
        return found


def stage_of(tokenizer: Any, weather: Disturb, *, router: bool = False) -> Stage:
    policy = InterruptiblePolicy(tokenizer, PLANS, weather)
    fake = FakeSGLang(policy, context_length=CONTEXT_LENGTH, weight_version="1", router=router, keeps_requests=False)
    ours = {"tools": list(recorded_tools.PATHS), "max_tool_iterations": 5}
    args = SimpleNamespace(strands_rollout=ours, partial_rollout=True)
    return Stage(fake, policy, RolloutRecord(tokenizer.decode), args, tokenizer, [])


@asynccontextmanager
async def served(stage: Stage) -> AsyncIterator[None]:
    """The engine is up, and the arguments name it."""
    async with stage.fake:
        vars(stage.args).update(vars(args_for(stage.fake.base_url, stage.tokenizer)))
        yield


async def smooth_samples(tokenizer: Any, names: Sequence[str], groups: int, *, per_group: int) -> dict[int, Any]:
    """The same samples by index, where nothing goes wrong."""
    stage = stage_of(tokenizer, lambda _asked: None)
    async with served(stage):
        buffer = Buffer(prompts(names, groups), samples_per_group=per_group)
        # nothing lingers that has been begun before
        recorded_tools.began.extend(f"session-{index}:0" for index in range(groups * per_group))
        done = await stage.rollout(buffer, StepSize(groups=groups, begun=groups)).step()
    assert stage.record.raised == stage.record.violations == stage.fake.violations == []
    recorded_tools.forget()
    return {sample.index: sample for group in done for sample in group}


def differences(sample: Any, smooth: Any) -> list[str]:
    """What an interrupted sample has otherwise than the same one that was not."""
    facts, expected = (one.metadata["strands_rollout"] for one in (sample, smooth))
    names = [name for name in _SAME_FACTS if facts.get(name) != expected[name]]
    if sample.tokens != smooth.tokens:
        names.append("tokens")
    if not names:
        return []
    return [f"sample {sample.index} ({sample.prompt:.20}): {', '.join(names)} differ from an uninterrupted one's"]


async def run_steps(stage: Stage, buffer: Buffer, rollout: StandInRollout, groups: int) -> int:
    """Steps until so many groups are finished, with new weights after each; how many steps."""
    found, steps = 0, 0
    while found < groups and steps < MOST_STEPS:
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
