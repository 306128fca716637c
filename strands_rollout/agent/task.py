"""Calls of the user's own code in an episode, whose failures name the code's file and line, and the sample.

Knows Python's frames and tasks; nothing of what the code is for.
"""

from __future__ import annotations

import asyncio
import functools
import sysconfig
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from strands_rollout.episode_deadline import EpisodeDeadline
from strands_rollout.errors import EngineAbortedError
from strands_rollout.task import Task
from strands_rollout.tool_thread import in_own_thread


def failure_words(what: str, error: BaseException, task: Task) -> str:
    """What failed with what, where in the user's files, and for which sample.

    Args:
        what: The code, as the settings name it.
        error: As it was raised.
        task: The episode's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    place = f" ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})" if own else ""
    return f"{what} raised {type(error).__name__}: {error}{place}, for the sample of index {task.index}"


async def _in_thread(call: Callable[[], Any]) -> Any:  # noqa: ANN401 - the user's
    """In a thread of its own: what never ends must not take a place from others, as in the loop's pool."""
    return await in_own_thread(call, has_last_moment=False)()


async def result_of(
    call: Callable[..., Any],
    *given: Any,  # noqa: ANN401 - the user's
    in_thread: Callable[[Callable[[], Any]], Awaitable[Any]] = _in_thread,
) -> Any:  # noqa: ANN401 - the user's
    """What a function gives; a coroutine function's on the loop, any other's from a thread, since it may block.

    Args:
        call: Of the user's.
        given: Its arguments.
        in_thread: Runs one that is no coroutine function.
    """
    if asyncio.iscoroutinefunction(call):
        return await call(*given)
    result = await in_thread(functools.partial(call, *given))
    return await result if asyncio.iscoroutine(result) else result


async def in_time(
    call: Callable[..., Any],
    *given: Any,  # noqa: ANN401 - the user's
    what: str,
    timeout_s: float | None,
    should_abort: Callable[[], bool],
) -> Any:  # noqa: ANN401 - the user's
    """What a function gives, unless it takes too long or the rollout is aborted meanwhile.

    Args:
        call: Of the user's.
        given: Its arguments.
        what: Names it in messages.
        timeout_s: Seconds that it may take; None for no limit.
        should_abort: Asked every 0.05 s.

    Raises:
        TimeoutError: It took longer.
        EngineAbortedError: The rollout was aborted.
        Exception: Whatever the function raises.
    """
    deadline = EpisodeDeadline(timeout_s, should_abort)
    try:
        async with deadline:
            return await result_of(call, *given)
    except TimeoutError as e:
        if deadline.was_aborted:
            raise EngineAbortedError(f"the rollout was aborted during {what}") from e
        if deadline.expired():
            raise TimeoutError(f"it took more than {timeout_s:g} s") from e
        raise
    except asyncio.CancelledError as e:
        if was_cancelled():
            raise
        raise RuntimeError("it was cancelled by its own code") from e


def was_cancelled() -> bool:
    """Whether somebody has cancelled the running task, where a CancelledError may also come from within."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _is_users(filename: str) -> bool:
    """Whether a file is in no library, and not in this package but its examples."""
    library = "site-packages" in filename or filename.startswith((_STDLIB, "<frozen"))
    return not library and (not filename.startswith(_PACKAGE) or filename.startswith(f"{_PACKAGE}/examples/"))


_PACKAGE: Final = str(Path(__file__).parent)
_STDLIB: Final = sysconfig.get_paths()["stdlib"]
