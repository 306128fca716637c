"""SystemExit and its like, raised by a user's code: ordinary errors, so that no event loop ends by them."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from strands_rollout.errors import ToolError


@contextmanager
def exits_as_errors(what: str, error: type[Exception] = ToolError) -> Iterator[None]:
    """Turn exceptions of a user's code that `except Exception` does not catch into ordinary errors.

    SystemExit and KeyboardInterrupt end the event loop when they leave a task, and with it every other episode:
    `sys.exit()` or argparse in an async tool would end a training run. A CancelledError is turned too, unless the
    running task was cancelled, and a GeneratorExit, unless the coroutine around the block is being closed. `what` names
    the code in the message.

    A child that the code has forked ends where it leaves the block: it holds a copy of this thread alone, in which it
    would play on beside the trainer, or wait for ever.
    """
    task, pid = _running_task(), os.getpid()
    try:
        yield
    except BaseException as e:
        if os.getpid() != pid:
            os._exit(1)
        if isinstance(e, Exception):
            raise
        if isinstance(e, asyncio.CancelledError):
            if task is not None and task.cancelling():
                raise
            raise error(f"{what} was cancelled by its own code") from e
        if isinstance(e, GeneratorExit) and _running_task() is not task:
            raise
        raise error(f"{what} raised {e!r}") from e
    if os.getpid() != pid:
        os._exit(0)


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None
