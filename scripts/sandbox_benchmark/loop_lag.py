"""How late an event loop is: what a timer that is due at any moment would have had to wait."""

from __future__ import annotations

import asyncio
import contextlib
import time

_TICK_S = 0.005


class LagWatch:
    """While it is entered, a task on the running loop notes how late its ticks are.

    A loop that is blocked for a second notes all the ticks that were due in that second, each with its own lag;
    otherwise the worst moments would count least.

    Attributes:
        lags_ms: One per tick, in milliseconds.
    """

    def __init__(self) -> None:
        self.lags_ms: list[float] = []

    async def __aenter__(self) -> LagWatch:
        self._due = time.perf_counter() + _TICK_S
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._note()  # what is overdue now, it would have noted next
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._due - time.perf_counter()))
            self._note()

    def _note(self) -> None:
        now = time.perf_counter()
        while self._due <= now:
            self.lags_ms.append((now - self._due) * 1e3)
            self._due += _TICK_S
