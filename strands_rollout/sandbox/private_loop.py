"""An event loop of an executor's own: calls come from any loop and thread, and wait here for one of its places.

Knows asyncio and threads; what a call does is the backend's. Must not know any backend.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from strands_rollout.errors import SandboxError
from strands_rollout.sandbox.executor import ExecutionResult

Attempt = Callable[[], Awaitable[ExecutionResult]]


@dataclass(slots=True)
class _Running:
    """One process's loop: a forked child inherits the object, but not the thread."""

    loop: asyncio.AbstractEventLoop
    places: asyncio.Semaphore
    thread: threading.Thread
    calls: set[asyncio.Task[Any]] = field(default_factory=set)


class PrivateLoop:
    """Runs calls on a loop in a daemon thread, at most `max_concurrency` at once; started by the first call.

    One loop means one pool of connections, one count of places and no lock in the backend, however many loops call;
    and a backend that blocks its loop for a moment, as starting a process does, blocks nobody else's.

    Args:
        owner: The executor's name, for the thread and for errors.
        max_concurrency: Calls at once; more wait for a place.
    """

    def __init__(self, owner: str, max_concurrency: int) -> None:
        self._owner = owner
        self._max_concurrency = max_concurrency
        self._by_process: dict[int, _Running] = {}
        self._lock = threading.Lock()
        self._closed = False

    async def run(self, attempt: Attempt) -> ExecutionResult:
        """Run a call when a place is free; cancelling this cancels the call, wherever it is.

        Returns:
            The call's result, with the wait for the place added to its `queued_s`.

        Raises:
            SandboxError: The loop has been closed.
        """
        running = self._running()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_placed(attempt, running), running.loop))

    async def aclose(self, release: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Refuse new calls, wait for those that run, await `release()` on the loop, and end the thread.

        Nothing happens where no call was made, or at a second close.
        """
        with self._lock:
            self._closed = True
            running = self._by_process.pop(os.getpid(), None)
        if running is None:
            return
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_drained(running, release), running.loop))
        running.loop.call_soon_threadsafe(running.loop.stop)
        await asyncio.to_thread(running.thread.join)

    def _running(self) -> _Running:
        with self._lock:
            if self._closed:
                raise SandboxError(f"{self._owner}.run was called after aclose(); make a new executor")
            pid = os.getpid()
            if pid not in self._by_process:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_serve, args=(loop,), name=self._owner, daemon=True)
                self._by_process[pid] = _Running(loop, asyncio.Semaphore(self._max_concurrency), thread)
                thread.start()
            return self._by_process[pid]


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _placed(attempt: Attempt, running: _Running) -> ExecutionResult:
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - a coroutine that runs is in a task
    running.calls.add(task)
    called_at = time.monotonic()
    try:
        async with running.places:
            waited_s = time.monotonic() - called_at
            result = await attempt()
        return replace(result, queued_s=waited_s + result.queued_s)
    finally:
        running.calls.discard(task)


async def _drained(running: _Running, release: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*running.calls, return_exceptions=True)
    await release()
