"""slime stops a rollout in the middle: samples come back ABORTED at once, and valid; engines abort by themselves."""

from __future__ import annotations

from typing import Any

import pytest
from fake_sglang import Reply
from interruptible_policy import Asked, abort_after, aborted_in_queue
from slime_install import aborts_until_idle
from slime_interruptions import Begin, facts_of
from slime_policy import ANSWER, call, turn
from slime_run import trained_tokens
from slime_stage import Stage, Start

from strands_rollout.slime_plugin.sample_contract import contract_violations

pytestmark = pytest.mark.slime

MULTIPLY = turn(call("multiply", a=17, b=2))
PARTIAL = (40, 41, 42)
# how the episodes of the groups that slime does not need are caught by the abort
CAUGHT = {
    "generating": [Reply.hang(PARTIAL)],
    "generatinglater": [MULTIPLY, Reply.hang(PARTIAL)],
    "queued": [Reply.hang()],
    "queuedlater": [MULTIPLY, Reply.hang()],
    "intool": [turn(call("wait", seconds=8)), ANSWER],
    "insynctool": [turn(call("block", seconds=8)), ANSWER],
    "inretry": [Reply.status(503, "busy")],
    # comes to the engine just after slime's abort, and hears the next one, 3 s later
    "sentlate": [Reply.hang(PARTIAL).after(0.9)],
    # no abort reaches it
    "deaf": [Reply.tokens(PARTIAL).after(8)],
}
SAMPLED = {"generating": 3, "queued": 0, "inretry": 0, "deaf": 0}


async def started(start: Start, name: str, **more: Any) -> Stage:
    """A rollout that needs one group of two, and begins two; the second is caught as `name` says."""
    plans = {"answers": [turn(call("wait", seconds=0.5)), ANSWER], name: CAUGHT[name]}
    return await start(plans, ["answers", name], rollout_batch_size=1, over_sampling_batch_size=2, **more)


@pytest.mark.parametrize("partial_rollout", [False, True])
@pytest.mark.parametrize("name", CAUGHT)
async def test_a_running_episode_comes_back_at_once_and_valid(start: Start, name: str, partial_rollout: bool) -> None:
    stage = await started(start, name, partial_rollout=partial_rollout)
    await stage.rollouts.train()
    aborted = stage.rollouts.returned_as("aborted")
    assert len(aborted) == 2
    # what is sampled late is waited for where slime keeps it: until its second abort, 3 s after the first
    waits = partial_rollout and name in ("sentlate", "deaf")
    sampled = {**SAMPLED, "sentlate": 3 if waits and aborts_until_idle() else 0}
    for sample in aborted:
        assert contract_violations(sample, decode=stage.tokenizer.decode, may_abort=True) == []
        if name in sampled:
            assert sum(sample.loss_mask) == sampled[name]
    assert stage.rollouts.raised == []


async def test_a_router_that_is_slow_to_refuse_an_abort_costs_no_tokens(start: Start) -> None:
    if not aborts_until_idle():
        pytest.skip("this slime aborts once")
    stage = await started(start, "sentlate", partial_rollout=True)
    stage.gateway.refuses_abort_after_s = 0.5
    await stage.rollouts.train()
    assert [sum(sample.loss_mask) for sample in stage.rollouts.returned_as("aborted")] == [3, 3]


async def test_a_turn_that_the_engine_aborts_is_continued_and_trained(begin: Begin) -> None:
    aborts = {0: aborted_in_queue, 1: abort_after(3)}
    scene = await begin({"updated": [ANSWER]}, ["updated"], lambda asked: aborts.get(asked.visit))
    ranks = await scene.rollouts.train()
    samples = scene.rollouts.samples
    assert scene.problems(samples) == []
    for sample in samples:
        assert (sample.status.value, facts_of(sample)["engine_aborts"]) == ("completed", 2)
        assert sample.tokens[-sample.response_length :] == scene.planned_ids(sample)
    assert sum(map(trained_tokens, ranks)) == sum(len(scene.planned_ids(sample)) for sample in samples)


@pytest.mark.parametrize("name", ["dequeued", "dequeuedlater"])
async def test_an_engine_that_aborts_for_ever_fails_the_sample_where_slime_is_not_aborting(
    start: Start, name: str
) -> None:
    plans = {"dequeued": [Reply.abort()], "dequeuedlater": [MULTIPLY, Reply.abort()]}
    stage = await start({name: plans[name]})
    ranks = await stage.rollouts.train()
    assert [sample.status.value for sample in stage.rollouts.samples] == ["failed"] * 2
    assert {sample.remove_sample for sample in stage.rollouts.samples} == {True}
    assert sum(map(trained_tokens, ranks)) == 0


async def test_faults_and_aborts_of_one_turn_are_overcome_together(begin: Begin) -> None:
    faults = [Reply.status(503, "busy"), Reply.status(500, "died"), Reply.reset(), Reply.cut()]

    def disturb(asked: Asked) -> Any:
        if asked.attempt == 1:
            return faults[asked.done // 2 % len(faults)]
        return abort_after(2) if asked.rest > 2 else None

    scene = await begin({"troubled": ["It is \\boxed{34}.<|im_end|>"]}, ["troubled"], disturb)
    await scene.rollouts.train()
    assert scene.problems(scene.rollouts.samples) == []
    for sample in scene.rollouts.samples:
        assert sample.status.value == "completed"
        assert sample.tokens[-sample.response_length :] == scene.planned_ids(sample)
