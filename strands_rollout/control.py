"""An episode's deadline, abort and clock."""

import asyncio
import contextvars
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Protocol, Self, TypeAlias

ABORT_POLL_S: Final = 0.05
ABORT_GRACE_S: Final = 0.2  # for an engine to answer an aborted request with what it has sampled
EngineGrace: TypeAlias = Callable[[float], float]
"""Seconds for an engine to answer an aborted request that was sent at a time of `time.monotonic`."""


class Generating(Protocol):
    """A model that may have an in-flight request."""

    @property
    def sent_at(self) -> float | None:
        """When the last of them was sent, by `time.monotonic`; None without any."""

    def stop_generating(self) -> Awaitable[bool]:
        """Ask the engine to abort it; whether the engine said that it will."""


class EpisodeDeadline:
    """Cancels the block that it guards, which then raises TimeoutError; an async context manager, used once.

    Args:
        timeout_s: Seconds that the block may take; None for no limit.
        should_abort: Asked every 0.05 s; once it holds, the block is cancelled.
        model: If it has an in-flight request then, the engine is asked to abort it, and the block is cancelled
            `engine_grace_s` later, so that the engine can answer with what it has sampled.
        engine_grace_s: See `model`; a thousand answers at once take longer than one.

    Attributes:
        was_aborted: Whether `should_abort` held while the block ran.
    """

    def __init__(
        self,
        timeout_s: float | None,
        should_abort: Callable[[], bool],
        model: Generating | None = None,
        engine_grace_s: EngineGrace = lambda _sent_at: ABORT_GRACE_S,
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
        loop = asyncio.get_running_loop()
        if loop not in POLLERS:
            POLLERS[loop] = _Poller(loop)
        self._poller = POLLERS[loop]
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
        self.was_aborted = True
        sent_at = None if self._model is None else self._model.sent_at
        end = asyncio.get_running_loop().time() + (0.0 if sent_at is None else self._engine_grace_s(sent_at))
        self._timeout.reschedule(end if self._limit is None else min(self._limit, end))
        if self._model is not None and sent_at is not None:
            self._stopping = asyncio.ensure_future(self._model.stop_generating())
        return False


class _Poller:
    """One timer for all deadlines of an event loop, which runs while there are any."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # the loop keeps the timer, which keeps this; a strong reference back would keep a closed loop for ever
        self._loop = weakref.ref(loop)
        self._polls: dict[Callable[[], bool], None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None  # when the polls should all have been asked again; None where there are none

    @property
    def late_s(self) -> float:
        """Seconds by which the polls are late, as they are when the loop is blocked."""
        due = self._due
        return 0.0 if due is None else max(0.0, time.monotonic() - due)

    def add(self, poll: Callable[[], bool]) -> None:
        self._polls[poll] = None
        if self._timer is None:
            self._arm()

    def discard(self, poll: Callable[[], bool]) -> None:
        self._polls.pop(poll, None)
        if not self._polls and self._timer is not None:
            self._timer.cancel()
            self._timer = self._due = None

    def _arm(self) -> None:
        loop, self._due = self._loop(), time.monotonic() + ABORT_POLL_S
        self._timer = None if loop is None else loop.call_later(ABORT_POLL_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            for poll in list(self._polls):
                # one that raises is not asked again: the loop reports it, and the others' turn comes with the next tick
                del self._polls[poll]
                if poll():
                    self._polls[poll] = None
        finally:
            self._due = None
            if self._polls:
                self._arm()


POLLERS: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Poller]] = weakref.WeakKeyDictionary()


CURRENT_CALL: Final[contextvars.ContextVar[str]] = contextvars.ContextVar("strands_rollout_tool_call", default="")
"""The id of the tool call that runs here; "" outside of one."""
_BEGAN: Final[contextvars.ContextVar[float | None]] = contextvars.ContextVar(
    "strands_rollout_episode_began", default=None
)


@contextmanager
def episode_clock(elapsed_s: float = 0.0) -> Iterator[None]:
    """Start the episode's clock for all that the block calls, awaits or starts, at what it took before its abort."""
    token = _BEGAN.set(time.monotonic() - elapsed_s)
    try:
        yield
    finally:
        _BEGAN.reset(token)


def began_at_s(seconds: float) -> float | None:
    """When a step of the episode began that took so many seconds and ends now, to 0.1 ms; None outside of one."""
    began = _BEGAN.get()
    return None if began is None else round(max(0.0, time.monotonic() - seconds - began), 4)
