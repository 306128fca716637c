"""A limit on how many calls run at once, fair across owners: an episode with many calls does not go before the others.

Safe over threads and event loops. Knows nothing of what the calls do.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator

CALL_OWNER: contextvars.ContextVar[str | None] = contextvars.ContextVar("strands_rollout_call_owner", default=None)
"""Whose call it is; set by whoever runs an episode. Calls without an owner share one turn."""


class FairQueue:
    """Places that are given to waiting owners in turn, and first come first served within an owner.

    Args:
        places: Calls that may run at once.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str | None, deque[_Ticket]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a place; waits for one first."""
        await self._take()
        try:
            yield
        finally:
            self._give()

    async def _take(self) -> None:
        ticket = _Ticket()
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return
            self._waiting.setdefault(CALL_OWNER.get(), deque()).append(ticket)
        try:
            await ticket.called
        except BaseException:  # cancelled, or its loop is closed under it
            with self._lock:
                ticket.abandoned = True
                has_place = ticket.granted
            if has_place:
                self._give()
            raise

    def _give(self) -> None:
        """Hand a place to the next owner's first ticket, or set it free."""
        with self._lock:
            ticket = self._next()
            if ticket is None:
                self._free += 1
                return
            ticket.granted = True
        try:
            ticket.call()
        except RuntimeError:  # its loop was closed a moment ago
            self._give()

    def _next(self) -> _Ticket | None:
        while self._waiting:
            owner, tickets = self._waiting.popitem(last=False)
            ticket = tickets.popleft()
            if tickets:
                self._waiting[owner] = tickets  # at the end: the others come first
            if not ticket.abandoned and not ticket.loop.is_closed():
                return ticket
        return None


class _Ticket:
    """One call that waits, on the loop that it waits on."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.called: asyncio.Future[None] = self.loop.create_future()
        self.granted = False
        self.abandoned = False

    def call(self) -> None:
        """Wake the caller, from any thread."""
        self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self.called.done():
            self.called.set_result(None)
