"""How late an event loop is: what a timer that is due at any moment has to wait."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Final, Self

_TICK_S: Final = 0.005


class LoopLag:
    """While it is entered, a timer of the running loop is due every 5 ms, and is noted with how late it came.

    Timers that were due while the loop was blocked are all noted, each with its own wait: a block weighs as much
    as it lasted.

    Attributes:
        lags_ms: One per timer.
    """

    def __init__(self) -> None:
        self.lags_ms: list[float] = []

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._wait_until(self._loop.time() + _TICK_S)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._loop.time() >= self._due_s:
            self._note()
        self._timer.cancel()

    def _wait_until(self, due_s: float) -> None:
        self._due_s = due_s
        self._timer = self._loop.call_at(due_s, self._note)

    def _note(self) -> None:
        late_s = max(0.0, self._loop.time() - self._due_s)
        due = 1 + int(late_s / _TICK_S)
        self.lags_ms += [(late_s - number * _TICK_S) * 1e3 for number in range(due)]
        self._timer.cancel()
        self._wait_until(self._due_s + due * _TICK_S)


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that is not below that share of all values; nan of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
