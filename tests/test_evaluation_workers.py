"""A bounded number of samples at once, and an end where nothing but one fault comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from strands_rollout.errors import RolloutError
from strands_rollout.evaluation.plan import SampleKey
from strands_rollout.evaluation.results_file import SampleResult
from strands_rollout.evaluation.workers import run_samples

DOWN = "EngineUnavailableError: no answer from http://127.0.0.1:1"


def keys(count: int) -> list[SampleKey]:
    return [SampleKey("sums", number, 0) for number in range(count)]


def result(key: SampleKey, error: str | None = None, stop_reason: str = "engine_error") -> SampleResult:
    status = "failed" if error else "completed"
    reason = stop_reason if error else "completed"
    return SampleResult(key, status, reason, error, True, "34", 5, 4, 1, 0, 0, 0.1, 0, False, "integers", True, ())


async def run(count: int, error_of: Callable[[int], str | None], concurrency: int = 2) -> tuple[str | None, list[int]]:
    seen: list[int] = []

    async def one(key: SampleKey) -> SampleResult:
        seen.append(key.problem)
        await asyncio.sleep(0)
        return result(key, error_of(key.problem))

    return await run_samples(keys(count), one, concurrency=concurrency), seen


async def test_all_are_run_once_in_order() -> None:
    assert await run(20, lambda _: None) == (None, list(range(20)))


async def test_keys_are_taken_as_workers_come_free() -> None:
    taken = finished = 0

    def counted() -> Iterator[SampleKey]:
        nonlocal taken
        for key in keys(50):
            taken += 1
            yield key

    async def one(key: SampleKey) -> SampleResult:
        nonlocal finished
        assert taken - finished <= 3
        await asyncio.sleep(0)
        finished += 1
        return result(key)

    await run_samples(counted(), one, concurrency=3)
    assert finished == 50


async def test_eight_equal_failures_in_a_row_end_the_run() -> None:
    reason, seen = await run(100, lambda _: DOWN)
    assert reason == f"8 samples in a row failed alike, the last one with {DOWN}"
    assert len(seen) <= 10


async def test_with_many_at_once_as_many_may_fail() -> None:
    reason, seen = await run(100, lambda number: DOWN if number < 19 else None, concurrency=20)
    assert (reason, len(seen)) == (None, 100)
    reason, _ = await run(100, lambda number: DOWN if number < 20 else None, concurrency=20)
    assert reason is not None
    assert reason.startswith("20 samples in a row")


async def test_an_outage_in_mid_run_ends_it_too() -> None:
    reason, seen = await run(100, lambda number: DOWN if number >= 50 else None)
    assert reason is not None
    assert 58 <= len(seen) <= 60


async def test_a_success_in_between_starts_the_count_anew() -> None:
    assert (await run(40, lambda number: DOWN if number % 8 else None, concurrency=1))[0] is None


async def test_failures_of_different_kinds_are_not_counted_together() -> None:
    errors = [DOWN, "SandboxError: no room"]
    assert (await run(40, lambda number: errors[number % 2]))[0] is None


async def test_the_text_of_an_error_may_differ() -> None:
    assert (await run(40, lambda number: f"EngineResponseError: request {number}"))[0] is not None


async def test_an_error_of_the_run_itself_ends_it() -> None:
    async def one(key: SampleKey) -> SampleResult:
        raise RolloutError(f"no room for {key.problem}")

    with pytest.raises(RolloutError, match="no room for 0"):
        await run_samples(keys(5), one, concurrency=2)
