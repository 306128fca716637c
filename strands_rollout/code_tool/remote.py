"""An event loop of an executor's own: calls come from any loop and thread, and wait here for one of its places.

Knows asyncio and threads; what a call does is the backend's. Must not know any backend.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Final

from strands_rollout.errors import SandboxError
from strands_rollout.sandbox.executor import ExecutionResult

Attempt = Callable[[], Awaitable[ExecutionResult]]
Release = Callable[[], Coroutine[Any, Any, None]]

_EXIT_JOIN_S: Final = 2.0  # a loop that does not stop must not keep the process from ending


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
    and a backend that blocks its loop for a moment, as starting a process does, blocks nobody else's. What was not
    closed is closed when the interpreter ends.

    Args:
        owner: The executor's name, for the thread and for errors.
        max_concurrency: Calls at once; more wait for a place.
        release: Awaited on the loop before it is closed: for connections.
    """

    def __init__(self, owner: str, max_concurrency: int, release: Release | None = None) -> None:
        self._owner = owner
        self._max_concurrency = max_concurrency
        self._release = release
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

    async def aclose(self) -> None:
        """Refuse new calls, wait for those that run, release, and end the thread. Safe to call twice."""
        with self._lock:
            self._closed = True
            running = self._by_process.pop(os.getpid(), None)
        if running is None:
            return
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_drained(running), running.loop))
        running.loop.call_soon_threadsafe(running.loop.stop)
        await asyncio.to_thread(running.thread.join)

    def _running(self) -> _Running:
        with self._lock:
            if self._closed:
                raise SandboxError(f"{self._owner}.run was called after aclose(); make a new executor")
            pid = os.getpid()
            if pid not in self._by_process:
                self._by_process[pid] = self._started(pid)
            return self._by_process[pid]

    def _started(self, pid: int) -> _Running:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_serve, args=(loop, self._release), name=self._owner, daemon=True)
        thread.start()
        weakref.finalize(self, _stop, loop, thread, pid)
        return _Running(loop, asyncio.Semaphore(self._max_concurrency), thread)


def _serve(loop: asyncio.AbstractEventLoop, release: Release | None) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_wind_up(release))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _wind_up(release: Release | None) -> None:
    """Cancel what still runs, as at the interpreter's end, and let go of what the backend holds."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    if release is not None:
        await release()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    if pid == os.getpid() and not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_EXIT_JOIN_S)


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


async def _drained(running: _Running) -> None:
    await asyncio.gather(*running.calls, return_exceptions=True)
