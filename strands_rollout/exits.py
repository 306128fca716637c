"""SystemExit and its like, raised by a user's code: ordinary errors, so that no event loop ends by them."""

import asyncio
import os
from types import TracebackType
from typing import Any

from strands_rollout.errors import ToolError


class exits_as_errors:  # noqa: N801 - used as a statement: `with exits_as_errors(...):`
    """Turn exceptions of a user's code that `except Exception` does not catch into ordinary errors.

    SystemExit and KeyboardInterrupt end the event loop when they leave a task, and with it every other episode:
    `sys.exit()` or argparse in an async tool would end a training run. A CancelledError is turned too, unless the
    running task was cancelled, and a GeneratorExit, unless the coroutine around the block is being closed.

    A child that the code has forked ends where it leaves the block: it holds a copy of this thread alone, in which it
    would play on beside the trainer, or wait for ever.

    Args:
        what: Names the code in the message.
        error: The ordinary error.
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


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None
