"""asyncio helpers: a cache per event loop, tasks, event-loop admission, and work that runs once per process."""

import asyncio
import sys
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable
from contextlib import suppress
from typing import Any, Final, Generic, Protocol, TypeVar


class Closable(Protocol):
    """A value that belongs to one event loop."""

    @property
    def is_closed(self) -> bool:
        """True if the value can't be used any more."""

    async def aclose(self) -> None:
        """Close the value, on its own event loop."""


T = TypeVar("T", bound=Closable)
Result = TypeVar("Result")


class LoopCache(Generic[T]):
    """A cache with separate values for each event loop.

    The values of a loop are closed when the loop shuts down its asynchronous generators, as `asyncio.run` and
    `asyncio.Runner` do before they close a loop. If a loop was closed in another way, its values are not closed; they
    are dropped when a new loop uses the cache.
    """

    def __init__(self) -> None:
        self._loops: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[Hashable, tuple[T, AsyncGenerator[None, None]]]
        ] = weakref.WeakKeyDictionary()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the running loop's value for `key`; if there is none or it is closed, return a new one from `make`.

        Raises:
            RuntimeError: No event loop is running.
        """
        loop = asyncio.get_running_loop()
        values = self._loops.get(loop)
        if values is None:
            # remove closed loops here: a loop's values refer to the loop, so the weak key would stay forever
            for closed in [other for other in self._loops if other.is_closed()]:
                del self._loops[closed]
            values = self._loops[loop] = {}
        known = values.get(key)
        if known is None or known[0].is_closed:
            value = make()
            known = values[key] = (value, _close_with_loop(value))
        return known[0]


def _close_with_loop(value: Closable) -> AsyncGenerator[None, None]:
    """Return a started generator that closes `value` when the running loop shuts down its asynchronous generators.

    The caller must keep a reference to the generator.
    """

    async def guard() -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await value.aclose()

    started = guard()
    with suppress(StopIteration):
        started.asend(None).send(None)  # runs to the yield without waiting, and registers the generator with the loop
    return started


def start_task(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Start a coroutine as a task; from Python 3.12 on, it has run up to its first wait when this function returns."""
    if sys.version_info >= (3, 12):
        return asyncio.eager_task_factory(asyncio.get_running_loop(), work)
    return asyncio.create_task(work)


async def admit_to_loop() -> None:
    """Wait for event-loop admission: at most one caller continues in each pass of the loop, in the order of calls.

    A caller continues immediately if nobody waits and nobody has been admitted in the current pass.
    """
    loop = asyncio.get_running_loop()
    waiting = _WAITING.get(loop)
    if waiting is None:
        _WAITING[loop] = deque()
        loop.call_soon(_admit_next, loop)
        return
    admission: asyncio.Future[None] = loop.create_future()
    waiting.append(admission)
    try:
        await admission
    finally:
        if admission.cancelled() or not admission.done():  # the caller was cancelled, or its loop was closed
            with suppress(ValueError):
                waiting.remove(admission)  # a remaining future would keep a closed loop in memory


def _admit_next(loop: asyncio.AbstractEventLoop) -> None:
    waiting = _WAITING[loop]
    while waiting:
        admission = waiting.popleft()
        if not admission.done():
            admission.set_result(None)
            loop.call_soon(_admit_next, loop)
            return
    del _WAITING[loop]


# waiting callers, by loop; if a loop has an entry, a caller was admitted in its current pass, and the next one waits
_WAITING: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, deque[asyncio.Future[None]]]] = (
    weakref.WeakKeyDictionary()
)


async def shared_result(task: asyncio.Task[Result]) -> Result:
    """Wait for a task with other callers, and return its result; a cancelled caller does not cancel the task.

    When the task ends, one of the waiting callers continues in each pass of the event loop (`admit_to_loop`).

    Raises:
        BaseException: The exception of the task.
    """
    if not task.done():
        await asyncio.wait({task})
        await admit_to_loop()
    return task.result()


_FINISHED_KEYS: Final[set[Hashable]] = set()
_RUNNING_TASKS: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, asyncio.Task[Any]]]] = (
    weakref.WeakKeyDictionary()
)


async def run_once(key: Hashable, work: Callable[[], object]) -> None:
    """Run `work` in a thread, once per process and `key`; return immediately if an earlier run has succeeded.

    Concurrent callers on one event loop wait for the same run; callers on another loop start a run of their own. If a
    run fails, all callers that wait for it raise its exception, and the next call runs `work` again.
    """
    if key in _FINISHED_KEYS:
        return
    running = _RUNNING_TASKS.setdefault(asyncio.get_running_loop(), {})
    task = running.get(key)
    if task is None:
        task = running[key] = asyncio.create_task(asyncio.to_thread(work))

        def on_done(ended: asyncio.Task[object]) -> None:
            del running[key]
            if not ended.cancelled() and ended.exception() is None:
                _FINISHED_KEYS.add(key)

        task.add_done_callback(on_done)
    await shared_result(task)
