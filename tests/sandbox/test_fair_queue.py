"""Places are never given twice, never lost, and given to owners in turn."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from strands_rollout.sandbox.fair_queue import CALL_OWNER, FairQueue


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), places=st.integers(1, 4), calls=st.integers(1, 40))
def test_no_place_is_lost_or_given_twice_however_calls_are_cancelled(seed: int, places: int, calls: int) -> None:
    chance = random.Random(seed)

    async def run() -> None:
        queue = FairQueue(places)
        inside = 0

        async def call(owner: int) -> None:
            nonlocal inside
            CALL_OWNER.set(str(owner))
            async with queue.place():
                inside += 1
                assert inside <= places
                try:
                    for _ in range(chance.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    inside -= 1

        tasks = [asyncio.create_task(call(chance.randrange(3))) for _ in range(calls)]
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)
            chance.choice(tasks).cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert [t.exception() for t in tasks if not t.cancelled() and t.exception()] == []
        await asyncio.wait_for(asyncio.gather(*(call(0) for _ in range(places * 2))), 10)

    asyncio.run(run())


async def test_an_owner_with_many_calls_does_not_go_before_the_others() -> None:
    queue = FairQueue(1)
    order: list[str] = []

    async def call(owner: str) -> None:
        CALL_OWNER.set(owner)
        async with queue.place():
            order.append(owner)
            await asyncio.sleep(0)

    await asyncio.gather(*(call("a") for _ in range(4)), *(call("b") for _ in range(2)), call("c"))
    assert order == ["a", "a", "b", "c", "a", "b", "a"]


def test_a_ticket_of_a_loop_that_was_closed_is_passed_over() -> None:
    queue = FairQueue(1)
    loop = asyncio.new_event_loop()

    async def hold() -> None:
        async with queue.place():
            await asyncio.sleep(3600)

    holder = loop.create_task(hold())
    waiter = loop.create_task(hold())
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(asyncio.sleep(0))
    holder.cancel()
    waiter.cancel()
    loop.run_until_complete(asyncio.gather(holder, waiter, return_exceptions=True))
    loop.close()

    async def use() -> str:
        async with queue.place():
            return "used"

    assert asyncio.run(asyncio.wait_for(use(), 5)) == "used"
