"""Which failed answers are worth another attempt, how many, and how long to wait first.

Reads HTTP statuses and the error bodies of SGLang and its routers; sends nothing. The package has no other retry layer.
"""

import random
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import httpx

from strands_rollout import errors
from strands_rollout.client.generate_api import NotJsonError, load_json
from strands_rollout.files import Json

PATIENCE_S: Final = 90.0  # slime's fault tolerance takes up to 60 s to bring an engine back
BACKOFF_BASE_S: Final = 0.25
BACKOFF_CAP_S: Final = 4.0
_MOST_S_OF_ATTEMPT: Final = 10.0


class FaultKind(StrEnum):
    """What went wrong with an attempt that may be repeated."""

    UNREACHABLE = "unreachable"  # refused, reset or lost before a response, or a router's word for that
    BUSY = "busy"  # 429, 502, 503, 504, or a router without workers
    SERVER_ERROR = "server_error"  # any other 5xx
    BAD_BODY = "bad_body"  # a 200 that isn't JSON or ended early
    SLOW = "slow"  # no answer within the read limit; sent again only after the engine confirmed the abort


# Attempts that may end in the same way, where waiting for the engine would not help.
_MOST: Final = {FaultKind.BAD_BODY: 2, FaultKind.SLOW: 2}
BUSY_STATUSES: Final = frozenset({429, 502, 503, 504})
_NO_WORKERS: Final = (b"model_not_found", b"no_available_workers")
# codes of sglang-router's and smg's 500 for a worker that can't be reached, or that closed the connection; while slime
# has not taken it out of their list, it may be the one that each request is sent to
_WORKER_LOST: Final = ("call_upstream_connection_failed", "call_upstream_request_error")
_OVERLONG: Final = re.compile(r"(?:longer than|exceeds?)\b.{0,60}?\b(?:context|allowed) length\D{0,12}(\d+)?", re.I)
_ADVICE: Final = "Check that the server is up (GET {url}/health) and that the URL is right."


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


class Outage:
    """The failed attempts of one request."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self.faults: list[Fault] = []
        # since the first: all waits, and of each attempt 10 s at most, as a longer one was a generation under way
        self._waited_s = 0.0

    def add(self, fault: Fault, attempt_s: float) -> None:
        """Count an attempt that took so many seconds."""
        if self.faults:
            self._waited_s += min(attempt_s, _MOST_S_OF_ATTEMPT)
        self.faults.append(fault)

    def gives_up(self) -> bool:
        """Whether the last attempt was the last."""
        policy, kind = self._policy, self.faults[-1].kind
        alike = sum(fault.kind is kind for fault in self.faults)
        is_last = policy.max_attempts is not None and len(self.faults) >= policy.max_attempts
        return is_last or alike >= _MOST.get(kind, alike + 1) or self._waited_s >= policy.patience_s

    def next_wait_s(self, rng: random.Random) -> float:
        """Count and return the next wait: half to all of the doubled base, and never less than Retry-After.

        The last attempt comes when the patience is over.
        """
        policy = self._policy
        step = min(policy.backoff_base_s * 2.0 ** min(len(self.faults) - 1, 32), policy.backoff_cap_s)
        asked = min(self.faults[-1].retry_after_s or 0.0, policy.backoff_cap_s)
        wait_s = max(step * (0.5 + 0.5 * rng.random()), asked)
        left_s = policy.patience_s - self._waited_s
        self._waited_s = policy.patience_s if wait_s >= left_s else self._waited_s + wait_s
        return min(wait_s, left_s)

    def error(self, missing: str, url: str) -> errors.EngineError:
        """What to raise for a request that is given up; `missing` says what did not come."""
        last, count = self.faults[-1], len(self.faults)
        words = f"{missing} in {count} attempt{'s' * (count > 1)}; the last ended with: {last.words}."
        if last.kind is FaultKind.BAD_BODY:
            return errors.EngineResponseError(f"{words} Check that the URL is that of an SGLang server or its router.")
        waited = f"It was waited for {self._waited_s:.0f} s (engine_patience_s)."
        return errors.EngineUnavailableError(f"{words} {waited} {_ADVICE.format(url=url)}")


def fault_of_status(
    status: int, body: bytes, headers: httpx.Headers, *, url: str, endpoint: str = "/generate"
) -> Fault:
    """Read an answer that is not a 200.

    Raises:
        EngineOverlongError: The engine says that the request is longer than its context.
        EngineRejectedError: The request is refused, and would be again.
    """
    try:
        found: Json = load_json(body)
    except NotJsonError:
        found = body.decode(errors="replace")
    message = _message_of(found)
    words = f"HTTP {status}: {message}" if message else f"HTTP {status}"
    if status in BUSY_STATUSES or (status == 404 and any(code in body for code in _NO_WORKERS)):
        return Fault(FaultKind.BUSY, words, _retry_after_s(headers))
    if status >= 500:
        error = found.get("error") if isinstance(found, dict) else None
        code = error.get("code") if isinstance(error, dict) else None
        return Fault(FaultKind.UNREACHABLE if code in _WORKER_LOST else FaultKind.SERVER_ERROR, words)
    overlong = _OVERLONG.search(message) if status in (400, 413) else None
    if overlong:
        limit = int(overlong[1]) if overlong[1] else None
        raise errors.EngineOverlongError(
            f"{url}{endpoint} refused the request as too long: {message}", status_code=status, context_length=limit
        )
    raise errors.EngineRejectedError(f"{url}{endpoint} refused the request with {words}", status_code=status)


def _message_of(found: Json) -> str:
    """The human part of an error body, on one line of at most 500 characters."""
    for key in ("error", "detail", "message"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    text = " ".join((found if isinstance(found, str) else repr(found)).split())
    return text if len(text) <= 500 else f"{text[:500]}..."


def _retry_after_s(headers: httpx.Headers) -> float | None:
    """Seconds of a Retry-After header; its date form is rare among inference servers and ignored."""
    text = headers.get("retry-after", "")
    return float(text) if re.fullmatch(r"\d{1,9}(\.\d+)?", text) else None
