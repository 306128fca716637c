"""The end that an episode meets from outside: its wall-clock is over, or the rollout is aborted.

Knows clocks and a question to ask; nothing of agents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

ABORT_POLL_S: Final = 0.1
# an engine that aborts its requests answers with what it has sampled: that long it is waited for
ABORT_GRACE_S: Final = 0.25


class EpisodeDeadline:
    """Cancels the block that it guards, which then raises TimeoutError; an async context manager, used once.

    Args:
        timeout_s: Seconds that the block may take; None for no limit.
        should_abort: Asked every 0.1 s; once it holds, the block has 0.25 s left, whatever it waits for.

    Attributes:
        was_aborted: Whether `should_abort` held while the block ran.
    """

    def __init__(self, timeout_s: float | None, should_abort: Callable[[], bool]) -> None:
        self._timeout = asyncio.timeout(timeout_s)
        self._should_abort = should_abort
        self._timer: asyncio.TimerHandle | None = None
        self.was_aborted = False

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._poll_later()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def expired(self) -> bool:
        """Whether the block was cancelled."""
        return self._timeout.expired()

    def _poll_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(ABORT_POLL_S, self._poll)

    def _poll(self) -> None:
        if not self._should_abort():
            self._poll_later()
            return
        self.was_aborted = True
        self._timer = None
        end = asyncio.get_running_loop().time() + ABORT_GRACE_S
        when = self._timeout.when()
        self._timeout.reschedule(end if when is None else min(when, end))
