"""asyncio: caches of an event loop, event-loop admission, sync code in threads, an episode's deadline and clock.

Nothing binds to a loop at import.
"""

import asyncio
import concurrent.futures
import contextvars
import functools
import gc
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Generic, ParamSpec, Protocol, Self, TypeAlias, TypeVar, cast

from strands_rollout.code_origin import is_users_file
from strands_rollout.errors import ToolError

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """What the cache can hold."""

    @property
    def is_closed(self) -> bool:
        """Whether it can't be used any more."""

    async def aclose(self) -> None:
        """Close it, on its own loop."""


T = TypeVar("T", bound=Closable)


class LoopCache(Generic[T]):
    """A cache for the running event loop.

    A value is closed when its loop ends its asynchronous generators, which `asyncio.run` and `asyncio.Runner` do before
    they close the loop. The values of a loop that was closed without that are dropped when another loop comes.
    """

    def __init__(self) -> None:
        self._loops: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[Hashable, tuple[T, AsyncGenerator[None, None]]]
        ] = weakref.WeakKeyDictionary()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the running loop's value for this key; make it if there is none or it was closed.

        Raises:
            RuntimeError: No event loop is running.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            # a value refers to its loop, so that the weak key alone would keep both for ever
            for closed in [known for known in self._loops if known.is_closed()]:
                del self._loops[closed]
            self._loops[loop] = {}
        values = self._loops[loop]
        if key not in values or values[key][0].is_closed:
            value = make()
            values[key] = (value, _close_with_loop(value))
        return values[key][0]


def _close_with_loop(value: Closable) -> AsyncGenerator[None, None]:
    """Start a generator that closes the value when the loop ends its generators; it lives while it is referred to."""

    async def guard() -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await value.aclose()

    started = guard()
    with suppress(StopIteration):
        started.asend(None).send(None)  # runs to the yield without waiting, and makes the loop know of it
    return started


async def own_pass() -> None:
    """Event-loop admission: returns to one caller in each pass of the running loop, in the order of the calls.

    A caller that is alone returns at once.
    """
    loop = asyncio.get_running_loop()
    waiting = _WAITING.get(loop)
    if waiting is None:
        _WAITING[loop] = deque()
        loop.call_soon(_next_pass, loop)
        return
    called: asyncio.Future[None] = loop.create_future()
    waiting.append(called)
    try:
        await called
    finally:
        if called.cancelled() or not called.done():  # the caller was cancelled, or its loop is closed under it
            with suppress(ValueError):
                waiting.remove(called)  # a future that stayed here would keep a closed loop for ever


def _next_pass(loop: asyncio.AbstractEventLoop) -> None:
    """Give the pass that begins now to the caller that has waited longest."""
    waiting = _WAITING[loop]
    while waiting:
        called = waiting.popleft()
        if not called.done():
            called.set_result(None)
            loop.call_soon(_next_pass, loop)
            return
    del _WAITING[loop]


# of the loops whose pass is taken
_WAITING: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, deque[asyncio.Future[None]]]] = (
    weakref.WeakKeyDictionary()
)


# full collections wait for so many of the middle generation's; 10 is Python's own number. With 2,000 episodes the
# process grew no larger, since what an episode leaves in cycles is small beside what it holds while it runs
_YOUNGER_COLLECTIONS: Final = 100
_DONE: Final[set[Hashable]] = set()
_RUNNING: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, asyncio.Task[Any]]]] = (
    weakref.WeakKeyDictionary()
)


async def once(key: Hashable, work: Callable[[], object]) -> None:
    """Do work in a thread, once in the process for each key; returns at once where it is done.

    Callers that come while it runs wait for it. Where it raises, they all do, and the next call tries again.
    """
    if key in _DONE:
        return
    running = _RUNNING.setdefault(asyncio.get_running_loop(), {})
    task = running.get(key)
    if task is None:
        task = running[key] = asyncio.create_task(asyncio.to_thread(work))

        def note_end(ended: asyncio.Task[object]) -> None:
            del running[key]
            if not ended.cancelled() and ended.exception() is None:
                _DONE.add(key)

        task.add_done_callback(note_end)
    await asyncio.shield(task)  # a caller that is cancelled does not cancel it for the others


@functools.cache
def freeze_long_lived() -> None:
    """Collect garbage and freeze what is left (`gc.freeze`); the first call does, any other returns at once.

    Frozen objects are freed as before when nothing refers to them; only cycles of them are not found any more. Call it
    before the first episode, so that no episode is among them. Full collections, which look through all running
    episodes at once, become rarer, unless the process has set them to be rarer still or off (`gc.set_threshold`).
    """
    gc.collect()
    gc.freeze()
    young, middle, full = gc.get_threshold()
    if 0 < full < _YOUNGER_COLLECTIONS:
        gc.set_threshold(young, middle, _YOUNGER_COLLECTIONS)


_LAST_MOMENT_S: Final = 0.03
_MOST_IDLE: Final = 64
P = ParamSpec("P")
Result = TypeVar("Result")


@contextmanager
def exits_as_errors(what: str, error: type[Exception] = ToolError) -> Iterator[None]:
    """Turn exceptions of a user's code that `except Exception` does not catch into ordinary errors.

    SystemExit and KeyboardInterrupt end the event loop when they leave a task, and with it every other episode:
    `sys.exit()` or argparse in an async tool would end a training run. A CancelledError is turned too, unless the
    running task was cancelled, and a GeneratorExit, unless the coroutine around the block is being closed. `what` names
    the code in the message.

    A child that the code has forked ends where it leaves the block: it holds a copy of this thread alone, in which it
    would play on beside the trainer, or wait for ever.
    """
    task, pid = _running_task(), os.getpid()
    try:
        yield
    except BaseException as e:
        if os.getpid() != pid:
            os._exit(1)
        if isinstance(e, Exception):
            raise
        if isinstance(e, asyncio.CancelledError):
            if task is not None and task.cancelling():
                raise
            raise error(f"{what} was cancelled by its own code") from e
        if isinstance(e, GeneratorExit) and _running_task() is not task:
            raise
        raise error(f"{what} raised {e!r}") from e
    if os.getpid() != pid:
        os._exit(0)


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None


def in_own_thread(
    function: Callable[P, Result], *, has_last_moment: bool = True
) -> Callable[P, Coroutine[Any, Any, Result]]:
    """An async version of a sync function: each call in a thread of its own, with the caller's context variables.

    A call that is cancelled is abandoned: its thread goes on until the function ends. With `has_last_moment`, a call
    that ends within 0.03 s gives its result in place of the cancellation.
    """

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        context = contextvars.copy_context()

        def run() -> Callable[[], None]:
            try:
                with exits_as_errors("the tool"):
                    return functools.partial(_settle, future, result=context.run(function, *args, **kwargs))
            except Exception as e:  # whatever the tool raises belongs to the caller
                # a future can't hold StopIteration
                error = ToolError(f"the tool raised {e!r}") if isinstance(e, StopIteration) else e
                return functools.partial(_settle, future, error=error)

        _idle_thread().run(run, loop, f"tool:{getattr(function, '__name__', '')}")
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # a function that is just ending has ended: it would else be run again
            if not has_last_moment or not (await asyncio.wait({future}, timeout=_LAST_MOMENT_S))[0]:
                future.cancel()
                raise
            return future.result()

    return call


class _ToolThread:
    """A thread that does one job after the other, and ends where enough others are idle.

    They are kept because the event loop waits while a new thread starts.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="tool", daemon=True).start()

    def run(self, function: Callable[[], Callable[[], None]], loop: asyncio.AbstractEventLoop, name: str) -> None:
        """Call `function` under this name in the thread, and what it returns in the loop."""

        def job() -> bool:
            threading.current_thread().name = name
            asyncio.set_event_loop(None)  # one that the last function left here may be closed
            outcome = function()
            stays = len(_IDLE) < _MOST_IDLE
            if stays:  # before the loop hears of it: its next call may be this thread's
                _IDLE.append(self)
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(outcome)
            return stays

        self._jobs.put(job)

    def _work(self) -> None:
        while self._jobs.get()():
            pass


def _idle_thread() -> _ToolThread:
    try:
        return _IDLE.pop()
    except IndexError:
        return _ToolThread()


_IDLE: Final[deque[_ToolThread]] = deque()
# a forked child has none of its parent's threads
os.register_at_fork(after_in_child=_IDLE.clear)


def _settle(future: asyncio.Future[Any], *, result: object = None, error: BaseException | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Let asyncio log nothing of an error that nobody waits for."""
    if not future.cancelled():
        future.exception()


_STEP_CLEANUP_S: Final = 0.5


@dataclass(slots=True)
class _Step:
    call: Callable[[], Awaitable[Any]]
    context: contextvars.Context
    done: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)
    is_begun: bool = False
    is_cancelled: bool = False


class OwnLoop:
    """An event loop in a thread of its own, where code that blocks holds up nobody else; an async context manager.

    The functions that it is given run in one task, one after the other: some contexts must be left by the task that
    entered them. Leaving the block does not wait for a function that has not ended.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._steps: asyncio.Queue[_Step | None] = asyncio.Queue()
        self._running: _Step | None = None
        self._is_blocked = False  # a step was given up before it began; none has begun since
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        _idle_thread().run(self._work, asyncio.get_running_loop(), "own-loop")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._steps.put_nowait, None)

    async def run(self, function: Callable[P, Awaitable[Result]], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Call an async function on this loop, with the caller's context variables; returns its result.

        A call that is cancelled is cancelled there too, and abandoned if it has not ended 0.5 s later.

        Raises:
            ToolError: The function raised SystemExit, or another exception that would end the loop; or an earlier
                function blocks the loop, for so long that another call was given up. This one is made when it ends.
            Exception: Whatever else the function raises.
        """
        if asyncio.get_running_loop() is self._loop:
            return await function(*args, **kwargs)
        step = _Step(functools.partial(function, *args, **kwargs), contextvars.copy_context())
        self._loop.call_soon_threadsafe(self._steps.put_nowait, step)
        result: asyncio.Future[Result] = asyncio.wrap_future(step.done)
        result.add_done_callback(_retrieve)  # nobody else does where this call is cancelled
        if self._is_blocked:
            raise ToolError("the event loop of its program is still blocked")
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._cancel, step)
            await asyncio.wait({result}, timeout=_STEP_CLEANUP_S)
            self._is_blocked = not step.is_begun
            raise

    def _work(self) -> Callable[[], None]:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            self._task = task = runner.get_loop().create_task(self._take_steps())
            while not task.done():
                # a step may stop the loop, and its tasks may raise SystemExit: those that follow need it
                with suppress(RuntimeError, SystemExit, KeyboardInterrupt):
                    self._loop.run_until_complete(task)
        return lambda: None

    async def _take_steps(self) -> None:
        task = cast("asyncio.Task[None]", self._task)
        while (step := await self._next_step()) is not None:
            self._is_blocked, step.is_begun = False, True
            if step.is_cancelled:
                continue
            for variable in step.context:
                variable.set(step.context[variable])
            self._running = step
            try:
                with exits_as_errors("it"):
                    step.done.set_result(await step.call())
            except BaseException as e:  # the user's code may raise anything, and the caller is told
                step.done.set_exception(e)
            self._running = None
            while task.cancelling():  # the step was cancelled, not those that follow
                task.uncancel()

    async def _next_step(self) -> _Step | None:
        while True:
            with suppress(asyncio.CancelledError):  # that the last step has left behind
                return await self._steps.get()

    def _cancel(self, step: _Step) -> None:
        step.is_cancelled = True
        if step is self._running and self._task is not None:
            self._task.cancel()


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
        if loop not in _POLLERS:
            _POLLERS[loop] = _Poller(loop)
        self._poller = _POLLERS[loop]
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


_POLLERS: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Poller]] = weakref.WeakKeyDictionary()


_LOOK_EVERY_S: Final = 0.5
_BLOCKED_S: Final = 1.5
_MOST_SHOWN_FRAMES: Final = 12


def watch_running_loop() -> None:
    """Log which line blocks the running loop, which plays episodes, once for each line.

    A loop is blocked where a timer of it is late while one call of one task stands at one line, look after look. One
    that is late because much runs on it, or the machine is busy, is not: then other calls are seen, the thread that
    looks is late itself, or the call has waited for the processor rather than used it.
    """
    loop = asyncio.get_running_loop()
    if loop not in _WATCHED:
        _WATCHED[loop] = _Watched(weakref.ref(loop), threading.get_ident(), threading.get_native_id())
    _start_watch(os.getpid())


def plays_episodes() -> bool:
    """Whether the caller is a step of an episode, on the loop that plays others too."""
    try:
        return asyncio.get_running_loop() in _WATCHED and _BEGAN.get() is not None
    except RuntimeError:  # no loop runs in this thread
        return False


@functools.cache
def _start_watch(_pid: int) -> None:
    threading.Thread(target=_watch_loops, name="loop-watch", daemon=True).start()


def _watch_loops() -> None:
    looked_at = time.monotonic()
    while True:
        time.sleep(_LOOK_EVERY_S)
        late, looked_at = time.monotonic() - looked_at > 2 * _LOOK_EVERY_S, time.monotonic()
        with suppress(RuntimeError):  # another loop came meanwhile, and is seen the next time
            for watched in list(_WATCHED.values()):
                watched.look(is_certain=not late)


@dataclass(slots=True)
class _Watched:
    """A loop under watch: since when it stands at a line, and what its thread has used of the processor by then."""

    loop: weakref.ref[asyncio.AbstractEventLoop]
    thread: int
    native_thread: int
    at: object = None
    since: float = 0.0
    cpu_s: float = 0.0
    is_computing: bool = False

    def look(self, *, is_certain: bool) -> None:
        """Log the line that the loop stands at, if it does for long; `is_certain` unless the look itself is late."""
        loop = self.loop()
        poller = None if loop is None or not loop.is_running() else _POLLERS.get(loop)
        if loop is None or poller is None or not is_certain or poller.late_s < _LOOK_EVERY_S:
            self.at = None
            return
        frames = _stack_of(sys._current_frames().get(self.thread))
        blamed = _blamed(frames)
        if blamed is None:
            return
        task, now, cpu_s = asyncio.current_task(loop), time.monotonic(), _cpu_s(self.thread)
        at = (None if task is None else weakref.ref(task)), id(blamed), blamed.f_code, blamed.f_lasti
        if at != self.at:
            self.at, self.since, self.cpu_s, self.is_computing = at, now, cpu_s, False
        self.is_computing = self.is_computing or _is_runnable(self.native_thread)
        used_s = cpu_s - self.cpu_s if self.is_computing else now - self.since
        if used_s >= _BLOCKED_S:
            _log_blocked(blamed, frames, poller.late_s)


_WATCHED: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watched]] = weakref.WeakKeyDictionary()
_TOLD: Final[set[tuple[str, int]]] = set()


def _log_blocked(blamed: FrameType, frames: Sequence[FrameType], late_s: float) -> None:
    line = blamed.f_code.co_filename, blamed.f_lineno
    if line in _TOLD:
        return
    _TOLD.add(line)
    called = [frame for frame in frames if is_users_file(frame.f_code.co_filename) or _is_installed(frame)]
    logger.warning(
        "event=event_loop_blocked seconds=%.1f: all episodes of this process stand still, with their deadlines and "
        "aborts, while it runs %s. Await there, or move it to a thread, such as by a tool that is not async",
        late_s,
        " < ".join(map(_place, called[:_MOST_SHOWN_FRAMES])),
    )


def _stack_of(frame: FrameType | None) -> list[FrameType]:
    """A frame and those that called it, the innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _blamed(frames: Sequence[FrameType]) -> FrameType | None:
    """The innermost frame of the user's; where there is none, of whatever is not Python's own."""
    own = (frame for frame in frames if is_users_file(frame.f_code.co_filename))
    return next(own, None) or next(filter(_is_installed, frames), None)


def _is_installed(frame: FrameType) -> bool:
    return "site-packages" in frame.f_code.co_filename


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}"


def _cpu_s(thread: int) -> float:
    """Seconds of processor that a thread of this process has used; 0 where the system does not tell."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    with suppress(OSError):  # it has ended
        return 0.0 if clock_of is None else time.clock_gettime(clock_of(thread))
    return 0.0


def _is_runnable(native_thread: int) -> bool:
    """Whether a thread runs, or waits for a processor only; False where the system does not tell."""
    with suppress(OSError):
        stat = Path(f"/proc/self/task/{native_thread}/stat").read_text(encoding="ascii", errors="replace")
        return stat.rpartition(")")[2].split()[0] == "R"
    return False


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
