"""Run each call of a sync function in a thread of its own, so that it blocks neither an event loop nor other calls."""

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
from strands_rollout.exits import exits_as_errors, function_name

_GRACE_PERIOD_S: Final = 0.03
_MAX_IDLE_THREADS: Final = 64
P = ParamSpec("P")
Result = TypeVar("Result")


def in_own_thread(
    function: Callable[P, Result], *, has_grace_period: bool = True, name: str | None = None
) -> Callable[P, Coroutine[Any, Any, Result]]:
    """Return an async version of a sync function; each call has a thread of its own and the caller's context variables.

    A cancelled call is abandoned, and its thread continues until the function returns. With `has_grace_period`, a call
    that ends within 0.03 s of the cancellation still returns its result, or raises its exception. SystemExit,
    StopIteration and the like become a ToolError, whose message names the function by `name`, or else by its own name.
    """
    name = name or function_name(function)

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        context = contextvars.copy_context()

        def run() -> Callable[[], None]:
            try:
                with exits_as_errors(name):
                    return functools.partial(_set_outcome, future, result=context.run(function, *args, **kwargs))
            except StopIteration as e:  # a future can't hold it
                error = ToolError(f"{name} raised {e!r}")
                error.__cause__ = e
                return functools.partial(_set_outcome, future, error=error)
            except Exception as e:  # the function may raise anything; the caller gets it
                return functools.partial(_set_outcome, future, error=e)

        take_thread().run(run, loop, f"tool:{getattr(function, '__name__', '')}")
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # keep the result of a function that is about to end; otherwise, a resumed episode would run it again
            if not has_grace_period or not (await asyncio.wait({future}, timeout=_GRACE_PERIOD_S))[0]:
                future.cancel()
                raise
            return future.result()

    return call


class _ReusableThread:
    """A thread that runs jobs, and ends after a job if enough other threads are idle.

    Idle threads are reused, since starting a thread blocks the event loop.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="tool", daemon=True).start()

    def run(self, function: Callable[[], Callable[[], None]], loop: asyncio.AbstractEventLoop, name: str) -> None:
        """Call `function` in the thread, which gets the name `name`; then call the returned function in the loop."""

        def job() -> bool:
            threading.current_thread().name = name
            asyncio.set_event_loop(None)  # the last function may have left a closed loop
            outcome = function()
            is_reused = len(_IDLE) < _MAX_IDLE_THREADS
            if is_reused:  # add the thread before the loop gets the outcome: the next call can then use it
                _IDLE.append(self)
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(outcome)
            return is_reused

        self._jobs.put(job)

    def _work(self) -> None:
        while self._jobs.get()():
            pass


def take_thread() -> _ReusableThread:
    """Return an idle thread, or a new one."""
    try:
        return _IDLE.pop()
    except IndexError:
        return _ReusableThread()


_IDLE: Final[deque[_ReusableThread]] = deque()
# a forked child doesn't have its parent's threads
os.register_at_fork(after_in_child=_IDLE.clear)


def _set_outcome(future: asyncio.Future[Any], *, result: object = None, error: BaseException | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
