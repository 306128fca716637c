"""Sync functions in threads of their own, so that neither an event loop nor another call waits for them."""

import asyncio
import contextvars
import functools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, ParamSpec, TypeVar

from strands_rollout.errors import ToolError
from strands_rollout.exits import exits_as_errors

_LAST_MOMENT_S: Final = 0.03
_MOST_IDLE: Final = 64
P = ParamSpec("P")
Result = TypeVar("Result")


def in_own_thread(
    function: Callable[P, Result], *, has_grace_period: bool = True
) -> Callable[P, Coroutine[Any, Any, Result]]:
    """An async version of a sync function: each call in a thread of its own, with the caller's context variables.

    A call that is cancelled is abandoned: its thread goes on until the function ends. With `has_grace_period`, a call
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

        idle_thread().run(run, loop, f"tool:{getattr(function, '__name__', '')}")
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # a function that is just ending has ended: it would else be run again
            if not has_grace_period or not (await asyncio.wait({future}, timeout=_LAST_MOMENT_S))[0]:
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


def idle_thread() -> _ToolThread:
    """Return a thread that waits for a job, a new one where none does."""
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
