"""Partial rollouts through slime's own loop and buffer: later rollouts resume aborted samples."""

import copy
from typing import Any

import pytest
import recorded_tools
from interruptible_policy import ANSWER, call, turn
from slime_interruptions import PROGRAM, Begin, Holds, Scene, facts_of
from slime_run import load_dump, trained_tokens

pytestmark = pytest.mark.slime

PLANS = {
    "slow": [
        turn("I shall work on this first.", call("work")),
        turn("And on these two.", call("work", "a"), call("work", "b")),
        ANSWER,
    ],
    "quick": [ANSWER],
}


async def one_rollout(scene: Scene, number: int) -> None:
    """Run a rollout that its quick group ends; then update weights, with the aborted samples in slime's buffer."""
    await scene.rollouts.train(number)
    assert [sample.prompt[0]["content"][:7] for sample in scene.rollouts.samples] == ["[[quick"] * 2
    await scene.update_weights(str(number + 2))


async def last_rollout(scene: Scene, number: int) -> tuple[list[Any], int]:
    """Run a rollout of the buffered group alone, without abort; return samples and the number of trained tokens."""
    scene.policy.disturb = lambda _asked: None
    scene.rollouts.args.over_sampling_batch_size = 1
    ranks = await scene.rollouts.train(number)
    assert scene.buffer == []
    return scene.rollouts.samples, sum(map(trained_tokens, ranks))


async def started(begin: Begin, holds: Holds, *, third: str = "quick", **more: Any) -> Scene:
    """Begin with a slow task, a quick task, a `third` task, and further quick tasks."""
    given = {"partial_rollout": True, "rollout_batch_size": 1, "over_sampling_batch_size": 2, **more}
    return await begin(PLANS, ["slow", "quick", third, *["quick"] * 3], holds, **given)


@pytest.mark.parametrize(("mask", "player"), [(False, {}), (True, {}), (False, PROGRAM), (True, PROGRAM)])
async def test_partial_rollout_finishes_repeatedly_aborted_samples(begin, mask, player) -> None:
    holds = Holds()
    scene = await started(begin, holds, mask_offpolicy_in_partial_rollout=mask, **player)
    for number, cut in enumerate(((0, 4), (1, 0), (1, 6), (2, 3))):
        holds.hold(*cut)
        await one_rollout(scene, number)
        [group] = scene.buffer
        assert [sample.status.value for sample in group] == ["aborted"] * 2
    samples, trained = await last_rollout(scene, 4)
    assert (scene.problems(samples), load_dump(scene.rollouts, 4)) == ([], samples)
    for sample in samples:
        assert (sample.status.value, sample.reward["score"]) == ("completed", 1.0)
        assert scene.sampled_ids(sample) == scene.planned_ids(sample)
        facts = facts_of(sample)
        assert (facts["aborts"], facts["resumes"], facts["turns"]) == (4, 4, 3)
        assert (facts["tool_iterations"], facts["tool_calls"]) == (2, 3)
        # the second rollout's abort came before a token; the third rollout continued turn 1
        assert facts["weight_versions"] == ["1", "2", "3", "4", "5"]
        assert (set(sample.weight_versions), sample.metadata["start_rollout_id"]) == (set(facts["weight_versions"]), 0)
        assert "resume" not in facts
    news = [end - start for _turn, start, end, version in facts_of(samples[0])["spans"] if version == "5"]
    all_planned = sum(len(scene.planned_ids(sample)) for sample in samples)
    assert trained == (2 * sum(news) if mask else all_planned)
    assert len(set(recorded_tools.ended_calls())) == 6


async def test_partial_rollout_starts_waiting_samples_next_time(begin: Begin) -> None:
    holds = Holds()
    holds.hold(1, 4)
    scene = await started(begin, holds, third="slow", sglang_server_concurrency=3)
    scene.rollouts.args.over_sampling_batch_size = 3
    await one_rollout(scene, 0)
    never_began = max((one for group in scene.buffer for one in group), key=lambda one: one.index)
    assert (never_began.status.value, never_began.tokens) == ("aborted", [])
    scene.policy.disturb = lambda _asked: None
    scene.rollouts.args.rollout_batch_size, scene.rollouts.args.global_batch_size = 2, 4
    scene.rollouts.args.over_sampling_batch_size = 2
    await scene.rollouts.train(1)
    assert scene.problems(scene.rollouts.samples) == []
    assert {sample.status.value for sample in scene.rollouts.samples} == {"completed"}


async def test_partial_rollout_keeps_finished_sample_of_aborted_group(begin: Begin) -> None:
    holds = Holds(1, most=1, quick_s=1.0)
    holds.hold(1, 4)
    scene = await started(begin, holds)
    await one_rollout(scene, 0)
    [group] = scene.buffer
    assert sorted(sample.status.value for sample in group) == ["aborted", "completed"]
    finished = next(sample for sample in group if sample.status.value == "completed")
    before = copy.deepcopy({**vars(finished), "trace": None})
    samples, trained = await last_rollout(scene, 1)
    assert any(sample is finished for sample in samples)
    assert ({**vars(finished), "trace": None}, scene.problems(samples)) == (before, [])
    assert trained == sum(len(scene.planned_ids(sample)) for sample in samples)
