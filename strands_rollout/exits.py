"""Turn SystemExit and similar exceptions of a user's code into ordinary errors, which don't end an event loop."""

import asyncio
import functools
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

from strands_rollout.errors import ToolError


class exits_as_errors:  # noqa: N801 - used as a statement: `with exits_as_errors(...):`
    """Turn exceptions of a user's code into ordinary errors if `except Exception` doesn't catch them.

    If SystemExit or KeyboardInterrupt leaves a task, it ends the event loop and all its episodes: `sys.exit()` or
    argparse in an async tool would end a training run. A CancelledError is turned into an ordinary error too, unless
    the running task was cancelled. A GeneratorExit is turned into an ordinary error only in the task that entered the
    block. Elsewhere, it leaves the block unchanged, for example if another task closes the coroutine around the block.

    If the code forks, the child process exits at the end of the block. The child has only a copy of this thread, and
    would otherwise play the episode a second time, or hang.

    Args:
        what: Name of the code in the message.
        error: Class of the ordinary error.
    """

    __slots__ = ("_error", "_pid", "_task", "_what")

    def __init__(self, what: str, error: type[Exception] = ToolError) -> None:
        self._what = what
        self._error = error

    def __enter__(self) -> None:
        self._task, self._pid = _running_task(), os.getpid()

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, at: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            os._exit(0 if raised is None else 1)
        if raised is None or isinstance(raised, Exception):
            return
        if isinstance(raised, asyncio.CancelledError):
            if self._task is not None and self._task.cancelling():
                return
            raise self._error(f"{self._what} was cancelled by its own code") from raised
        if isinstance(raised, GeneratorExit) and _running_task() is not self._task:
            return
        raise self._error(f"{self._what} raised {raised!r}") from raised


def original_exception(error: BaseException) -> BaseException:
    """Return the exception of the user's code: the error itself, or the cause of a ToolError from `exits_as_errors`."""
    cause = error.__cause__
    is_exit = isinstance(error, ToolError) and cause is not None and not isinstance(cause, Exception)
    return cause if is_exit and cause is not None else error


def function_name(function: Callable[..., Any]) -> str:
    """Return a callable's qualified name, for messages.

    A `functools.partial` has the name of the function that it calls. An instance with `__call__` has its class's name.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # this thread runs no loop
        return None
