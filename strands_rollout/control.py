"""May an episode go on? Its abort, its deadlines and its clock, in one `Control` that is handed to all its parts.

The abort is watched for in one place: a timer of each event loop asks `should_abort` every 0.05 s, once for all
episodes of which the same is asked, and ends what waits under a deadline. Other steps ask before they begin
(`Control.check`).

What Strands or a user's code calls in an episode can't be handed a `Control`; two context variables tell it that an
episode runs here (`is_in_episode`), and which tool call (`current_call`).
"""

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeAlias

from strands_rollout.errors import EngineAbortedError, SandboxError

ABORT_POLL_S: Final = 0.05
ABORT_GRACE_S: Final = 0.2  # for an engine to answer an aborted request with what it has sampled

EngineGrace: TypeAlias = Callable[[float], float]
"""Seconds for an engine to answer an aborted request that was sent at a time of `time.monotonic`."""


def never() -> bool:
    """Return False: the `should_abort` of what nobody aborts."""
    return False


def short_grace(_sent_at: float) -> float:
    """Return the grace of an episode whose tokens are not kept after an abort."""
    return ABORT_GRACE_S


class Generating(Protocol):
    """A model that may have an in-flight request."""

    @property
    def sent_at(self) -> float | None:
        """When the last of them was sent, by `time.monotonic`; None without any."""

    def stop_generating(self) -> Awaitable[bool]:
        """Ask the engine to abort it; return True if the engine said that it will."""


class Control:
    """The abort, the deadlines and the clock of one episode, which makes it and hands it to all its parts.

    Args:
        should_abort: Once it returns true, the episode ends: what waits under a deadline at the next poll, anything
            else before its next step.
        engine_grace_s: How long a model's in-flight request is waited for after an abort, by when it was sent: a
            thousand answers at once take longer than one.
        poll_key: Equal for episodes of which the same is asked: one of their functions is polled for all of them.
            None polls this one alone.
    """

    __slots__ = ("_began", "engine_grace_s", "poll_key", "should_abort")

    def __init__(
        self,
        should_abort: Callable[[], bool] = never,
        *,
        engine_grace_s: EngineGrace = short_grace,
        poll_key: Hashable = None,
    ) -> None:
        self.should_abort: Final = should_abort
        self.engine_grace_s: Final = engine_grace_s
        self.poll_key: Final = self if poll_key is None else poll_key
        self._began: float | None = None

    def check(self, when: str) -> None:
        """Do nothing unless the rollout is being aborted; `when` ends the message.

        Raises:
            EngineAbortedError: It is.
        """
        if self.should_abort():
            raise EngineAbortedError(f"the rollout was aborted {when}")

    def deadline(
        self, timeout_s: float | None = None, *, model: Generating | None = None, during: str = ""
    ) -> "Deadline":
        """Return a guard for an `async with` block that may take so many seconds, and ends when the rollout is aborted.

        Args:
            timeout_s: None for no limit.
            model: If it has an in-flight request when the rollout is aborted, the engine is asked to abort that, and
                the block ends `engine_grace_s` later, so that the engine can answer with what it has sampled.
            during: The end of the message of an abort.
        """
        return Deadline(self, timeout_s, model, during)

    @contextmanager
    def running(self, elapsed_s: float = 0.0) -> Iterator[None]:
        """Run the episode, or a part of it that has a clock of its own, in the block.

        The clock starts at the seconds that the episode had taken before it was aborted and resumed.
        """
        before, self._began = self._began, time.monotonic() - elapsed_s
        token = _IN_EPISODE.set(True)
        try:
            yield
        finally:
            _IN_EPISODE.reset(token)
            self._began = before

    @property
    def elapsed_s(self) -> float:
        """Seconds that the episode has taken, those before it was resumed included; 0 where none runs."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def left_s(self, limit_s: float | None) -> float | None:
        """Seconds left of a limit on the whole episode; None of no limit."""
        return None if limit_s is None else max(0.0, limit_s - self.elapsed_s)

    def at_s(self, seconds: float) -> float | None:
        """When a step began that took so many seconds and ends now, to 0.1 ms; None where no episode runs."""
        return None if self._began is None else round(max(0.0, self.elapsed_s - seconds), 4)


class Deadline:
    """Cancels the block that it guards when its time is up or the rollout is aborted; made by `Control.deadline`.

    An async context manager, used once. It raises TimeoutError, or EngineAbortedError after an abort.

    Attributes:
        was_aborted: Whether the rollout was aborted while the block ran.
    """

    def __init__(self, control: Control, timeout_s: float | None, model: Generating | None, during: str) -> None:
        self._control = control
        self._timeout = asyncio.timeout(timeout_s)
        self._model = model
        self._during = during
        self._poller: AbortPoller | None = None
        self._stopping: asyncio.Future[bool] | None = None
        self._limit: float | None = None
        self.was_aborted = False

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._limit = self._timeout.when()
        loop = asyncio.get_running_loop()
        if loop not in POLLERS:
            POLLERS[loop] = AbortPoller(loop)
        self._poller = POLLERS[loop]
        self._poller.add(self._control, self._abort)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._poller is not None:
            self._poller.discard(self._control, self._abort)
        if self._stopping is not None:
            self._stopping.cancel()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as e:
            if not self.was_aborted:
                raise
            raise EngineAbortedError(f"the rollout was aborted {self._during}".rstrip()) from e

    def expired(self) -> bool:
        """Return True once the block was cancelled."""
        return self._timeout.expired()

    def _abort(self) -> None:
        """End the block, at once or after the model's grace."""
        if self._timeout.expired():
            return
        self.was_aborted = True
        sent_at = None if self._model is None else self._model.sent_at
        grace_s = 0.0 if sent_at is None else self._control.engine_grace_s(sent_at)
        end = asyncio.get_running_loop().time() + grace_s
        self._timeout.reschedule(end if self._limit is None else min(self._limit, end))
        if self._model is not None and sent_at is not None:
            self._stopping = asyncio.ensure_future(self._model.stop_generating())


class AbortPoller:
    """The one timer of an event loop that asks for aborts, while anything waits for one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # the loop keeps the timer, which keeps this; a strong reference back would keep a closed loop for ever
        self._loop = weakref.ref(loop)
        self._polls: dict[Hashable, _Poll] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None  # when all should have been asked again; None where nothing waits

    @property
    def late_s(self) -> float:
        """Seconds by which the polls are late, as they are when the loop is blocked."""
        due = self._due
        return 0.0 if due is None else max(0.0, time.monotonic() - due)

    def add(self, control: Control, abort: Callable[[], None]) -> None:
        """Call `abort` once the episodes of this control are aborted."""
        poll = self._polls.get(control.poll_key)
        if poll is None:
            poll = self._polls[control.poll_key] = _Poll(control.should_abort)
        poll.waiting[abort] = None
        if self._timer is None:
            self._arm()

    def discard(self, control: Control, abort: Callable[[], None]) -> None:
        """Do not call `abort` any more."""
        poll = self._polls.get(control.poll_key)
        if poll is not None:
            poll.waiting.pop(abort, None)
            if not poll.waiting:
                del self._polls[control.poll_key]
        if not self._polls and self._timer is not None:
            self._timer.cancel()
            self._timer = self._due = None

    def _arm(self) -> None:
        loop, self._due = self._loop(), time.monotonic() + ABORT_POLL_S
        self._timer = None if loop is None else loop.call_later(ABORT_POLL_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            for key in list(self._polls):
                # one that raises is not asked again: the loop reports it, and the others' turn comes with the next tick
                poll = self._polls.pop(key)
                if poll.should_abort():
                    for abort in poll.waiting:
                        abort()
                else:
                    self._polls[key] = poll
        finally:
            self._due = None
            if self._polls:
                self._arm()


@dataclass(slots=True)
class _Poll:
    """A function that is polled, and what is called once it holds."""

    should_abort: Callable[[], bool]
    waiting: dict[Callable[[], None], None] = field(default_factory=dict)


POLLERS: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AbortPoller]] = weakref.WeakKeyDictionary()

_IN_EPISODE: Final[ContextVar[bool]] = ContextVar("strands_rollout_in_episode", default=False)


def is_in_episode() -> bool:
    """Return True in whatever an episode's `Control.running` block calls, awaits or starts."""
    return _IN_EPISODE.get()


@dataclass(slots=True)
class RunningCall:
    """A tool call that is running.

    Attributes:
        id: Its tool-use id.
        outer_id: That of the call in which it was made, by an agent that a tool asks; its own where there is none.
        sandbox: What its record will say of the sandbox, where the code tool runs.
        faults: Failures of the code executor itself in it, also those that an agent in between has read as a result.
        began_at: When it began, by `time.monotonic`.
        timed_out: Whether it was cut at its limit of time.
    """

    id: str
    outer_id: str
    sandbox: dict[str, Any] = field(default_factory=dict)
    faults: list[SandboxError] = field(default_factory=list)
    began_at: float = field(default_factory=time.monotonic)
    timed_out: bool = False


_CALL: Final[ContextVar[RunningCall | None]] = ContextVar("strands_rollout_tool_call", default=None)


def current_call() -> RunningCall | None:
    """Return the tool call that runs here; None outside of one."""
    return _CALL.get()


@contextmanager
def calling(call_id: str) -> Iterator[RunningCall]:
    """Make a tool call the current one of whatever the block calls, awaits or starts."""
    outer = _CALL.get()
    call = RunningCall(call_id, call_id if outer is None else outer.outer_id)
    token = _CALL.set(call)
    try:
        yield call
    finally:
        _CALL.reset(token)
