"""An event loop in a thread of its own, for async code that may block."""

import asyncio
import concurrent.futures
import contextvars
import functools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, ParamSpec, Self, TypeVar, cast

from strands_rollout.errors import ToolError
from strands_rollout.exits import exits_as_errors, function_name
from strands_rollout.own_thread import take_thread

_STEP_CLEANUP_TIMEOUT_S: Final = 0.5
P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(slots=True)
class _Step:
    """A call that waits for the loop's task, or runs in it."""

    call: Callable[[], Awaitable[Any]]
    context: contextvars.Context
    done: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)
    is_begun: bool = False
    is_cancelled: bool = False


class OwnLoop:
    """Async context manager of an event loop in a thread of its own, where blocking code delays no other loop.

    Functions run in one task, one after the other, because some contexts must be exited by the task that entered them.
    Leaving the context manager doesn't wait for a running function.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._steps: asyncio.Queue[_Step | None] = asyncio.Queue()
        self._running: _Step | None = None
        self._is_blocked = False  # True if a step was abandoned before it began, and no step has begun since
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        take_thread().run(self._work, asyncio.get_running_loop(), "own-loop")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._steps.put_nowait, None)

    async def run(self, function: Callable[P, Awaitable[Result]], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Call an async function on this loop, with the caller's context variables, and return its result.

        Cancelling the caller cancels the function; if it hasn't ended 0.5 s later, it is abandoned. If the caller runs
        on this loop already, the function runs immediately, in the caller's task.

        Raises:
            ToolError: The function raised SystemExit or another exception that would end the loop. Or an earlier
                function blocks the loop: a previous caller was cancelled before its function began, and no function has
                begun since. `function` is then still called once the loop is free.
            Exception: Any other exception of the function.
        """
        if asyncio.get_running_loop() is self._loop:
            return await function(*args, **kwargs)
        step = _Step(functools.partial(function, *args, **kwargs), contextvars.copy_context())
        self._loop.call_soon_threadsafe(self._steps.put_nowait, step)
        result: asyncio.Future[Result] = asyncio.wrap_future(step.done)
        result.add_done_callback(_mark_retrieved)  # nobody awaits it if this call is cancelled
        if self._is_blocked:
            raise ToolError(
                "an earlier call still blocks the agent program's event loop; use await or a thread for slow calls"
            )
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._cancel, step)
            await asyncio.wait({result}, timeout=_STEP_CLEANUP_TIMEOUT_S)
            self._is_blocked = not step.is_begun
            raise

    def _work(self) -> Callable[[], None]:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            self._task = task = runner.get_loop().create_task(self._take_steps())
            while not task.done():
                # a step may stop the loop, or start tasks that raise SystemExit; later steps need the loop
                with suppress(RuntimeError, SystemExit, KeyboardInterrupt):
                    self._loop.run_until_complete(task)
        return lambda: None

    async def _take_steps(self) -> None:
        task = cast("asyncio.Task[None]", self._task)
        while (step := await self._next_step()) is not None:
            self._is_blocked, step.is_begun = False, True
            if step.is_cancelled:
                continue
            for variable in step.context:
                variable.set(step.context[variable])
            self._running = step
            try:
                with exits_as_errors(function_name(step.call)):
                    step.done.set_result(await step.call())
            except BaseException as e:  # the user's code may raise anything; the caller gets it
                step.done.set_exception(e)
            self._running = None
            while task.cancelling():  # only this step was cancelled, not the next steps
                task.uncancel()

    async def _next_step(self) -> _Step | None:
        while True:
            with suppress(asyncio.CancelledError):  # a cancellation that arrived after its step had ended
                return await self._steps.get()

    def _cancel(self, step: _Step) -> None:
        step.is_cancelled = True
        if step is self._running and self._task is not None:
            self._task.cancel()


def _mark_retrieved(future: asyncio.Future[Any]) -> None:
    """Mark an exception as retrieved, so that asyncio doesn't log it."""
    if not future.cancelled():
        future.exception()
