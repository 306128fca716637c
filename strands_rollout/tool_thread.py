"""Sync functions as async ones, each call in a thread that runs nothing else meanwhile.

Knows threads and the event loop; nothing of tools. Threads are daemons, so that a function that hangs does not keep the
interpreter alive, and are used again, since starting one costs more than most calls: what a function leaves in
thread-local variables is there for another, as in any pool of threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from strands_rollout.errors import ToolError

_LAST_MOMENT_S: Final = 0.03
_MOST_IDLE: Final = 64


def in_own_thread(function: Callable[..., Any], *, has_last_moment: bool = True) -> Callable[..., Awaitable[Any]]:
    """An async version of a sync function: each call in a thread of its own, with the caller's context variables.

    A call that is cancelled is abandoned, unless it ends within 0.03 s: its thread goes on until the function ends.

    Args:
        function: May block.
        has_last_moment: Whether a call may so give a result in place of its cancellation.
    """

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def run() -> Callable[[], None]:
            try:
                return functools.partial(_settle, future, result=context.run(function, *args, **kwargs))
            except Exception as e:  # whatever the tool raises belongs to the caller
                # a future can't hold StopIteration
                error = ToolError(f"the tool raised {e!r}") if isinstance(e, StopIteration) else e
                return functools.partial(_settle, future, error=error)
            except BaseException as e:  # sys.exit() in a tool must end the call, not the trainer
                error = ToolError(f"the tool raised {e!r}").with_traceback(e.__traceback__)
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
    """A thread that does one job after the other, and ends where enough others wait for one."""

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
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
                loop.call_soon_threadsafe(outcome)
            return stays

        self._jobs.put(job)

    def _work(self) -> None:
        while self._jobs.get()():
            pass


_IDLE: Final[deque[_ToolThread]] = deque()
# a forked child has none of its parent's threads
os.register_at_fork(after_in_child=_IDLE.clear)


def _idle_thread() -> _ToolThread:
    try:
        return _IDLE.pop()
    except IndexError:
        return _ToolThread()


def _settle(future: asyncio.Future[Any], *, result: Any = None, error: BaseException | None = None) -> None:  # noqa: ANN401
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
