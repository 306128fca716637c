"""What an episode is about, for the user's own code, and calls of that code.

Failures of the user's code name its file and line, and the sample.
"""

import asyncio
import functools
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from strands_rollout.aio import EpisodeDeadline, exits_as_errors, in_own_thread
from strands_rollout.errors import ConfigError, EngineAbortedError, ToolError


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the data set on its way through an episode.

    Attributes:
        messages: Strands messages that the agent starts with; the last is the user's.
        system_prompt: The row's own, else the configured one; None for none.
        label: The row's.
        metadata: The row's, without what this package writes there.
        index: The sample's, where it has one.
        evaluation: Whether the episode is one of an evaluation.
        tools: The configured tools, and those of the environment, as `strands.Agent(tools=...)` takes them.
        resources: What is open while the episode runs, by the names in the settings.
        environment: What the settings' `environment` made; None without one.
    """

    messages: Sequence[Mapping[str, Any]]
    system_prompt: str | None = None
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    index: int | None = None
    evaluation: bool = False
    tools: Sequence[Any] = ()
    resources: Mapping[str, Any] = field(default_factory=dict)
    environment: Any = None

    @property
    def text(self) -> str:
        """The text of the user's last message."""
        return "\n".join(block["text"] for block in self.messages[-1]["content"] if "text" in block)


@dataclass(slots=True)
class _Episode:
    """What the context of an episode holds; contexts outlive it in timers and idle connections."""

    task: Task | None


_CURRENT: Final[ContextVar[_Episode | None]] = ContextVar("strands_rollout_task", default=None)


def current_task() -> Task:
    """The task of the episode that runs here, for tools and hooks: `current_task().resources["database"]`.

    Raises:
        ConfigError: No episode of `generate` runs here.
    """
    episode = _CURRENT.get()
    task = None if episode is None else episode.task
    if task is None:
        raise ConfigError(
            "current_task() was called outside of an episode; expected a call from a tool, a hook or an agent factory "
            "of an episode that strands_rollout.generate runs"
        )
    return task


@contextmanager
def running(task: Task) -> Iterator[None]:
    """Make this the task of whatever the block calls, awaits or starts."""
    episode = _Episode(task)
    token = _CURRENT.set(episode)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        episode.task = None


def failure_words(what: str, error: BaseException, task: Task) -> str:
    """What failed with what, where in the user's files, and for which sample; `what` as the settings name it."""
    if isinstance(error, ToolError) and error.__cause__ is not None:  # what sys.exit() was made into
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    place = f" ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})" if own else ""
    return f"{what} raised {type(error).__name__}: {error}{place}, for the sample of index {task.index}"


async def result_of(
    call: Callable[..., Any],
    *given: object,
    in_thread: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None,
) -> Any:  # noqa: ANN401 - the user's
    """What the user's function gives; a coroutine function's on the loop, any other's from a thread, as it may block.

    Args:
        call: The function.
        given: Its arguments.
        in_thread: Runs one that is no coroutine function; by default in a thread of its own: what never ends must not
            take a place from others, as in the loop's pool.

    Raises:
        ToolError: The function raised SystemExit, or another exception that would end the event loop.
        Exception: Whatever else the function raises.
    """
    with exits_as_errors("it"):
        if asyncio.iscoroutinefunction(call):
            return await call(*given)
        bound = functools.partial(call, *given)
        result = await (in_thread(bound) if in_thread else in_own_thread(bound, has_last_moment=False)())
        return await result if asyncio.iscoroutine(result) else result


async def in_time(
    call: Callable[..., Any],
    *given: object,
    what: str,
    timeout_s: float | None,
    should_abort: Callable[[], bool],
) -> Any:  # noqa: ANN401 - the user's
    """What the user's function, named `what` in messages, gives, unless it takes too long or the rollout is aborted.

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


def _is_users(filename: str) -> bool:
    """Whether a file is in no library, and not in this package but its examples."""
    library = "site-packages" in filename or filename.startswith((_STDLIB, "<frozen"))
    return not library and (not filename.startswith(_PACKAGE) or filename.startswith(f"{_PACKAGE}/examples/"))


_PACKAGE: Final = str(Path(__file__).parents[1])
_STDLIB: Final = sysconfig.get_paths()["stdlib"]
