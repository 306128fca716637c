"""What belongs to an event loop, such as a connection: made once per loop and key, closed when the loop shuts down.

Holds no lock and binds to no loop at import. Each loop's thread touches only its own loop's things.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Callable, Hashable
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """What the cache can hold."""

    @property
    def is_closed(self) -> bool:
        """Whether it can't be used any more."""
        ...

    async def aclose(self) -> None:
        """Close it, on its own loop."""
        ...


T = TypeVar("T", bound=Closable)


class LoopCache(Generic[T]):
    """A cache for the running event loop.

    A value is closed when its loop ends its asynchronous generators, which `asyncio.run` and `asyncio.Runner` do before
    they close the loop. What is left of a loop that was closed without it is forgotten when the next loop comes.
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
            self._forget_closed_loops()
            self._loops[loop] = {}
        values = self._loops[loop]
        if key not in values or values[key][0].is_closed:
            value = make()
            values[key] = (value, _close_with_loop(value))
        return values[key][0]

    def loop_count(self) -> int:
        """How many loops have values here."""
        return len(self._loops)

    def _forget_closed_loops(self) -> None:
        # A value refers to its loop, so that the weak key alone would keep both for ever.
        for reference in self._loops.keyrefs():
            loop = reference()
            if loop is not None and loop.is_closed():
                self._loops.pop(loop, None)


def _close_with_loop(value: Closable) -> AsyncGenerator[None, None]:
    """Start a generator that closes the value when the loop ends its generators; it lives while it is referred to."""

    async def guard() -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await value.aclose()

    started = guard()
    with contextlib.suppress(StopIteration):
        started.asend(None).send(None)  # runs to the yield without waiting, and makes the loop know of it
    return started
