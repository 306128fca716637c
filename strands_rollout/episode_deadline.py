"""The end that an episode meets from outside: its wall-clock is over, or the rollout is aborted.

Knows clocks and questions to ask; nothing of agents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Protocol, Self

ABORT_POLL_S: Final = 0.05
# an engine that aborts a request answers with what it has sampled: that long it is waited for
ABORT_GRACE_S: Final = 0.2


class Generating(Protocol):
    """What may wait for an engine."""

    @property
    def is_generating(self) -> bool:
        """Whether a request is at the engine."""
        ...

    def stop_generating(self) -> Awaitable[bool]:
        """Ask the engine to abort it; whether the engine said that it will."""
        ...


class EpisodeDeadline:
    """Cancels the block that it guards, which then raises TimeoutError; an async context manager, used once.

    Args:
        timeout_s: Seconds that the block may take; None for no limit.
        should_abort: Asked every 0.05 s; once it holds, the block is cancelled.
        model: If it waits for an engine then, the engine is asked to abort the request, and the block has 0.2 s left
            for its answer.
        engine_grace_s: The same where the engine can't be asked, because a router stands before it: the rollout that
            aborts is taken to tell the engines.

    Attributes:
        was_aborted: Whether `should_abort` held while the block ran.
    """

    def __init__(
        self,
        timeout_s: float | None,
        should_abort: Callable[[], bool],
        model: Generating | None = None,
        engine_grace_s: float = ABORT_GRACE_S,
    ) -> None:
        self._timeout = asyncio.timeout(timeout_s)
        self._should_abort = should_abort
        self._model = model
        self._engine_grace_s = engine_grace_s
        self._timer: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._limit: float | None = None
        self.was_aborted = False

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._limit = self._timeout.when()
        self._poll_later()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pending in (self._timer, self._stopping):
            if pending is not None:
                pending.cancel()
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
        if self._model is None or not self._model.is_generating:
            self._end_after(0.0)
            return
        self._end_after(ABORT_GRACE_S)
        self._stopping = asyncio.get_running_loop().create_task(self._stop(self._model))

    async def _stop(self, model: Generating) -> None:
        if not await model.stop_generating() and not self._timeout.expired():
            self._end_after(self._engine_grace_s)

    def _end_after(self, seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        self._timeout.reschedule(end if self._limit is None else min(self._limit, end))
