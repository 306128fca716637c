"""slime's fully-async rollout, whose weight updates interrupt the engine while episodes run."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import recorded_tools
from interruptible_policy import ANSWER, call, paced, turn
from processes import wait_until
from slime_interruptions import PROGRAM, Begin, Scene, facts_of
from slime_run import trained_tokens

from strands_rollout.slime_plugin.fully_async import generate_rollout_fully_async

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
    """End slime's worker before its engine."""
    rollout = pytest.importorskip("slime.rollout.fully_async_rollout", reason="slime 0.2.4 has none")
    yield
    await asyncio.to_thread(rollout._stop_global_worker)


async def started(begin: Begin, disturb: Any, groups: int, **more: Any) -> Scene:
    """Return a scene with `groups` prompts for slime's fully-async rollout."""
    names = [list(PLANS)[number % len(PLANS)] for number in range(groups)]
    given = {"rollout_function_path": FULLY_ASYNC, "sglang_server_concurrency": groups, **more}
    return await begin(PLANS, names, disturb, **given)


async def trained_through_updates(scene: Scene, mode: str, *, every_s: float, most: int) -> tuple[list[Any], int]:
    """Run a rollout with at most `most` weight updates; return the samples and the number of trained tokens.

    There is an update every `every_s` seconds, from the rollout's first request on: before that, it would interrupt
    nothing.
    """
    before = len(scene.policy.requests)
    training = asyncio.create_task(scene.rollouts.train())
    await wait_until(lambda: training.done() or len(scene.policy.requests) > before)
    updates = 0
    while not training.done():
        await asyncio.wait({training}, timeout=every_s)
        if not training.done() and updates < most:
            updates += 1
            await scene.update_weights(str(updates + 1), mode=mode, for_s=0.03)
    return scene.rollouts.samples, sum(map(trained_tokens, await training))


@pytest.mark.parametrize(("mode", "player"), [("abort", {}), ("in_place", {}), ("abort", PROGRAM)])
async def test_fully_async_continues_through_weight_updates(begin: Begin, mode: str, player: Any) -> None:
    scene = await started(begin, lambda _asked: paced(0.012), 24, **player)
    samples, trained = await trained_through_updates(scene, mode, every_s=0.15, most=99)
    assert {sample.status.value for sample in samples} == {"completed"}
    assert (scene.problems(samples), scene.rollouts.returned_as("aborted")) == ([], [])
    assert all(scene.sampled_ids(sample) == scene.planned_ids(sample) for sample in samples)
    assert trained == sum(len(scene.planned_ids(sample)) for sample in samples)
    assert max(len(facts_of(sample)["weight_versions"]) for sample in samples) > 1
    assert any(facts_of(sample)["engine_aborts"] for sample in samples) == (mode == "abort")
    assert len(recorded_tools.ended_calls()) == len(set(recorded_tools.ended_calls()))


@pytest.mark.parametrize("player", [{}, PROGRAM["settings"]])
async def test_fully_async_resumes_returned_groups(begin: Begin, player: Any) -> None:
    scene = await started(begin, lambda _asked: paced(0.004), 12, settings={"on_engine_abort": "return", **player})
    samples, trained = await trained_through_updates(scene, "abort", every_s=0.2, most=3)
    assert scene.rollouts.returned_as("aborted")
    assert ({sample.status.value for sample in samples}, scene.problems(samples)) == ({"completed"}, [])
    assert sum(facts_of(sample)["engine_aborts"] for sample in samples) == 0
    assert sum(facts_of(sample)["resumes"] for sample in samples) > 0
    assert trained == sum(len(scene.planned_ids(sample)) for sample in samples)


PATH = "strands_rollout.generate_rollout_fully_async"


async def test_max_sample_staleness_limits_started_groups(begin: Begin) -> None:
    """A step takes four groups. With a staleness of 3, eight other groups are played or wait, and none is lost."""
    given = {"rollout_function_path": PATH, "rollout_batch_size": 4, "settings": {"max_sample_staleness": 3}}
    scene = await started(begin, lambda _asked: paced(0.001), 24, **given)
    source, drawn, trained = scene.rollouts.manager.data_source, list[int](), list[int]()
    draw = source.get_samples

    def counted(count: int) -> Any:
        found = draw(count)
        drawn.extend(group[0].group_index for group in found)
        return found

    source.get_samples = counted
    for _ in range(4):
        samples, _ = await trained_through_updates(scene, "abort", every_s=0.2, most=3)
        assert ({sample.status.value for sample in samples}, scene.problems(samples)) == ({"completed"}, [])
        trained += {sample.group_index for sample in samples}
        await asyncio.sleep(2.5)  # slime's worker looks for new groups each second
        assert len(drawn) == len(trained) + 8
    assert len(set(trained)) == 16
    assert set(trained) <= set(drawn)
    with pytest.raises(ValueError, match="evaluation"):
        generate_rollout_fully_async(scene.rollouts.args, 0, None, evaluation=True)
