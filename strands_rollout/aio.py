"""asyncio: values kept for each event loop, admission to it one step at a time, work that is done once in a process.

Nothing binds to a loop at import.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import suppress
from typing import Any, Final, Generic, Protocol, TypeVar


class Closable(Protocol):
    """A value that belongs to one event loop."""

    @property
    def is_closed(self) -> bool:
        """True once it can't be used any more."""

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


async def admit_to_loop() -> None:
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
