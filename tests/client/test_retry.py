"""The retry loop: number of attempts, waits between them, and the error at the end."""

import math
import random

import pytest

from strands_rollout.client.retry import Fault, FaultKind, Outage, RetriesExhaustedError, RetryPolicy, with_retries

BUSY = Fault(FaultKind.BUSY, "HTTP 503")


class Attempts:
    """Attempts that fail in these ways and then succeed; records the waits between them."""

    def __init__(self, *faults: Fault) -> None:
        self.left = list(faults)
        self.waits: list[float] = []

    async def __call__(self) -> Fault | str:
        return self.left.pop(0) if self.left else "answer"

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)


async def test_with_retries_doubles_waits_up_to_the_cap() -> None:
    attempts, told = Attempts(*[BUSY] * 5), []

    def tell(outage: Outage, wait_s: float) -> None:
        told.append((len(outage.faults), wait_s))

    policy = RetryPolicy(backoff_base_s=1.0, backoff_cap_s=4.0)
    answer = await with_retries(attempts, policy, on_wait=tell, rng=random.Random(0), sleep=attempts.sleep)
    assert answer == "answer"
    assert told == list(enumerate(attempts.waits, start=1))
    assert all(most / 2 <= wait <= most for most, wait in zip([1, 2, 4, 4, 4], attempts.waits, strict=True))


async def test_with_retries_honours_retry_after_up_to_the_cap() -> None:
    attempts = Attempts(*(Fault(FaultKind.BUSY, "HTTP 429", retry_after_s=seconds) for seconds in (3.0, 600.0)))
    await with_retries(attempts, RetryPolicy(backoff_cap_s=4.0), sleep=attempts.sleep)
    assert attempts.waits == [3.0, 4.0]


async def test_with_retries_makes_max_attempts_however_slow() -> None:
    attempts, now = Attempts(*[BUSY] * 40), iter(range(0, 100_000, 60))
    policy = RetryPolicy(patience_s=math.inf, max_attempts=40)
    with pytest.raises(RetriesExhaustedError, match="HTTP 503") as given_up:
        await with_retries(attempts, policy, sleep=attempts.sleep, clock=lambda: float(next(now)))
    assert (len(given_up.value.outage.faults), attempts.left) == (40, [])


async def test_with_retries_ends_when_sleep_raises() -> None:
    async def aborted(_seconds: float) -> None:
        raise TimeoutError

    attempts = Attempts(BUSY, BUSY)
    with pytest.raises(TimeoutError):
        await with_retries(attempts, RetryPolicy(), sleep=aborted)
    assert attempts.left == [BUSY]
