"""`contract_violations`: valid samples have none; each broken field is named."""

from typing import Any

import pytest

from strands_rollout.samples import Sample
from strands_rollout.slime_plugin.sample_contract import contract_violations


def decode(ids: Any) -> str:
    return " ".join(map(str, ids))


def valid_sample(**changes: Any) -> Sample:
    """Return a sample with the prompt 1 2 3, a turn, a tool result and another turn."""
    sample = Sample(prompt="2 + 2?", label="4", index=0)
    sample.tokens = [1, 2, 3, 10, 11, 20, 21, 12, 13]
    sample.response_length = 6
    sample.response = decode([10, 11, 20, 21, 12, 13])
    sample.loss_mask = [1, 1, 0, 0, 1, 1]
    sample.rollout_log_probs = [-0.5, -0.1, 0.0, 0.0, -2.0, -0.2]
    sample.status = Sample.Status.COMPLETED
    sample.reward = {"score": 1.0, "acc": 1.0}
    sample.metadata = {"strands_rollout": {"stop_reason": "completed"}}
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def violations(sample: Sample, **options: Any) -> list[str]:
    return contract_violations(sample, decode=decode, **{"reward_key": "score", **options})


FILLER = {"tokens": [1, 2, 3, 9], "response_length": 1, "response": "", "loss_mask": [0], "rollout_log_probs": [0.0]}


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({**FILLER, "remove_sample": True, "status": Sample.Status.FAILED}, {}),
        ({"status": Sample.Status.ABORTED, "reward": None}, {"may_abort": True}),
        ({"reward": 0.5}, {"reward_key": None}),
    ],
    ids=["completed", "no sampled token", "aborted without a reward", "no reward key"],
)
def test_contract_violations_accepts_a_valid_sample(changes: dict[str, Any], options: dict[str, Any]) -> None:
    assert violations(valid_sample(**changes), **options) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"tokens": tokens}, "tokens is") for tokens in ([1, 2, "3"], [1, 2, -3])),
        ({"tokens": [10, 11, 20, 21, 12, 13]}, "at least one prompt token"),
        ({"response_length": 0, "loss_mask": [], "rollout_log_probs": []}, "response_length is 0"),
        ({"loss_mask": None}, "loss_mask has the value None"),
        ({"rollout_log_probs": [-0.5] * 7}, "rollout_log_probs has 7 values"),
        ({"loss_mask": [1, 1, 0, 0, 1, 2]}, "loss_mask[5] is 2"),
        ({"rollout_log_probs": [-0.5, float("nan"), 0.0, 0.0, -2.0, -0.2]}, "rollout_log_probs[1] is nan"),
        ({"rollout_log_probs": [-0.5, -0.1, -3.0, 0.0, -2.0, -0.2]}, "log_probs[2] is -3.0 where loss_mask is 0"),
        ({"response": "another text"}, "response is 'another text'"),
        ({"status": Sample.Status.PENDING}, "status is pending"),
        ({"status": Sample.Status.ABORTED}, "status is aborted"),
        ({"status": Sample.Status.FAILED}, "a FAILED sample would be trained"),
        ({"loss_mask": [0] * 6, "rollout_log_probs": [0.0] * 6}, "no token of a COMPLETED sample would be trained"),
        ({"loss_mask": [1, 1, 0, 0, 1, 0], "rollout_log_probs": [-0.5, -0.1, 0, 0.0, -2.0, 0.0]}, "ends with context"),
        ({"reward": None}, "reward is None"),
        ({"reward": {"acc": 1.0}}, "expected a dict with a finite number under 'score'"),
        ({"reward": {"score": float("inf")}}, "under 'score'"),
        ({"reward": {"score": 10**400}}, "under 'score'"),
        ({"metadata": {}}, "metadata['strands_rollout'] is missing"),
        ({"metadata": {"strands_rollout": {"model": object()}}}, "metadata can't be written as JSON"),
        ({"metadata": {"strands_rollout": {"stop_reason": "aborted"}}}, "the episode was aborted"),
        (
            {"metadata": {"strands_rollout": {"stop_reason": "aborted"}}, "status": Sample.Status.TRUNCATED},
            "the episode was aborted",
        ),
        ({"non_generation_time": -1.0}, "non_generation_time is -1.0"),
        ({"trajectory": []}, "undeclared attributes trajectory"),
    ],
)
def test_contract_violations_names_only_the_broken_field(changes: dict[str, Any], message: str) -> None:
    found = violations(valid_sample(**changes))
    assert len(found) == 1, found
    assert message in found[0]
