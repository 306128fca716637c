"""Heavy steps of many tasks come one to a pass of the event loop, in order, and none waits for one that is gone."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, args_for, ids_of
from strands.hooks import BeforeModelCallEvent, HookProvider, HookRegistry

from strands_rollout import Sample, generate
from strands_rollout.aio import own_pass

TASKS = 50
began: list[int] = []
passes = itertools.count()


async def test_between_two_steps_everything_else_that_is_ready_comes_to_its_turn() -> None:
    seen: list[str] = []
    is_over = False

    async def step(number: int) -> None:
        await own_pass()
        seen.append(f"step {number}")

    async def watch() -> None:
        while not is_over:
            seen.append("other")
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(step(number) for number in range(TASKS)))
    is_over = True
    await watching
    steps = [entry for entry in seen if entry != "other"]
    assert steps == [f"step {number}" for number in range(TASKS)]
    neighbours = [pair for pair in itertools.pairwise(seen) if "other" not in pair]
    assert neighbours == []


async def test_who_is_alone_goes_on_at_once() -> None:
    seen: list[str] = []
    asyncio.get_running_loop().call_soon(seen.append, "next pass")
    await own_pass()
    assert seen == []


async def test_a_second_step_of_one_task_comes_in_a_later_pass() -> None:
    seen: list[str] = []
    asyncio.get_running_loop().call_soon(seen.append, "next pass")
    await own_pass()
    await own_pass()
    assert seen == ["next pass"]


@pytest.mark.parametrize("cancelled", [[0], [1], [1, 2, 3], [TASKS - 1]])
async def test_a_cancelled_step_holds_up_nobody(cancelled: list[int]) -> None:
    done: list[int] = []

    async def step(number: int) -> None:
        await own_pass()
        done.append(number)

    tasks = [asyncio.create_task(step(number)) for number in range(TASKS)]
    await asyncio.sleep(0)
    for number in cancelled:
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [number for number in range(1, TASKS) if number not in done] == [n for n in cancelled if n]
    async with asyncio.timeout(5):
        await own_pass()


def test_a_loop_that_was_closed_while_steps_waited_is_not_kept() -> None:
    async def begin() -> weakref.ref[asyncio.AbstractEventLoop]:
        for _ in range(3):
            asyncio.create_task(own_pass())  # noqa: RUF006 - they are left behind on purpose
        await asyncio.sleep(0)
        return weakref.ref(asyncio.get_running_loop())

    closed = asyncio.run(begin())
    gc.collect()
    assert closed() is None


class NotesThePass(HookProvider):
    """Notes in which pass of the loop an episode asks its model first."""

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        self._is_first = True
        registry.add_callback(BeforeModelCallEvent, self._note)

    def _note(self, event: BeforeModelCallEvent) -> None:
        if self._is_first:
            self._is_first = False
            began.append(next(passes))


async def test_episodes_that_begin_at_once_begin_in_passes_of_their_own(shipped_tokenizer: Any) -> None:
    began.clear()
    answer = Reply.tokens(ids_of(shipped_tokenizer, ANSWER))
    settings = {"executor": "turn_costs.InstantExecutor", "hooks": [f"{__name__}.NotesThePass"]}

    async def count() -> None:
        while True:
            next(passes)
            await asyncio.sleep(0)

    async with FakeSGLang(lambda *_: answer) as fake:
        args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=settings)
        await generate(args, Sample(prompt="first", label="", index=0), {"max_new_tokens": 500})
        counting = asyncio.create_task(count())
        samples = [Sample(prompt="What is 17 * 2?", label="34", index=index) for index in range(20)]
        await asyncio.gather(*(generate(args, sample, {"max_new_tokens": 500}) for sample in samples))
        counting.cancel()
    gaps = [later - earlier for earlier, later in itertools.pairwise(began[1:])]
    assert len(gaps) == 19
    assert min(gaps) > 1
