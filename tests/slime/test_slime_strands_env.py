"""Environments of strands-env through slime's own loop: whole rollouts, and partial ones that later rollouts resume."""

from typing import Any

import pytest
from fake_sglang import Reply
from interruptible_policy import ANSWER, Change, PolicyRequest, call, hold_after, turn
from slime_interruptions import Begin, Scene, facts_of
from slime_run import trained_tokens

pytestmark = pytest.mark.slime
pytest.importorskip("strands_env", reason="needs strands-env, on Python 3.12 or newer")

PLANS = {"slow": [turn("One call.", call("work", "a")), turn("Another.", call("work", "b")), ANSWER], "quick": [ANSWER]}
SETTINGS = {"tools": [], "environment": "strands_env", "environment_factory": "strands_env_recorded.create_env_factory"}


def totals(samples: list[Any]) -> tuple[int, int]:
    """Return the numbers of the samples' trained tokens and of sampled tokens that are in no sample."""
    dropped = sum(facts_of(sample)["dropped_sampled_tokens"] or 0 for sample in samples)
    return sum(sum(sample.loss_mask) for sample in samples if not sample.remove_sample), dropped


async def test_slime_trains_a_strands_environment_exactly(begin: Begin) -> None:
    scene: Scene = await begin(
        PLANS, ["slow", "quick"], settings=SETTINGS, rollout_batch_size=2, over_sampling_batch_size=2
    )
    ranks = await scene.rollouts.train()
    samples = scene.rollouts.samples
    assert scene.problems(samples) == []
    assert {sample.status.value for sample in samples} == {"completed"}
    assert [scene.sampled_ids(sample) for sample in samples] == [scene.planned_ids(sample) for sample in samples]
    assert {facts_of(sample)["environment"]["termination_reason"] for sample in samples} == {"task_complete"}
    assert [sample.reward["method"] for sample in samples] == ["environment"] * len(samples)
    on_wire = sum(episode.sampled_length for episode in scene.engine.episodes)
    assert sum(map(trained_tokens, ranks)) == on_wire == sum(totals(samples))


class Cuts:
    """Script that holds slow tasks in the middle of a turn, where slime's abort interrupts them.

    Args:
        at: By turn, the number of tokens after which the engine holds the turn.
        quick_s: Delay of the answer to a quick task, in seconds; the slow tasks must arrive before its end.
    """

    def __init__(self, at: dict[int, int], quick_s: float) -> None:
        self.at, self.quick_s = at, quick_s

    def __call__(self, asked: PolicyRequest) -> Reply | Change | None:
        if asked.name == "quick":
            return lambda rest: rest.after(self.quick_s)
        cut = self.at.get(asked.turn)
        return None if cut is None else hold_after(cut)


async def test_partial_rollouts_continue_a_strands_environment(begin: Begin) -> None:
    cuts = Cuts({}, quick_s=1.5)
    scene: Scene = await begin(
        PLANS,
        ["slow", *["quick"] * 4],
        cuts,
        settings=SETTINGS | {"resumable": "replay"},
        partial_rollout=True,
        rollout_batch_size=1,
        over_sampling_batch_size=2,
    )
    for number, cuts.at in enumerate(({0: 4}, {1: 3}, {2: 2})):
        await scene.rollouts.train(number)
        [group] = scene.buffer
        assert [sample.status.value for sample in group] == ["aborted"] * 2
        await scene.update_weights(str(number + 2))
    scene.policy.disturb = lambda _asked: None
    scene.rollouts.args.over_sampling_batch_size = 1
    trained = sum(map(trained_tokens, await scene.rollouts.train(3)))
    samples = scene.rollouts.samples
    # tools run again in a new environment, so each call may end several times
    assert [found for found in scene.problems(samples) if "ended twice" not in found] == []
    for sample in samples:
        facts = facts_of(sample)
        assert (sample.status.value, facts["aborts"], facts["resumes"], facts["turns"]) == ("completed", 3, 3, 3)
        assert scene.sampled_ids(sample) == scene.planned_ids(sample)
        assert facts["weight_versions"] == ["1", "2", "3", "4"]
    assert totals(samples) == (trained, 0)
    assert trained == sum(scene.engine.episodes[sample.session_id].sampled_length for sample in samples)
