"""Abort, deadlines and clock of an episode, in one `Control` that all parts of the episode share.

Aborts are polled in one place, a timer of the event loop. While blocks wait under a deadline, the timer calls
`should_abort` every 0.05 s. Episodes with an equal `poll_key` share one call. If the function returns true, the timer
ends the blocks of these episodes. Other steps check before they begin (`Control.check`).

A `Control` can't be passed to code that Strands or a user's code calls. Such code reads two context variables instead:
whether it runs in an episode (`is_in_episode`), and in which tool call (`current_call`).
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
ABORT_GRACE_S: Final = 0.2  # time for an engine to answer an aborted request with the tokens that it has sampled

EngineGrace: TypeAlias = Callable[[float], float]
"""Maps a request's send time (`time.monotonic`) to the seconds to wait for the answer after an abort."""


def never() -> bool:
    """Return False: the `should_abort` of an episode that is never aborted."""
    return False


def short_grace(_sent_at: float) -> float:
    """Return `ABORT_GRACE_S`, for episodes whose tokens are not kept after an abort."""
    return ABORT_GRACE_S


class Generating(Protocol):
    """A model that may have in-flight requests."""

    @property
    def sent_at(self) -> float | None:
        """Send time of the newest in-flight request, by `time.monotonic`; None if none is in flight."""

    def stop_generating(self) -> Awaitable[bool]:
        """Ask the engine to abort the in-flight requests; return True if the engine confirmed an abort."""


class Control:
    """Abort, deadlines and clock of one episode.

    Args:
        should_abort: Function that returns true once the rollout is aborted. Then blocks under a deadline end at the
            next poll, or at most `engine_grace_s` later, and other steps do not begin.
        engine_grace_s: Function that takes a request's send time, and returns the seconds to wait for the answer after
            an abort. In this time, the engine must be able to answer all requests that are aborted at once.
        poll_key: Key of `should_abort`; the function is polled once for all episodes with an equal key. None polls it
            for this episode alone.
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
        """Raise an error if the rollout is being aborted.

        Args:
            when: The end of the error message.

        Raises:
            EngineAbortedError: The rollout is being aborted.
        """
        if self.should_abort():
            raise EngineAbortedError(f"the rollout was aborted {when}")

    def deadline(
        self, timeout_s: float | None = None, *, model: Generating | None = None, during: str = ""
    ) -> "Deadline":
        """Return a context manager that ends its block after `timeout_s`, or at an abort of the rollout.

        Args:
            timeout_s: Seconds that the block may take; None for no limit.
            model: The model that sends requests in the block, if any. At an abort of the rollout, the engine is asked
                to abort the requests in flight. The block then ends at most `engine_grace_s` later. In this time, the
                engine can answer with the tokens that it has sampled.
            during: The end of the error message after an abort.
        """
        return Deadline(self, timeout_s, model, during)

    @contextmanager
    def running(self, elapsed_s: float = 0.0) -> Iterator[None]:
        """Run the clock during the block, and make `is_in_episode` return True in it.

        The block is the episode, or a part of the episode that has a clock of its own.

        Args:
            elapsed_s: Seconds that the episode had taken before it was resumed.
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
        """Seconds that the episode has taken, including the seconds before a resume; 0 if the clock does not run."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def left_s(self, limit_s: float | None) -> float | None:
        """Return the seconds that are left of `limit_s`, a limit on the whole episode; None if `limit_s` is None."""
        return None if limit_s is None else max(0.0, limit_s - self.elapsed_s)

    def step_start_s(self, seconds: float) -> float | None:
        """Return the start of a step that took `seconds` and ends now; None outside of an episode.

        The start is in seconds since the episode began, rounded to 0.1 ms.
        """
        return None if self._began is None else round(max(0.0, self.elapsed_s - seconds), 4)


class Deadline:
    """Time limit of a block: cancels the block when the time is up or the rollout is aborted. See `Control.deadline`.

    This async context manager can be used once. After a cancelled block, it raises EngineAbortedError if the rollout
    was aborted, else TimeoutError.

    Attributes:
        was_aborted: True if the rollout was aborted while the block ran.
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
        """Return whether this deadline cancelled the block: its time was up, or the rollout was aborted."""
        return self._timeout.expired()

    def _abort(self) -> None:
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
    """The timer of an event loop; it polls for aborts while blocks wait under a deadline."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # use a weak reference, so that a closed loop can be collected: the loop's timer refers to this object
        self._loop = weakref.ref(loop)
        self._polls: dict[Hashable, _Poll] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None  # time of the next poll; None if nothing waits

    @property
    def late_s(self) -> float:
        """Seconds by which the next poll is overdue, for example because the event loop is blocked; else 0.0."""
        due = self._due
        return 0.0 if due is None else max(0.0, time.monotonic() - due)

    def add(self, control: Control, abort: Callable[[], None]) -> None:
        """Call `abort` once a poll of this control's `should_abort` returns true."""
        poll = self._polls.get(control.poll_key)
        if poll is None:
            poll = self._polls[control.poll_key] = _Poll(control.should_abort)
        poll.waiting[abort] = None
        if self._timer is None:
            self._start_timer()

    def discard(self, control: Control, abort: Callable[[], None]) -> None:
        """Stop polling for `abort`."""
        poll = self._polls.get(control.poll_key)
        if poll is not None:
            poll.waiting.pop(abort, None)
            if not poll.waiting:
                del self._polls[control.poll_key]
        if not self._polls and self._timer is not None:
            self._timer.cancel()
            self._timer = self._due = None

    def _start_timer(self) -> None:
        loop, self._due = self._loop(), time.monotonic() + ABORT_POLL_S
        self._timer = None if loop is None else loop.call_later(ABORT_POLL_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            for key in list(self._polls):
                # if `should_abort` raises, its entry stays removed; the loop logs the error, and the next tick polls
                # the remaining entries
                poll = self._polls.pop(key)
                if poll.should_abort():
                    for abort in poll.waiting:
                        abort()
                else:
                    self._polls[key] = poll
        finally:
            self._due = None
            if self._polls:
                self._start_timer()


@dataclass(slots=True)
class _Poll:
    """A function that is polled, and the functions to call once it returns true."""

    should_abort: Callable[[], bool]
    waiting: dict[Callable[[], None], None] = field(default_factory=dict)


POLLERS: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AbortPoller]] = weakref.WeakKeyDictionary()

_IN_EPISODE: Final[ContextVar[bool]] = ContextVar("strands_rollout_in_episode", default=False)


def is_in_episode() -> bool:
    """Return whether this code was called, awaited or started in an episode's `Control.running` block."""
    return _IN_EPISODE.get()


@dataclass(slots=True)
class RunningCall:
    """A tool call that is running.

    Attributes:
        id: The call's tool-use id.
        outer_id: If a tool's sub-agent made this call, the tool-use id of the outermost call; otherwise `id`.
        sandbox: Facts for the call's record if this is a call of the code tool, such as the code's exit code.
        faults: Failures of the code executor during the call, including those that a sub-agent read as tool results.
        began_at: Start time of the call, by `time.monotonic`.
        timed_out: True if the call's time limit ended it.
    """

    id: str
    outer_id: str
    sandbox: dict[str, Any] = field(default_factory=dict)
    faults: list[SandboxError] = field(default_factory=list)
    began_at: float = field(default_factory=time.monotonic)
    timed_out: bool = False


_CALL: Final[ContextVar[RunningCall | None]] = ContextVar("strands_rollout_tool_call", default=None)


def current_call() -> RunningCall | None:
    """Return the tool call that runs this code; None outside of a call."""
    return _CALL.get()


class calling:  # noqa: N801 - used as a statement: `with calling(...):`
    """Make a tool call the current call for all code that the block calls, awaits or starts."""

    __slots__ = ("_call", "_token")

    def __init__(self, call_id: str) -> None:
        outer = _CALL.get()
        self._call = RunningCall(call_id, call_id if outer is None else outer.outer_id)

    def __enter__(self) -> RunningCall:
        self._token = _CALL.set(self._call)
        return self._call

    def __exit__(self, *_: object) -> None:
        _CALL.reset(self._token)
