"""Steps that take turns in the event loop, work that is done once per process, and sync functions in own threads."""

import asyncio
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from harness import ANSWER, run

from strands_rollout import aio
from strands_rollout.aio import OwnLoop, freeze_long_lived, in_own_thread, once, own_pass
from strands_rollout.errors import ToolError

TASKS = 50


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


@pytest.mark.parametrize("cancelled", [[0], [1, 2, 3], [TASKS - 1]])
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


@pytest.fixture
def _thawed() -> Iterator[None]:
    """A process in which nothing is frozen; afterwards it collects garbage as before."""
    thresholds = gc.get_threshold()
    gc.unfreeze()
    freeze_long_lived.cache_clear()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Node:
    """Refers to itself."""

    def __init__(self) -> None:
        self.node = self


@pytest.mark.usefixtures("_thawed")
def test_the_first_call_freezes_what_there_is_and_later_cycles_are_collected() -> None:
    before = weakref.ref(Node())
    freeze_long_lived()
    assert before() is None, "garbage was frozen"
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    later = weakref.ref(Node())
    gc.collect()
    assert later() is None, "new cycles are not collected"
    kept = [object(), [None]]
    freeze_long_lived()
    assert gc.get_freeze_count() <= frozen, f"{kept} was frozen too"


@pytest.mark.usefixtures("_thawed")
@pytest.mark.parametrize(
    ("given", "expected"),
    [((700, 10, 10), (700, 10, 100)), ((900, 20, 500), (900, 20, 500))],
    ids=["Python's own", "rarer already"],
)
def test_full_collections_become_rarer_where_the_process_has_not_seen_to_it(given: Any, expected: Any) -> None:
    gc.set_threshold(*given)
    freeze_long_lived()
    assert gc.get_threshold() == expected


@pytest.mark.usefixtures("_thawed")
@pytest.mark.parametrize("wanted", [True, False])
async def test_the_first_sample_freezes_what_the_process_has_unless_told_not_to(
    shipped_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    monkeypatch.setattr(aio, "_DONE", set())
    played = await run(shipped_tokenizer, [ANSWER], settings={"freeze_gc": wanted})
    assert played.facts["stop_reason"] == "completed"
    assert (gc.get_freeze_count() > 1000) == wanted


async def test_all_who_come_first_wait_for_one_thread_that_is_not_the_loops() -> None:
    threads, has_begun, goes_on = [], threading.Event(), threading.Event()

    def work() -> None:
        threads.append(threading.current_thread())
        has_begun.set()
        goes_on.wait(20)

    waiting = [asyncio.create_task(once("first", work)) for _ in range(50)]
    assert await asyncio.to_thread(has_begun.wait, 20)
    waiting[0].cancel()
    goes_on.set()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(end) for end in ended] == [asyncio.CancelledError] + [type(None)] * 49
    await once("first", work)
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def test_work_that_fails_fails_all_who_wait_and_is_tried_again() -> None:
    tries = []

    def work() -> None:
        tries.append("try")
        if len(tries) == 1:
            raise ValueError("not yet")

    ended = await asyncio.gather(once("failing", work), once("failing", work), return_exceptions=True)
    assert [str(end) for end in ended] == ["not yet", "not yet"]
    await once("failing", work)
    await once("failing", work)
    assert len(tries) == 2


async def test_an_exception_belongs_to_the_caller() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await in_own_thread(fail)()
    with pytest.raises(ToolError, match="SystemExit"):
        await in_own_thread(sys.exit)()


@pytest.mark.parametrize("late", [False, True])
async def test_what_a_cancelled_call_raises_is_no_error_in_the_log(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strands_rollout.aio._STEP_CLEANUP_S", 0.0 if late else 60.0)
    begun, over, told = asyncio.Event(), asyncio.Event(), list[Any]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, about: told.append(about))

    async def call() -> None:
        loop.call_soon_threadsafe(begun.set)
        try:
            await asyncio.sleep(60)
        finally:
            loop.call_soon_threadsafe(over.set)
            raise ConnectionError("the endpoint is closed")

    async with OwnLoop() as own:
        running = asyncio.ensure_future(own.run(call))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await over.wait()
        assert await own.run(asyncio.sleep, 0, "the next") == "the next"
    del running
    gc.collect()
    assert told == []
