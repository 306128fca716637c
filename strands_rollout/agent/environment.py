"""The user's environment of an episode: resources that are open while it runs, its steps, and user turns."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from strands_rollout.agent.task import Task, failure_words, in_time, running
from strands_rollout.agent.tool_loading import load_function
from strands_rollout.aio import exits_as_errors
from strands_rollout.errors import EnvironmentFaultError, RolloutError, ToolError
from strands_rollout.samples import usable_number
from strands_rollout.settings import RolloutSettings

logger = logging.getLogger(__name__)

CLOSE_LIMIT_S: Final = 30.0
_DEEPEST_SCORE: Final = (
    20  # of lists and mappings in one another; deep copies of a sample recurse several times as deep
)


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
                f"environment.answer gave {_shown(said)}; expected text, or None to end the episode"
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
        try:
            found = dict(given) if isinstance(given, Mapping) else {"score": given}
            numbers = {name: usable_number(found[name]) for name in ("score", "acc") if name in found}
            if numbers.get("score") is not None and None not in numbers.values():
                return _plain_json({**found, **numbers})
        except Exception as e:  # what the user's mapping and its values raise, too
            raise EnvironmentFaultError(f"environment.score gave {_shown(given)}; expected plain JSON: {e}") from e
        raise EnvironmentFaultError(
            f"environment.score gave {_shown(given)}; expected a finite number, or a mapping with one as `score` and, "
            "if it likes, one as `acc`"
        )

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
            raise EnvironmentFaultError(f"environment.prepare gave {_shown(said)}; expected text, or None")
        return replace(self.task, messages=[*self.task.messages[:-1], {"role": "user", "content": [{"text": said}]}])

    async def _asked(self, name: str, *given: object) -> Any:  # noqa: ANN401 - the user's
        method = getattr(self.task.environment, name)
        what = f"environment.{name}"
        return await _guarded(what, self.task, self.timeout_s, self.should_abort, method, *given)


def _plain_json(score: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of plain values.

    Raises:
        TypeError, ValueError, RecursionError: It holds something else, itself or NaN, or is nested too deeply.
    """
    plain: dict[str, Any] = json.loads(json.dumps(score, allow_nan=False))
    if _depth(plain) > _DEEPEST_SCORE:
        raise ValueError(f"it is nested more than {_DEEPEST_SCORE} levels deep")
    return plain


def _depth(value: object) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(map(_depth, items), default=0)


def _shown(given: object) -> str:
    """The user's value in a message; its type where it can't be shown, as what is nested too deeply."""
    try:
        return f"{given!r:.200}"
    except Exception:  # the user's __repr__ may raise anything
        return f"a {type(given).__name__}"


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
            with exits_as_errors("it"):
                await resource.__aexit__(None, None, None)
    except Exception as e:  # the user's code may raise anything
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
        if not isinstance(e, ToolError):  # what sys.exit() is made into
            raise
        raise EnvironmentFaultError(failure_words(what, e, task)) from e
    except Exception as e:  # the user's code may raise anything
        raise EnvironmentFaultError(failure_words(what, e, task)) from e
