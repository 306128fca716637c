"""What an episode of the user's stands in: resources that are open while it runs, and the environment that it acts on.

Knows the settings' dotted paths and async context managers; nothing of agents or samples.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from strands_rollout.config import RolloutSettings
from strands_rollout.errors import EnvironmentFaultError, RolloutError, ToolError
from strands_rollout.task import Task, running
from strands_rollout.tool_loading import load_function
from strands_rollout.user_code import failure_words, in_time, was_cancelled

logger = logging.getLogger(__name__)

CLOSE_LIMIT_S: Final = 30.0


class Environment(Protocol):
    """What the setting `environment` makes for each episode; every method may be left out, and be async or not.

    Made with the `Task`, whose `resources` are open. Where it is an async context manager, it is entered before
    `prepare`, and left whatever happens. Methods that are not async run in threads.

    Attributes:
        tools: Strands tools that act on it, offered to the agent beside the configured ones.
    """

    tools: Any

    def prepare(self) -> str | Awaitable[str | None] | None:
        """Bring it into the state that the task begins with; text, if any, is the user's message in the row's place."""

    def answer(self, reply: str) -> str | Awaitable[str | None] | None:
        """What a user says to the policy's answer, for another turn; None ends the episode."""

    def score(self) -> float | Mapping[str, Any] | Awaitable[float | Mapping[str, Any]]:
        """What the episode is worth: a number, or a mapping with `score` and, if it likes, `acc`; plain JSON."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is open around one episode.

    Attributes:
        task: With resources, environment and the environment's tools.
        timeout_s: Seconds that each step of the environment may take.
        should_abort: Ends them.
    """

    task: Task
    timeout_s: float | None
    should_abort: Callable[[], bool]

    @property
    def answers(self) -> bool:
        """Whether the environment may answer the policy."""
        return hasattr(self.task.environment, "answer")

    async def answer(self, reply: str) -> str | None:
        """The next user's message, or None.

        Raises:
            EnvironmentFaultError: The environment failed, or gave something else.
        """
        said = await self._asked("answer", reply.strip())
        if said is not None and (not isinstance(said, str) or not said.strip()):
            raise EnvironmentFaultError(
                f"environment.answer gave {said!r:.200}; expected text, or None to end the episode"
            )
        return said

    async def score(self) -> dict[str, Any] | None:
        """The environment's score with the key `score`; None where it has none.

        Raises:
            EnvironmentFaultError: The environment failed, or gave something else.
        """
        if not hasattr(self.task.environment, "score"):
            return None
        given = await self._asked("score")
        found = dict(given) if isinstance(given, Mapping) else {"score": given}
        numbers = [found[name] for name in ("score", "acc") if name in found]
        if "score" not in found or not all(
            isinstance(n, int | float) and abs(n) <= sys.float_info.max for n in numbers
        ):
            raise EnvironmentFaultError(
                f"environment.score gave {given!r:.200}; expected a finite number, or a mapping with one as `score`"
            )
        found |= {name: float(found[name]) for name in ("score", "acc") if name in found}
        try:
            return dict(json.loads(json.dumps(found, allow_nan=False)))
        except (TypeError, ValueError) as e:
            raise EnvironmentFaultError(f"environment.score gave {given!r:.200}; expected plain JSON: {e}") from e

    async def prepare(self) -> Task:
        """Bring the environment into its first state; the task, with the environment's words in it where it has some.

        Raises:
            EnvironmentFaultError: The environment failed, or gave something else.
        """
        if not hasattr(self.task.environment, "prepare"):
            return self.task
        said = await self._asked("prepare")
        if said is None:
            return self.task
        if not isinstance(said, str) or not said.strip():
            raise EnvironmentFaultError(f"environment.prepare gave {said!r:.200}; expected text, or None")
        return replace(self.task, messages=[*self.task.messages[:-1], {"role": "user", "content": [{"text": said}]}])

    async def _asked(self, name: str, *given: object) -> Any:  # noqa: ANN401 - the user's
        method = getattr(self.task.environment, name)
        what = f"environment.{name}"
        return await _guarded(what, self.task, self.timeout_s, self.should_abort, method, *given)


@asynccontextmanager
async def open_surroundings(
    settings: RolloutSettings, task: Task, should_abort: Callable[[], bool]
) -> AsyncIterator[Surroundings]:
    """Open the resources, make the environment and prepare it; close all of them when the block ends, however it does.

    Args:
        settings: Of the episode.
        task: With its configured tools.
        should_abort: Ends the opening.

    Raises:
        ToolError: A path can't be loaded.
        EnvironmentFaultError: A resource or the environment can't be opened or prepared.
        EngineAbortedError: The rollout was aborted meanwhile.
    """
    timeout_s = settings.environment_timeout_s
    async with AsyncExitStack() as stack:
        for name, path in settings.resources.items():
            what = f"resource {name!r} ({path})"
            make = load_function(path, "a resource")
            resource = await _guarded(what, task, timeout_s, should_abort, make, task)
            if not isinstance(resource, AbstractAsyncContextManager):
                raise EnvironmentFaultError(
                    f"{what} is a {type(resource).__name__}; expected an async context manager, such as a function "
                    "with @contextlib.asynccontextmanager makes"
                )
            opened = await _entered(stack, what, resource, task, timeout_s, should_abort)
            task = replace(task, resources={**task.resources, name: opened})
        if settings.environment is not None:
            task = await _with_environment(stack, settings.environment, task, timeout_s, should_abort)
        around = Surroundings(task, timeout_s, should_abort)
        prepared = await around.prepare()
        with running(prepared):
            yield replace(around, task=prepared)


async def _with_environment(
    stack: AsyncExitStack, path: str, task: Task, timeout_s: float | None, should_abort: Callable[[], bool]
) -> Task:
    what = f"environment {path!r}"
    make = load_function(path, "an environment")
    environment = await _guarded(what, task, timeout_s, should_abort, make, task)
    if isinstance(environment, AbstractAsyncContextManager):
        environment = await _entered(stack, what, environment, task, timeout_s, should_abort)
    tools = await _guarded(f"{what}.tools", task, timeout_s, should_abort, _tools_of, environment)
    if not any(hasattr(environment, name) for name in ("tools", "prepare", "answer", "score")):
        raise EnvironmentFaultError(
            f"{what} is a {type(environment).__name__} without tools, prepare, answer and score; expected some of them"
        )
    return replace(task, environment=environment, tools=[*task.tools, *tools])


def _tools_of(environment: Any) -> list[Any]:  # noqa: ANN401 - the user's
    tools = getattr(environment, "tools", ())
    if isinstance(tools, str) or not isinstance(tools, Iterable):
        raise EnvironmentFaultError(f"environment.tools is a {type(tools).__name__}; expected a list of Strands tools")
    plain = [tool for tool in tools if inspect.isfunction(tool) or inspect.ismethod(tool)]
    if plain:
        raise EnvironmentFaultError(
            f"environment.tools holds {plain[0].__qualname__}, a plain function; decorate it with @strands.tool"
        )
    return list(tools)


async def _entered(
    stack: AsyncExitStack,
    what: str,
    resource: AbstractAsyncContextManager[Any],
    task: Task,
    timeout_s: float | None,
    should_abort: Callable[[], bool],
) -> Any:  # noqa: ANN401 - the user's
    opened = await _guarded(f"the opening of {what}", task, timeout_s, should_abort, resource.__aenter__)
    stack.push_async_callback(_closed, what, resource, task)
    return opened


async def _closed(what: str, resource: AbstractAsyncContextManager[Any], task: Task) -> None:
    """Leave a resource, in the task that entered it, as some demand; its failure is not the episode's."""
    try:
        async with asyncio.timeout(CLOSE_LIMIT_S):
            await resource.__aexit__(None, None, None)
    except (Exception, asyncio.CancelledError) as e:  # the user's code may raise anything
        if isinstance(e, asyncio.CancelledError) and was_cancelled():
            raise
        logger.warning("event=not_closed %s", failure_words(f"the closing of {what}", e, task))


async def _guarded(
    what: str,
    task: Task,
    timeout_s: float | None,
    should_abort: Callable[[], bool],
    call: Callable[..., Any],
    *given: object,
) -> Any:  # noqa: ANN401 - the user's
    try:
        with running(task):
            return await in_time(call, *given, what=what, timeout_s=timeout_s, should_abort=should_abort)
    except RolloutError as e:
        if not isinstance(e, ToolError):  # what sys.exit() in a thread is made into
            raise
        raise EnvironmentFaultError(failure_words(what, e, task)) from e
    except Exception as e:  # the user's code may raise anything
        raise EnvironmentFaultError(failure_words(what, e, task)) from e
