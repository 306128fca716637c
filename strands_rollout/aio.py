"""The end that an episode meets from outside: its wall-clock is over, or the rollout is aborted.

Knows clocks and questions to ask; nothing of agents.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Protocol, Self

logger = logging.getLogger(__name__)

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
        model: If it waits for an engine then, the engine is asked to abort the request, and the block goes on for
            `engine_grace_s`, for the engine to answer with what it has sampled.
        engine_grace_s: A thousand answers at once take longer than one.

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
        self._poller: _Poller | None = None
        self._stopping: asyncio.Future[bool] | None = None
        self._limit: float | None = None
        self.was_aborted = False

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._limit = self._timeout.when()
        self._poller = _poller_of(asyncio.get_running_loop())
        self._poller.add(self._poll)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._poller is not None:
            self._poller.discard(self._poll)
        if self._stopping is not None:
            self._stopping.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def expired(self) -> bool:
        """Whether the block was cancelled."""
        return self._timeout.expired()

    def _poll(self) -> bool:
        """Whether to ask again."""
        if self._timeout.expired():
            return False
        if not self._should_abort():
            return True
        self._begin_end()
        return False

    def _begin_end(self) -> None:
        self.was_aborted = True
        if self._model is None or not self._model.is_generating:
            self._end_after(0.0)
            return
        self._end_after(self._engine_grace_s)
        self._stopping = asyncio.ensure_future(self._model.stop_generating())

    def _end_after(self, seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        self._timeout.reschedule(end if self._limit is None else min(self._limit, end))


class _Poller:
    """One timer for all deadlines of an event loop, which runs while there are any."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # the loop keeps the timer, which keeps this; a strong reference back would keep a closed loop for ever
        self._loop = weakref.ref(loop)
        self._polls: dict[Callable[[], bool], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, poll: Callable[[], bool]) -> None:
        self._polls[poll] = None
        if self._timer is None:
            self._arm()

    def discard(self, poll: Callable[[], bool]) -> None:
        self._polls.pop(poll, None)
        if not self._polls and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        loop = self._loop()
        self._timer = None if loop is None else loop.call_later(ABORT_POLL_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for poll in list(self._polls):
            try:
                goes_on = poll()
            except Exception:  # a question that fails must not end the others'; the next model call asks it again
                logger.exception("event=abort_flag_unreadable")
                goes_on = False
            if not goes_on:
                self._polls.pop(poll, None)
        if self._polls:
            self._arm()


_POLLERS: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Poller]] = weakref.WeakKeyDictionary()


def _poller_of(loop: asyncio.AbstractEventLoop) -> _Poller:
    if loop not in _POLLERS:
        _POLLERS[loop] = _Poller(loop)
    return _POLLERS[loop]
