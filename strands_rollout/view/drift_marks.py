"""Where encoding a turn's text again would give other tokens, and which.

Counts what `drift.drift_of_turn` counts, and says where it is. Knows a tokenizer and ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from strands_rollout.drift import Placed, unlike_tokens


@dataclass(frozen=True, slots=True)
class DriftMark:
    """Neighbouring tokens that would be others.

    Attributes:
        start: Index of the first one.
        end: Index after the last one; `start` where tokens would only be put in.
        instead: The ids that would be there.
    """

    start: int
    end: int
    instead: list[int]


def drift_marks(ids: Sequence[int], tokenizer: Any, bytes_of: Callable[[int], bytes]) -> list[DriftMark]:  # noqa: ANN401
    """The marks of one turn, in order.

    Args:
        ids: As they were sampled.
        tokenizer: The policy's, a Hugging Face fast tokenizer.
        bytes_of: `drift.token_bytes` of it.
    """
    return list(_marks(*unlike_tokens(ids, tokenizer, bytes_of)))


def _marks(sampled: Sequence[Placed], encoded: Sequence[Placed]) -> Iterator[DriftMark]:
    """What stands between tokens that both have; places ascend in both."""
    at_place = {placed: position for position, placed in enumerate(encoded)}
    start = encoded_start = 0
    for position, placed in enumerate(sampled):
        found = at_place.get(placed)
        if found is None:
            continue
        if position > start or found > encoded_start:
            yield DriftMark(start, position, [token for *_, token in encoded[encoded_start:found]])
        start, encoded_start = position + 1, found + 1
    if start < len(sampled) or encoded_start < len(encoded):
        yield DriftMark(start, len(sampled), [token for *_, token in encoded[encoded_start:]])
