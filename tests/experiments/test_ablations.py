"""The faults that a run can be given: each changes what it says, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from experiments.methods import Experiment
from strands_rollout.samples import Sample


@dataclass
class Grader:
    """Grades everything as wrong; the text of an id is the id."""

    graded: int = 0

    async def grade(self, sample: Sample) -> None:
        self.graded += 1
        sample.reward = {"score": -1.0, "acc": 0.0}

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def sample(**values: Any) -> Sample:
    """Two sampled tokens, a tool's answer 34, and another sampled token."""
    given: dict[str, Any] = {"reward": {"score": -1.0, "acc": 0.0}, "status": Sample.Status.COMPLETED} | values
    arrays = {"loss_mask": [1, 1, 0, 1], "rollout_log_probs": [-1.0, -2.0, 0.0, -3.0]}
    return Sample(tokens=[1, 2, 11, 12, 34, 13], response_length=4, label="34", **arrays, **given)


async def applied(kind: Any, one: Sample) -> Grader:
    grader = Grader()
    await Experiment("tito", kind).prepare([one], grader)  # type: ignore[arg-type]
    return grader


async def test_no_ablation_changes_nothing() -> None:
    one = sample()
    await applied("none", one)
    assert one == sample()


async def test_tool_tokens_are_trained() -> None:
    one = sample()
    await applied("train-tool-tokens", one)
    assert one.loss_mask == [1, 1, 1, 1]


async def test_logprobs_are_those_of_the_sampled_token_before() -> None:
    one = sample()
    await applied("shifted-logprobs", one)
    assert one.rollout_log_probs == [-1.0, -1.0, 0.0, -2.0]


async def test_an_aborted_episode_is_passed_off_as_completed_and_graded() -> None:
    aborted, ended = sample(status=Sample.Status.ABORTED, reward=None), sample()
    assert (await applied("aborted-as-completed", aborted)).graded == 1
    assert (aborted.status, aborted.reward) == (Sample.Status.COMPLETED, {"score": -1.0, "acc": 0.0})
    assert (await applied("aborted-as-completed", ended)).graded == 0


@pytest.mark.parametrize(("label", "score"), [("34", 1.0), ("13", -1.0), ("3", -1.0)])
async def test_only_what_a_tool_printed_is_rewarded(label: str, score: float) -> None:
    one = sample()
    one.label = label
    await applied("tool-output-rewarded", one)
    assert one.reward == {"score": score, "acc": 0.0}
