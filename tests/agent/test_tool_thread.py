"""Sync functions in threads of their own, which are used again."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading

import pytest

from strands_rollout.aio import in_own_thread
from strands_rollout.errors import ToolError

here = in_own_thread(threading.current_thread)


async def test_calls_after_each_other_share_a_thread() -> None:
    assert len({await here() for _ in range(20)}) == 1


async def test_calls_at_once_have_a_thread_each() -> None:
    together = threading.Barrier(5, timeout=20)

    def meet() -> threading.Thread:
        together.wait()
        return threading.current_thread()

    assert len(set(await asyncio.gather(*(in_own_thread(meet)() for _ in range(5))))) == 5


async def test_the_thread_of_a_call_that_hangs_is_nobody_elses() -> None:
    release, has_begun, seen = threading.Event(), threading.Event(), []

    def hang() -> None:
        seen.append(threading.current_thread())
        has_begun.set()
        release.wait(20)

    task = asyncio.create_task(in_own_thread(hang)())
    assert await asyncio.to_thread(has_begun.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen[0] not in {await here() for _ in range(5)}
    release.set()


async def test_most_idle_threads_end_after_many_calls_at_once() -> None:
    together = threading.Barrier(100, timeout=20)
    await asyncio.gather(*(in_own_thread(together.wait)() for _ in range(100)))
    for _ in range(1000):
        idle = [thread for thread in threading.enumerate() if thread.name.startswith("tool:")]
        if len(idle) <= 64:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{len(idle)} threads are idle")


FORKING = """
import asyncio, os, threading
from strands_rollout.aio import in_own_thread

here = in_own_thread(threading.get_ident)
asyncio.run(here())
child = os.fork()
if child == 0:
    try:
        asyncio.run(asyncio.wait_for(here(), 10))
    except BaseException:
        os._exit(1)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_starts_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "0\n"


async def test_context_variables_reach_the_thread() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("here")
    assert await in_own_thread(lambda: variable.get())() == "here"


async def test_an_abandoned_thread_ends_in_silence() -> None:
    loop, began, released = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def work() -> None:
        loop.call_soon_threadsafe(began.set)
        released.wait(30)

    task = asyncio.create_task(in_own_thread(work)())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    released.set()
    await asyncio.sleep(0.1)


async def test_an_exception_belongs_to_the_caller() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await in_own_thread(fail)()
    with pytest.raises(ToolError, match="SystemExit"):
        await in_own_thread(sys.exit)()


async def test_an_event_loop_that_a_function_left_in_its_thread_is_not_the_next_ones() -> None:
    def compute() -> int:
        try:
            loop = asyncio.get_event_loop()
        except RuntimeError:
            loop = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(asyncio.sleep(0, 7))
        finally:
            loop.close()

    assert [await in_own_thread(compute)() for _ in range(3)] == [7, 7, 7]
