"""Hundreds of samples through slime's own loop, with everything that can go wrong going wrong at once."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fake_sglang import Reply
from interruptible_policy import LAYERS, TOP_K, Asked, Change
from rough_weather import ALL_FAULTS, ENDS, PLANS, Weather
from slime_interruptions import Begin, Scene, facts_of, task_of
from slime_run import trained_tokens

pytestmark = pytest.mark.slime

# a result that is cut to fit the context is cut anew where the answer to it was lost, which the fake engine refuses
TASKS = {name: plan for name, plan in PLANS.items() if name != "overflows"}
GROUPS, BEGUN, SAMPLES_PER_GROUP = 34, 51, 4
FINISHED = 500
# prompts have 590 tokens, so that the engine's context ends before the budget does
ENDS_HERE = {**ENDS, "loops": ("max_tool_iterations", "context_length")}
SIZES = {"context_length": 1250, "rollout_max_response_len": 700, "n_samples_per_prompt": SAMPLES_PER_GROUP}
ROUTING = {"use_rollout_routing_replay": True, "num_layers": LAYERS, "moe_router_topk": TOP_K}
REPLAYED = {**ROUTING, "rollout_top_p": 0.9}


@dataclass
class SameWeather:
    """The weather without slime's random session ids: samples of a task are numbered as they come."""

    weather: Weather
    _keys: dict[str, list[str]] = field(default_factory=dict)

    def __call__(self, asked: Asked) -> Reply | Change | None:
        keys = self._keys.setdefault(asked.task, [])
        if asked.key not in keys:
            keys.append(asked.key)
        return self.weather(replace(asked, key=f"{asked.task}:{keys.index(asked.key)}"))


class Updates:
    """New weights every so often while a block runs, as an asynchronous trainer has them."""

    def __init__(self, scene: Scene, every_s: float) -> None:
        self._scene, self._every_s = scene, every_s
        self.count = 0

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._go_on())

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._scene.engine.engine.resume()

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            self.count += 1
            await self._scene.update_weights(str(self.count + 1), mode="abort", for_s=0.02)


async def rollouts_until(scene: Scene, finished: int) -> list[Any]:
    """The samples of rollouts until so many are finished, and of one more with all that was kept."""
    samples: list[Any] = []
    args = scene.rollouts.args
    number, last = 0, False
    while not last:
        last = len(samples) >= finished
        if last and not scene.buffer:
            break
        args.rollout_batch_size = min(GROUPS, len(scene.buffer)) if last else GROUPS
        args.over_sampling_batch_size = args.rollout_batch_size if last else BEGUN
        args.global_batch_size = args.rollout_batch_size * SAMPLES_PER_GROUP
        ranks = await scene.rollouts.train(number)
        assert sum(map(trained_tokens, ranks)) == sum(sum(sample.loss_mask) for sample in scene.rollouts.samples)
        samples += scene.rollouts.samples
        number += 1
    return samples


async def test_hundreds_of_samples_survive_everything_at_once(begin: Begin) -> None:
    weather = Weather(7, ALL_FAULTS)
    names = [name for _ in range(20) for name in TASKS]
    given = {"partial_rollout": True, "sglang_server_concurrency": 128, **SIZES, **REPLAYED}
    scene = await begin(TASKS, names, SameWeather(weather), **given)
    async with Updates(scene, 0.4):
        samples = await rollouts_until(scene, FINISHED)
    facts = [facts_of(sample) for sample in samples]
    # answers to requests that were just being sent again as the flag went up
    scene.engine.episodes.dropped.clear()
    assert len(samples) >= FINISHED
    assert scene.problems(samples) == []
    wrong = [
        f"{task_of(sample)}: {one['stop_reason']}: {one['error']}"
        for sample, one in zip(samples, facts, strict=True)
        if one["stop_reason"] not in ENDS_HERE.get(task_of(sample).partition("/")[0], ("completed",))
    ]
    assert wrong == []
    assert "context_length" in {one["stop_reason"] for one in facts}
    assert set(weather.met) == set(ALL_FAULTS)
    assert sum(one.get("resumes", 0) for one in facts) > 0
    assert sum(one.get("engine_aborts", 0) for one in facts) > 0
