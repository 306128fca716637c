"""slime stops a rollout in the middle: samples come back ABORTED at once, valid, and start again from nothing."""

from __future__ import annotations

from typing import Any

import pytest
from fake_sglang import Reply
from slime_policy import ANSWER, Asked, call, turn
from slime_stage import Stage, Start

from strands_rollout.contract import contract_violations

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
    # a request that comes just after slime's own abort runs on at the engine
    "sentlate": [Reply.tokens(PARTIAL).after(8)],
}
SAMPLED = {"generating": 3, "queued": 0, "inretry": 0, "sentlate": 0}


async def started(start: Start, name: str, **more: Any) -> Stage:
    """A rollout that needs one group of two, and begins two; the second is caught as `name` says."""
    plans = {"answers": [turn(call("wait", seconds=0.5)), ANSWER], name: CAUGHT[name]}
    return await start(plans, ["answers", name], rollout_batch_size=1, over_sampling_batch_size=2, **more)


@pytest.mark.parametrize("partial_rollout", [False, True])
@pytest.mark.parametrize("name", CAUGHT)
async def test_a_running_episode_comes_back_at_once_and_valid(
    start: Start, capsys: pytest.CaptureFixture[str], name: str, partial_rollout: bool
) -> None:
    stage = await started(start, name, partial_rollout=partial_rollout)
    await stage.rollouts.train()
    aborted = stage.rollouts.returned_as("aborted")
    assert len(aborted) == 2
    for sample in aborted:
        assert contract_violations(sample, decode=stage.tokenizer.decode, may_abort=True) == []
        if name in SAMPLED:
            assert sum(sample.loss_mask) == SAMPLED[name]
    assert stage.rollouts.raised == []
    seconds = stage.rollouts.abort_seconds()
    with capsys.disabled():
        print(f"\nabort of {name}: {seconds:.2f} s", end="")
    assert seconds < 2


@pytest.mark.parametrize("name", ["generatinglater", "queued"])
@pytest.mark.parametrize("mask", [False, True])
async def test_an_aborted_group_is_kept_and_starts_again_from_nothing(start: Start, name: str, mask: bool) -> None:
    stage = await started(start, name, partial_rollout=True, mask_offpolicy_in_partial_rollout=mask)
    await stage.rollouts.train()
    assert len(stage.rollouts.manager.data_source.buffer) == 1
    requests, episode = len(stage.engine.requests), stage.rollouts.returned_as("aborted")[0]
    stage.policy.plans[name] = [MULTIPLY, ANSWER]
    stage.rollouts.args.over_sampling_batch_size = 1
    await stage.rollouts.train(1)
    [again] = stage.rollouts.groups
    assert episode in again
    assert [sample.status.value for sample in again] == ["completed"] * 2
    assert [sample.reward["score"] for sample in again] == [1.0, 1.0]
    prompts = {tuple(request.input_ids) for request in stage.engine.requests[requests:]}
    for sample in again:
        assert tuple(sample.tokens[: len(sample.tokens) - sample.response_length]) in prompts
        assert sample.weight_versions == ["default"] * 2
        assert not sample.remove_sample
    assert stage.engine.violations == []


async def test_an_abort_by_the_engine_alone_is_a_failure_and_not_an_aborted_sample(start: Start) -> None:
    stage = await start({"stopped": [Reply.abort(PARTIAL)]})
    await stage.rollouts.train()
    assert [sample.status.value for sample in stage.rollouts.samples] == ["failed"] * 2
    assert {sample.remove_sample for sample in stage.rollouts.samples} == {True}


async def test_a_fully_async_rollout_requeues_what_a_weight_update_aborted(start: Start) -> None:
    from slime.rollout import fully_async_rollout

    stage = await start(
        {"answers": [MULTIPLY, ANSWER], "updated": [MULTIPLY, Reply.abort(PARTIAL)]},
        ["updated", "answers"],
        rollout_function_path="slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        sglang_server_concurrency=2,
        rollout_batch_size=2,
    )

    def updated_once(_asked: Asked) -> Reply:
        stage.policy.plans["updated"] = [MULTIPLY, ANSWER]
        return Reply.abort(PARTIAL)

    stage.policy.plans["updated"] = [MULTIPLY, updated_once]
    try:
        await stage.rollouts.train()
    finally:
        fully_async_rollout._stop_global_worker()
    assert stage.rollouts.returned_as("aborted")
    assert {sample.status.value for sample in stage.rollouts.samples} == {"completed"}
    assert stage.engine.violations == []
