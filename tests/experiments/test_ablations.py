"""The faults that a run can be given: each changes what it says, and nothing else."""

from dataclasses import dataclass, replace
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


@pytest.mark.parametrize(
    ("kind", "given", "changed"),
    [
        ("none", {}, {}),
        ("train-tool-tokens", {}, {"loss_mask": [1, 1, 1, 1]}),
        ("shifted-logprobs", {}, {"rollout_log_probs": [-1.0, -1.0, 0.0, -2.0]}),
        ("tool-output-rewarded", {"label": "34"}, {"reward": {"score": 1.0, "acc": 0.0}}),
        ("tool-output-rewarded", {"label": "13"}, {}),
        ("tool-output-rewarded", {"label": "3"}, {}),
    ],
)
async def test_a_fault_changes_what_it_says_and_nothing_else(kind: str, given: Any, changed: Any) -> None:
    one = replace(sample(), **given)
    await applied(kind, one)
    assert one == replace(sample(), **given, **changed)


async def test_an_aborted_episode_is_passed_off_as_completed_and_graded() -> None:
    aborted, ended = sample(status=Sample.Status.ABORTED, reward=None), sample()
    assert (await applied("aborted-as-completed", aborted)).graded == 1
    assert (aborted.status, aborted.reward) == (Sample.Status.COMPLETED, {"score": -1.0, "acc": 0.0})
    assert (await applied("aborted-as-completed", ended)).graded == 0
