"""slime's fully-async rollout never says that it aborts: weight updates interrupt the engine while episodes run on."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any

import pytest
import recorded_tools
from interruptible_policy import Asked, Change, abort_after, paced
from rough_weather import ANSWER, call, turn
from slime_interruptions import Begin, Scene, facts_of
from slime_run import trained_tokens

import strands_rollout
from strands_rollout.model import trajectory as staleness

pytestmark = pytest.mark.slime

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
PLANS = {
    "thinks": ["Let me think about that for a while. " * 5 + ANSWER],
    "works": [
        turn("Let me see what comes of this. " * 3, call("work", seconds=0.05)),
        turn("And of those two, at once.", call("work", "a", seconds=0.1), call("fail", "b")),
        "Let me put it all together. " * 3 + ANSWER,
    ],
    "answers": [ANSWER],
}


@pytest.fixture(autouse=True)
async def no_worker_is_left(begin: Begin) -> AsyncIterator[None]:
    """It ends before its engine does."""
    rollout = pytest.importorskip("slime.rollout.fully_async_rollout", reason="slime 0.2.4 has none")
    yield
    await asyncio.to_thread(rollout._stop_global_worker)


async def started(begin: Begin, disturb: Any, groups: int, **more: Any) -> Scene:
    """A worker whose pool is as large as what two rollouts take."""
    names = [list(PLANS)[number % len(PLANS)] for number in range(groups)]
    given = {"rollout_function_path": FULLY_ASYNC, "sglang_server_concurrency": groups, **more}
    return await begin(PLANS, names, disturb, **given)


async def trained_through_updates(scene: Scene, mode: str, *, every_s: float, most: int) -> tuple[list[Any], int]:
    """One rollout with as many weight updates as fit; its samples, and its trained tokens."""
    training = asyncio.create_task(scene.rollouts.train())
    updates = 0
    while not training.done():
        await asyncio.wait({training}, timeout=every_s)
        if not training.done() and updates < most:
            updates += 1
            await scene.update_weights(str(updates + 1), mode=mode, for_s=0.03)
    return scene.rollouts.samples, sum(map(trained_tokens, await training))


def skip_where_surplus_is_dropped() -> None:
    from slime.rollout.fully_async_rollout import AsyncRolloutWorker

    if "limit" not in inspect.signature(AsyncRolloutWorker.get_completed_groups).parameters:
        pytest.skip("up to 0.3.1 slime drops the finished groups that a rollout has no room for: none waits")


async def two_rollouts(scene: Scene) -> list[Any]:
    """The samples of both: the worker begins new groups before it resumes those that it kept."""
    samples = []
    for number in range(2):
        await scene.rollouts.train(number)
        samples += scene.rollouts.samples
    return samples


@pytest.mark.parametrize("mode", ["abort", "in_place"])
async def test_episodes_continue_in_place_through_weight_updates(begin: Begin, mode: str) -> None:
    scene = await started(begin, lambda _asked: paced(0.012), 24)
    samples, trained = await trained_through_updates(scene, mode, every_s=0.15, most=99)
    assert {sample.status.value for sample in samples} == {"completed"}
    assert scene.problems(samples) == []
    assert scene.rollouts.returned_as("aborted") == []
    assert all(scene.sampled_ids(sample) == scene.planned_ids(sample) for sample in samples)
    assert trained == sum(len(scene.planned_ids(sample)) for sample in samples)
    assert max(len(facts_of(sample)["weight_versions"]) for sample in samples) > 1
    assert any(facts_of(sample)["engine_aborts"] for sample in samples) == (mode == "abort")
    assert len(recorded_tools.ended) == len(set(recorded_tools.ended))


async def test_aborted_groups_can_be_given_back_and_are_resumed(begin: Begin) -> None:
    scene = await started(begin, lambda _asked: paced(0.004), 12, settings={"on_engine_abort": "return"})
    samples, trained = await trained_through_updates(scene, "abort", every_s=0.2, most=3)
    assert scene.rollouts.returned_as("aborted")
    assert {sample.status.value for sample in samples} == {"completed"}
    assert scene.problems(samples) == []
    assert sum(facts_of(sample)["engine_aborts"] for sample in samples) == 0
    assert sum(facts_of(sample)["resumes"] for sample in samples) > 0
    assert trained == sum(len(scene.planned_ids(sample)) for sample in samples)


async def test_a_group_that_one_abort_hit_is_requeued_with_its_finished_sample(begin: Begin) -> None:
    skip_where_surplus_is_dropped()
    first: list[str] = []

    def disturb(asked: Asked) -> Change | None:
        if asked.name != "works" or asked.turn != 1:
            return None
        first[:] = first or [asked.key]
        return abort_after(4) if asked.key == first[0] and not asked.done else None

    scene = await started(begin, disturb, 3, settings={"on_engine_abort": "return"})
    samples = await two_rollouts(scene)
    assert scene.problems(samples) == []
    assert len(scene.rollouts.returned_as("aborted")) == 1
    assert sorted(facts_of(sample)["resumes"] for sample in samples) == [*[0] * 11, 1]


async def test_samples_that_wait_too_long_to_be_trained_are_left_out(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_where_surplus_is_dropped()
    monkeypatch.setattr(staleness, "_newest", None)
    sizes = {"rollout_batch_size": 2, "global_batch_size": 4, "sglang_server_concurrency": 6}
    scene = await started(begin, lambda _asked: None, 6, settings={"max_sample_staleness": 2}, **sizes)
    scene.rollouts.manager.custom_reward_post_process_func = strands_rollout.normalize_rewards

    async def returned(version: str, least: int) -> None:
        async with asyncio.timeout(30):
            while sum(version in one.weight_versions for _, one in scene.rollouts.returned) < least:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    await scene.update_weights("1")
    left_out = {}
    for number in range(4):
        if number == 1:
            await returned("1", 12)  # six groups, of which four wait
            await scene.update_weights("4")
        if number == 2:
            await returned("4", 1)
        ranks = await scene.rollouts.train(number)
        samples = scene.rollouts.samples
        trained = [sample for sample in samples if not sample.remove_sample]
        assert sum(map(trained_tokens, ranks)) == sum(len(scene.planned_ids(sample)) for sample in trained)
        left_out[number] = {(sample.weight_versions[-1], sample.remove_sample) for sample in samples}
    assert left_out[0] == {("1", False)}
    assert left_out[2] == {("1", True)}
    assert left_out[1] | left_out[3] <= {("1", False), ("1", True), ("4", False)}
