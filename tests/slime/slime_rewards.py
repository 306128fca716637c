"""Rewards as users write them, found by dotted path."""

import itertools
from typing import Any

from strands_rollout.errors import EnvironmentFaultError

_calls = itertools.count()


def begin() -> None:
    global _calls
    _calls = itertools.count()


async def dead(response: str, label: str) -> float:
    """Fail like a judge that is unavailable."""
    raise EnvironmentFaultError("the judge is away")


async def away_for_wrong_answers(response: str, label: str) -> float:
    """Fail like an unavailable judge for wrong answers only."""
    if str(label) not in response:
        raise EnvironmentFaultError("the judge is away")
    return 1.0


def broken(response: str, label: str) -> float:
    """Raise like a bug in the reward."""
    raise KeyError("no such word")


async def back_after_ten(response: str, label: str) -> dict[str, Any]:
    """Fail ten times like an unavailable judge; then every other answer is right."""
    call = next(_calls)
    if call < 10:
        raise EnvironmentFaultError("the judge is away")
    return {"score": float(call % 2)}


def no_number(args: Any, samples: Any, **_more: Any) -> Any:
    """A user's own function for slime's `--custom-rm-path`, which returns no number."""
    return _none(samples)


async def _none(samples: Any) -> Any:
    return [None for _ in samples] if isinstance(samples, list) else None
