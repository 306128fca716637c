"""Rewards of a user's own, found by dotted path as a user's are."""

import itertools
from typing import Any

from strands_rollout.errors import EnvironmentFaultError

_calls = itertools.count()


def begin() -> None:
    global _calls
    _calls = itertools.count()


async def dead(response: str, label: str) -> float:
    """What a judge that is away makes of each answer."""
    raise EnvironmentFaultError("the judge is away")


async def away_for_wrong_answers(response: str, label: str) -> float:
    """What a judge that is away for some makes of them."""
    if str(label) not in response:
        raise EnvironmentFaultError("the judge is away")
    return 1.0


def broken(response: str, label: str) -> float:
    """What a fault of the reward's own makes of each answer."""
    raise KeyError("no such word")


async def back_after_ten(response: str, label: str) -> dict[str, Any]:
    """A judge that is away for a while; then every other answer is right."""
    call = next(_calls)
    if call < 10:
        raise EnvironmentFaultError("the judge is away")
    return {"score": float(call % 2)}


def no_number(args: Any, samples: Any, **_more: Any) -> Any:
    """slime's `--custom-rm-path` of a user's own, without a number for anything."""
    return _none(samples)


async def _none(samples: Any) -> Any:
    return [None for _ in samples] if isinstance(samples, list) else None
