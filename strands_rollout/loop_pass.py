"""One heavy step to each pass of an event loop, so that its timers and sockets come between many.

A loop runs all that is ready before it looks at the clock again: what hundreds of episodes begin at once would be one
long step. Knows nothing of what the steps are.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from typing import Final


async def own_pass() -> None:
    """Go on in a pass of the running loop in which nobody else returns from here; first come, first served.

    Returns at once where nobody has in this pass: a step that is alone waits for nothing.
    """
    loop = asyncio.get_running_loop()
    passes = _PASSES.get(loop)
    if passes is None:
        passes = _PASSES[loop] = _Passes()
    await passes.take(loop)


class _Passes:
    """The passes of one event loop."""

    def __init__(self) -> None:
        self._is_taken = False
        # who is cancelled is taken out: a future that stayed here would keep a closed loop for ever
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next, loop)
            return
        called: asyncio.Future[None] = loop.create_future()
        self._waiting.append(called)
        try:
            await called
        except BaseException:  # cancelled, or its loop is closed under it
            with contextlib.suppress(ValueError):
                self._waiting.remove(called)
            raise

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the pass that begins now to whoever has waited longest."""
        while self._waiting:
            called = self._waiting.popleft()
            if not called.done():
                called.set_result(None)
                loop.call_soon(self._next, loop)
                return
        self._is_taken = False


_PASSES: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Passes]] = weakref.WeakKeyDictionary()
