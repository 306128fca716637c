"""`OwnLoop` and `in_own_thread`: user code on its own event loop or thread."""

import asyncio
import functools
import gc
import sys
from typing import Any

import pytest

from strands_rollout.errors import ToolError
from strands_rollout.own_loop import OwnLoop
from strands_rollout.own_thread import in_own_thread


async def test_in_own_thread_raises_to_the_caller() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await in_own_thread(fail)()


class Judge:
    def evaluate(self, error: type[BaseException]) -> None:
        raise error

    async def evaluate_async(self) -> None:
        raise SystemExit


async def test_in_own_thread_names_the_function_that_exits() -> None:
    judge = Judge()
    for function in (judge.evaluate, functools.partial(judge.evaluate)):
        for error in (SystemExit, StopIteration):
            with pytest.raises(ToolError, match=rf"^Judge\.evaluate raised {error.__name__}\(\)$"):
                await in_own_thread(function)(error)
    with pytest.raises(ToolError, match=r"^the tool raised SystemExit\(\)$"):
        await in_own_thread(sys.exit, name="the tool")()


async def test_own_loop_names_the_function_that_exits() -> None:
    async with OwnLoop() as own:
        with pytest.raises(ToolError, match=r"^Judge\.evaluate_async raised SystemExit\(\)$"):
            await own.run(Judge().evaluate_async)


@pytest.mark.parametrize("late", [False, True])
async def test_own_loop_cancelled_call_logs_no_error(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strands_rollout.own_loop._STEP_CLEANUP_TIMEOUT_S", 0.0 if late else 60.0)
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
