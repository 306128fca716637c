"""`admit_to_loop` and `shared_result`, which space steps out in the event loop; `run_once`, for work done only once."""

import asyncio
import itertools
import threading

import pytest

from strands_rollout.aio import admit_to_loop, run_once, shared_result

TASKS = 50


async def test_admit_to_loop_lets_other_tasks_run_between_steps() -> None:
    seen: list[str] = []
    is_over = False

    async def step(number: int) -> None:
        await admit_to_loop()
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
    neighbors = [pair for pair in itertools.pairwise(seen) if "other" not in pair]
    assert neighbors == []


@pytest.mark.parametrize("cancelled", [[0], [1, 2, 3], [TASKS - 1]])
async def test_admit_to_loop_survives_cancelled_steps(cancelled: list[int]) -> None:
    done: list[int] = []

    async def step(number: int) -> None:
        await admit_to_loop()
        done.append(number)

    tasks = [asyncio.create_task(step(number)) for number in range(TASKS)]
    await asyncio.sleep(0)
    for number in cancelled:
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [number for number in range(1, TASKS) if number not in done] == [n for n in cancelled if n]
    async with asyncio.timeout(5):
        await admit_to_loop()


async def test_shared_result_continues_one_caller_in_each_pass() -> None:
    seen: list[str] = []
    end = asyncio.Event()
    shared = asyncio.create_task(end.wait())

    async def caller(number: int) -> None:
        assert await shared_result(shared)
        seen.append(f"caller {number}")

    async def watch() -> None:
        while len(seen) < 2 * TASKS:
            seen.append("other")
            await asyncio.sleep(0)

    callers = [asyncio.create_task(caller(number)) for number in range(TASKS)]
    await asyncio.sleep(0)
    callers[1].cancel()
    end.set()
    await asyncio.gather(watch(), *callers, return_exceptions=True)
    assert [entry for entry in seen if entry != "other"] == [f"caller {n}" for n in range(TASKS) if n != 1]
    assert [pair for pair in itertools.pairwise(seen) if "other" not in pair] == []
    assert await shared_result(shared)  # the task has ended: no wait


async def test_run_once_shares_one_worker_thread() -> None:
    threads, has_begun, goes_on = [], threading.Event(), threading.Event()

    def work() -> None:
        threads.append(threading.current_thread())
        has_begun.set()
        goes_on.wait(20)

    waiting = [asyncio.create_task(run_once("first", work)) for _ in range(50)]
    assert await asyncio.to_thread(has_begun.wait, 20)
    waiting[0].cancel()
    goes_on.set()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(end) for end in ended] == [asyncio.CancelledError] + [type(None)] * 49
    await run_once("first", work)
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def test_run_once_fails_all_waiters_and_tries_again() -> None:
    tries = []

    def work() -> None:
        tries.append("try")
        if len(tries) == 1:
            raise ValueError("not yet")

    ended = await asyncio.gather(run_once("failing", work), run_once("failing", work), return_exceptions=True)
    assert [str(end) for end in ended] == ["not yet", "not yet"]
    await run_once("failing", work)
    await run_once("failing", work)
    assert len(tries) == 2
