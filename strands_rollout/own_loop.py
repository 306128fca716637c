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
from strands_rollout.exits import exits_as_errors
from strands_rollout.own_thread import idle_thread

_STEP_CLEANUP_S: Final = 0.5
P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(slots=True)
class _Step:
    call: Callable[[], Awaitable[Any]]
    context: contextvars.Context
    done: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)
    is_begun: bool = False
    is_cancelled: bool = False


class OwnLoop:
    """An event loop in a thread of its own, where code that blocks holds up nobody else; an async context manager.

    The functions that it is given run in one task, one after the other: some contexts must be left by the task that
    entered them. Leaving the block does not wait for a function that has not ended.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._steps: asyncio.Queue[_Step | None] = asyncio.Queue()
        self._running: _Step | None = None
        self._is_blocked = False  # a step was given up before it began; none has begun since
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        idle_thread().run(self._work, asyncio.get_running_loop(), "own-loop")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._steps.put_nowait, None)

    async def run(self, function: Callable[P, Awaitable[Result]], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Call an async function on this loop, with the caller's context variables; returns its result.

        A call that is cancelled is cancelled there too, and abandoned if it has not ended 0.5 s later.

        Raises:
            ToolError: The function raised SystemExit, or another exception that would end the loop; or an earlier
                function blocks the loop, for so long that another call was given up. This one is made when it ends.
            Exception: Whatever else the function raises.
        """
        if asyncio.get_running_loop() is self._loop:
            return await function(*args, **kwargs)
        step = _Step(functools.partial(function, *args, **kwargs), contextvars.copy_context())
        self._loop.call_soon_threadsafe(self._steps.put_nowait, step)
        result: asyncio.Future[Result] = asyncio.wrap_future(step.done)
        result.add_done_callback(_retrieve)  # nobody else does where this call is cancelled
        if self._is_blocked:
            raise ToolError("the event loop of its program is still blocked")
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._cancel, step)
            await asyncio.wait({result}, timeout=_STEP_CLEANUP_S)
            self._is_blocked = not step.is_begun
            raise

    def _work(self) -> Callable[[], None]:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            self._task = task = runner.get_loop().create_task(self._take_steps())
            while not task.done():
                # a step may stop the loop, and its tasks may raise SystemExit: those that follow need it
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
                with exits_as_errors("it"):
                    step.done.set_result(await step.call())
            except BaseException as e:  # the user's code may raise anything, and the caller is told
                step.done.set_exception(e)
            self._running = None
            while task.cancelling():  # the step was cancelled, not those that follow
                task.uncancel()

    async def _next_step(self) -> _Step | None:
        while True:
            with suppress(asyncio.CancelledError):  # that the last step has left behind
                return await self._steps.get()

    def _cancel(self, step: _Step) -> None:
        step.is_cancelled = True
        if step is self._running and self._task is not None:
            self._task.cancel()


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Let asyncio log nothing of an error that nobody waits for."""
    if not future.cancelled():
        future.exception()
