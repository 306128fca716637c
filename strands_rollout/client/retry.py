"""Retries of HTTP requests: the failures that are retried, the number of attempts, and the waits between attempts.

Used for engines (`client.client`), chat APIs (`client.chat_api`) and retrieval servers (`environments.search`).
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from strands_rollout import errors

DEFAULT_PATIENCE_S: Final = 90.0  # slime's fault tolerance takes up to 60 s to restart an engine
DEFAULT_BACKOFF_BASE_S: Final = 0.25
DEFAULT_BACKOFF_CAP_S: Final = 4.0
_MAX_COUNTED_ATTEMPT_S: Final = 10.0


class FaultKind(StrEnum):
    """The kinds of failures that may be retried."""

    UNREACHABLE = "unreachable"  # connection refused or lost (a router may report this), or a 5xx with a cut body
    BUSY = "busy"  # 429, 502, 503, 504, or a router without workers
    SERVER_ERROR = "server_error"  # any other 5xx
    BAD_BODY = "bad_body"  # a 200 that isn't JSON, or a status below 500 with a cut body
    SLOW = "slow"  # no answer within the read timeout; retried only after the engine has confirmed the abort


# maximum number of attempts with the same kind of fault, for kinds that don't pass with time
_MAX_ATTEMPTS_BY_KIND: Final = {FaultKind.BAD_BODY: 2, FaultKind.SLOW: 2}


@dataclass(frozen=True, slots=True)
class Fault:
    """A failed attempt that may be retried.

    Attributes:
        kind: Kind of the failure, which determines whether and how often the request is retried.
        message: Description, such as "HTTP 503: no workers".
        retry_after_s: The server's Retry-After header in seconds, if any.
    """

    kind: FaultKind
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The limits and waits of retries.

    Attributes:
        patience_s: How long to retry a request, in seconds counted by `Outage.waited_s`; 0 for a single attempt.
        backoff_base_s: Upper limit of the first wait in seconds; each further failure doubles the limit. The actual
            wait is a random 50% to 100% of the limit, or a server's longer Retry-After. The wait never exceeds the rest
            of `patience_s`.
        backoff_cap_s: Upper limit of each wait in seconds, also of a server's Retry-After.
        max_attempts: Maximum number of attempts, at least 1; None for no limit.

    Raises:
        ConfigError: `max_attempts` is below 1, or a number of seconds is negative.
    """

    patience_s: float = DEFAULT_PATIENCE_S
    backoff_base_s: float = DEFAULT_BACKOFF_BASE_S
    backoff_cap_s: float = DEFAULT_BACKOFF_CAP_S
    max_attempts: int | None = None

    def __post_init__(self) -> None:
        too_few = self.max_attempts is not None and self.max_attempts < 1
        if too_few or not (self.patience_s >= 0 and self.backoff_base_s >= 0 and self.backoff_cap_s >= 0):
            raise errors.ConfigError(f"got {self}; expected max_attempts >= 1, and seconds >= 0")

    def backoff_s(self, failed: int) -> float:
        """Return the limit of the wait after `failed` attempts (at least 1): doubled by each attempt, up to the cap."""
        return min(self.backoff_base_s * 2.0 ** min(failed - 1, 32), self.backoff_cap_s)


class Outage:
    """The failed attempts of one request, and the patience that they have used up.

    Attributes:
        faults: The failed attempts.
        waited_s: Seconds of patience used up since the first fault: all waits, plus the first 10 s of each later
            attempt. In a longer attempt, the engine was generating.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self.faults: list[Fault] = []
        self.waited_s = 0.0

    def add(self, fault: Fault, attempt_s: float) -> None:
        """Add a failed attempt, which took `attempt_s` seconds."""
        if self.faults:
            self.waited_s += min(attempt_s, _MAX_COUNTED_ATTEMPT_S)
        self.faults.append(fault)

    def is_exhausted(self) -> bool:
        """Return whether the retry policy allows no further attempt."""
        policy, kind = self._policy, self.faults[-1].kind
        same_kind = sum(fault.kind is kind for fault in self.faults)
        is_last = policy.max_attempts is not None and len(self.faults) >= policy.max_attempts
        max_same_kind = _MAX_ATTEMPTS_BY_KIND.get(kind, same_kind + 1)
        return is_last or same_kind >= max_same_kind or self.waited_s >= policy.patience_s

    def next_wait_s(self, rng: random.Random) -> float:
        """Return the seconds of the next wait (backoff with jitter, or a longer Retry-After); add them to `waited_s`.

        The last wait is shortened so that it ends with the patience.
        """
        policy = self._policy
        step = policy.backoff_s(len(self.faults))
        retry_after_s = min(self.faults[-1].retry_after_s or 0.0, policy.backoff_cap_s)
        wait_s = max(step * (0.5 + 0.5 * rng.random()), retry_after_s)
        left_s = policy.patience_s - self.waited_s
        self.waited_s = policy.patience_s if wait_s >= left_s else self.waited_s + wait_s
        return min(wait_s, left_s)


class RetriesExhaustedError(Exception):
    """All attempts that the retry policy allows have failed.

    Attributes:
        outage: The failed attempts.
    """

    def __init__(self, outage: Outage) -> None:
        super().__init__(outage.faults[-1].message)
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
    """Repeat an attempt until it returns an answer other than a `Fault`, and return that answer.

    Args:
        attempt: Sends the request once. If it raises an exception, the request is not retried.
        policy: Limits and waits.
        on_wait: Called before each wait, with the failed attempts and the seconds of the wait.
        rng: Source of the jitter in waits.
        sleep: Waits between attempts. If it raises an exception, the retries end.
        clock: Returns seconds, for `patience_s`.

    Raises:
        RetriesExhaustedError: The retry policy allows no further attempt.
    """
    outage: Outage | None = None
    while True:
        started = clock()
        answer = await attempt()
        if not isinstance(answer, Fault):
            return answer
        outage = outage or Outage(policy)
        outage.add(answer, clock() - started)
        if outage.is_exhausted():
            raise RetriesExhaustedError(outage)
        wait_s = outage.next_wait_s(rng or random.Random())  # noqa: S311 - jitter, no secret
        if on_wait is not None:
            on_wait(outage, wait_s)
        await sleep(wait_s)
