"""Sending a request again: which failed attempts are worth another one, how many, and after what wait.

The package's one retry layer, for engines (`client.client`) and for chat APIs (`client.chat_api`).
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from strands_rollout import errors

PATIENCE_S: Final = 90.0  # slime's fault tolerance takes up to 60 s to bring an engine back
BACKOFF_BASE_S: Final = 0.25
BACKOFF_CAP_S: Final = 4.0
_MOST_S_OF_ATTEMPT: Final = 10.0


class FaultKind(StrEnum):
    """The failure of an attempt that may be repeated."""

    UNREACHABLE = "unreachable"  # refused, reset or lost before a response, or a router's word for that
    BUSY = "busy"  # 429, 502, 503, 504, or a router without workers
    SERVER_ERROR = "server_error"  # any other 5xx
    BAD_BODY = "bad_body"  # a 200 that isn't JSON or ended early
    SLOW = "slow"  # no answer within the read limit; sent again only after the engine confirmed the abort


# Attempts that may end in the same way, where waiting for the engine would not help.
_MOST: Final = {FaultKind.BAD_BODY: 2, FaultKind.SLOW: 2}


@dataclass(frozen=True, slots=True)
class Fault:
    """One failed attempt, its description such as "HTTP 503: no workers", and the server's Retry-After, if any."""

    kind: FaultKind
    words: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long, how often and after what wait a request is sent again.

    Attributes:
        patience_s: Seconds from the first failed attempt to the last; 0 for a single attempt.
        backoff_base_s: The first wait; each further one is twice as long.
        backoff_cap_s: The longest wait; also caps what a server's Retry-After asks for.
        max_attempts: Requests in all, at least 1; None for as many as there is time for.
    """

    patience_s: float = PATIENCE_S
    backoff_base_s: float = BACKOFF_BASE_S
    backoff_cap_s: float = BACKOFF_CAP_S
    max_attempts: int | None = None

    def __post_init__(self) -> None:
        too_few = self.max_attempts is not None and self.max_attempts < 1
        if too_few or not (self.patience_s >= 0 and self.backoff_base_s >= 0 and self.backoff_cap_s >= 0):
            raise errors.ConfigError(f"{self}: expected max_attempts >= 1, and seconds >= 0")

    def backoff_s(self, failed: int) -> float:
        """The longest wait after so many failed attempts, 1 or more: the base, doubled with each further one."""
        return min(self.backoff_base_s * 2.0 ** min(failed - 1, 32), self.backoff_cap_s)


class Outage:
    """The failed attempts of one request."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self.faults: list[Fault] = []
        # since the first: all waits, and of each attempt 10 s at most, as a longer one was a generation in flight
        self.waited_s = 0.0

    def add(self, fault: Fault, attempt_s: float) -> None:
        """Count an attempt that took so many seconds."""
        if self.faults:
            self.waited_s += min(attempt_s, _MOST_S_OF_ATTEMPT)
        self.faults.append(fault)

    def gives_up(self) -> bool:
        """Return True if no attempt is to follow."""
        policy, kind = self._policy, self.faults[-1].kind
        alike = sum(fault.kind is kind for fault in self.faults)
        is_last = policy.max_attempts is not None and len(self.faults) >= policy.max_attempts
        return is_last or alike >= _MOST.get(kind, alike + 1) or self.waited_s >= policy.patience_s

    def next_wait_s(self, rng: random.Random) -> float:
        """Count and return the next wait: half to all of the doubled base, and never less than Retry-After.

        The last attempt comes when the patience is over.
        """
        policy = self._policy
        step = policy.backoff_s(len(self.faults))
        asked = min(self.faults[-1].retry_after_s or 0.0, policy.backoff_cap_s)
        wait_s = max(step * (0.5 + 0.5 * rng.random()), asked)
        left_s = policy.patience_s - self.waited_s
        self.waited_s = policy.patience_s if wait_s >= left_s else self.waited_s + wait_s
        return min(wait_s, left_s)


class RetriesExhaustedError(Exception):
    """The policy allows no further attempt.

    Attributes:
        outage: The failed attempts.
    """

    def __init__(self, outage: Outage) -> None:
        super().__init__(outage.faults[-1].words)
        self.outage = outage


_Answer = TypeVar("_Answer")


async def with_retries(
    attempt: Callable[[], Awaitable[_Answer | Fault]],
    policy: RetryPolicy,
    *,
    on_wait: Callable[[Outage, float], None] | None = None,
    rng: random.Random | None = None,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    clock: Callable[[], float] = time.perf_counter,
) -> _Answer:
    """Make attempts until one returns an answer that is no `Fault`, and return it.

    Args:
        attempt: Sends the request once. What it raises ends the attempts.
        policy: How often, how long and after what waits.
        on_wait: Called before each wait with the failed attempts and the seconds of the wait.
        rng: Source of the waits' jitter.
        sleep: Waits between attempts; what it raises ends them.
        clock: Seconds, for the patience.

    Raises:
        RetriesExhaustedError: The policy allows no further attempt.
    """
    outage: Outage | None = None
    while True:
        started = clock()
        answer = await attempt()
        if not isinstance(answer, Fault):
            return answer
        outage = outage or Outage(policy)
        outage.add(answer, clock() - started)
        if outage.gives_up():
            raise RetriesExhaustedError(outage)
        wait_s = outage.next_wait_s(rng or random.Random())  # noqa: S311 - jitter, no secret
        if on_wait is not None:
            on_wait(outage, wait_s)
        await sleep(wait_s)
