"""An engine in rough weather, a rollout on it, and what must hold of its samples whatever has happened.

What the interruption tests and the load test share.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import recorded_tools
from fake_sglang import FakeSGLang
from fake_sglang_reply import Reply
from harness import args_for
from interruptible_policy import Disturb, InterruptiblePolicy
from rollout_record import RolloutRecord, untruths
from rough_weather import ENDS, PLANS, prompts
from stand_in_rollout import Buffer, StandInRollout, StepSize, update_weights

PARAMS = {"temperature": 1.0, "max_new_tokens": 700}
# prompts have 500 tokens, so the engine's context ends before the budget does; behind a router nobody is told
CONTEXT_LENGTH = 1100
MOST_STEPS = 200
QUICK = ("calls", "lingers", "mixed", "slowtool", "answers", "slowmodel", "parallel", "slowboth", "failing")
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

    def connect(self, *, knows_context: bool = False) -> None:
        """Name the running engine in the arguments."""
        vars(self.args).update(vars(args_for(self.fake.base_url, self.tokenizer)))
        if knows_context:
            self.args.rollout_max_context_len = CONTEXT_LENGTH

    def task_of(self, sample: Any) -> str:
        return str(sample.prompt[2:].partition("]]")[0])

    def check(self, smooth: Mapping[int, Any], *, most_dropped: int = 0) -> None:
        """Everything that must hold whatever has happened.

        Args:
            smooth: By index, the samples as they are where nothing goes wrong.
            most_dropped: Answers of the engine that may be lost, where nobody has the time to read them.
        """
        for what, found in {
            "raised": self.record.raised,
            "invalid": self.record.violations,
            "not token-in/token-out": [*self.fake.violations, *self.policy.violations],
            "dropped": self.fake.episodes.dropped[most_dropped:],
            "run twice": recorded_tools.ended_twice(),
            "untrue": self._untruths(smooth, may_restart=most_dropped > 0),
        }.items():
            assert not found, f"{what}, {len(found)}: {found[:5]}"

    def _untruths(self, smooth: Mapping[int, Any], *, may_restart: bool) -> list[str]:
        found: list[str] = []
        for sample in self.finished:
            task = self.task_of(sample)
            reason = sample.metadata["strands_rollout"]["stop_reason"]
            if reason not in ENDS.get(task.partition("/")[0], ("completed",)):
                found.append(f"{task}: ended by {reason}: {sample.metadata['strands_rollout']['error']}")
            elif not sample.remove_sample:
                masked = self.record.masked.get(sample.index, 0)
                found += untruths(
                    sample, self.fake.episodes, task, masked_below=masked, most_restarts=MOST_STEPS * may_restart
                )
                found += differences(sample, smooth[sample.index])
                told, aborts = sample.metadata["strands_rollout"].get("aborts"), self.record.aborts_of(sample.index)
                found += [f"{task}: it says aborts={told}; it came back {aborts} times"] if told != aborts else []
        return found


def stage_of(tokenizer: Any, weather: Disturb, *, router: bool = False, **settings: Any) -> Stage:
    policy = InterruptiblePolicy(tokenizer, PLANS, weather)
    fake = FakeSGLang(policy, context_length=CONTEXT_LENGTH, weight_version="1", router=router, keeps_requests=False)
    ours = {"tools": list(recorded_tools.PATHS), "max_tool_iterations": 5, **settings}
    args = SimpleNamespace(strands_rollout=ours, partial_rollout=True)
    return Stage(fake, policy, RolloutRecord(tokenizer.decode), args, tokenizer, [])


@asynccontextmanager
async def served(stage: Stage, *, knows_context: bool = False) -> AsyncIterator[None]:
    """The engine is up, and the arguments name it; and its context length, if they are to."""
    async with stage.fake:
        stage.connect(knows_context=knows_context)
        yield


async def smooth_samples(tokenizer: Any, names: Sequence[str], groups: int, *, per_group: int) -> dict[int, Any]:
    """The same samples by index, where nothing goes wrong but what must."""
    stage = stage_of(tokenizer, lambda asked: Reply.status(500) if asked.name == "dead" else None)
    async with served(stage):
        buffer = Buffer(prompts(names, groups), samples_per_group=per_group)
        # nothing lingers that has been begun before
        recorded_tools.began.extend(f"session-{index}:0" for index in range(groups * per_group))
        done = await stage.rollout(buffer, StepSize(groups=groups, begun=groups)).step()
    assert stage.record.raised == stage.record.violations == stage.fake.violations == []
    recorded_tools.forget()
    return {sample.index: sample for group in done for sample in group}


def differences(sample: Any, smooth: Any) -> list[str]:
    """What an interrupted sample has otherwise than the same one that was not; a budget that is not known yet may."""
    facts, expected = (one.metadata["strands_rollout"] for one in (sample, smooth))
    names = [name for name in _SAME_FACTS if facts.get(name) != expected[name]]
    if sample.tokens != smooth.tokens:
        names.append("tokens")
    if not names or "overflows" in sample.prompt:
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
