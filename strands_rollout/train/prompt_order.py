"""Which row comes when: passes over a data set, each in an order of its own, the same for the same seed.

A place in this order is all that a resumed run needs to know.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from random import Random

from strands_rollout.dataset_rows import Row


class PromptOrder:
    """An endless sequence of rows."""

    def __init__(self, rows: Sequence[Row], seed: int) -> None:
        self._rows = rows
        self._order_of_pass = functools.lru_cache(maxsize=2)(lambda number: _shuffled(len(rows), seed, number))

    def row(self, position: int) -> Row:
        """The row at a place, from 0."""
        passes, place = divmod(position, len(self._rows))
        return self._rows[self._order_of_pass(passes)[place]]


def sampling_seed(*parts: object) -> int:
    """A seed of 31 bits that depends on all parts, on any machine alike."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def _shuffled(count: int, seed: int, number: int) -> list[int]:
    order = list(range(count))
    Random(sampling_seed(seed, number)).shuffle(order)  # noqa: S311 - an order, not a secret
    return order
