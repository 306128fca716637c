"""The user's environment of an episode: resources that are open while it runs, its steps, and user turns."""

import asyncio
import inspect
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, cast

from strands_rollout.agent.task import Task, failure_words, in_time, running
from strands_rollout.agent.tool_loading import load_function
from strands_rollout.aio import exits_as_errors
from strands_rollout.errors import EnvironmentFaultError, RolloutError, ToolError, foreign_code
from strands_rollout.samples import usable_number
from strands_rollout.settings import RolloutSettings

logger = logging.getLogger(__name__)

CLOSE_LIMIT_S: Final = 30.0
# of lists and mappings in one another; deep copies of a sample recurse several times as deep
_DEEPEST_SCORE: Final = 20


class Environment(Protocol):
    """What the setting `environment` makes for each episode; every method may be left out, and be async or not.

    Made with the `Task`, whose `resources` are open. Where it is an async context manager, it is entered before
    `prepare`, and left whatever happens. Methods that are not async run in threads.

    Attributes:
        tools: Strands tools that act on it, offered to the agent beside the configured ones.
    """

    tools: Any

    def prepare(self) -> str | Awaitable[str | None] | None:
        """Bring it into its first state; text, if any, replaces the row's user message."""

    def answer(self, reply: str) -> str | Awaitable[str | None] | None:
        """What a user says to the policy's answer, for another turn; None ends the episode."""

    def score(self) -> float | Mapping[str, Any] | Awaitable[float | Mapping[str, Any]]:
        """What the episode is worth: a number, or a mapping with `score` and, if it likes, `acc`; plain JSON."""


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """What is open around one episode, and the steps of its environment.

    Attributes:
        task: With resources, environment and the environment's tools.
        timeout_s: Seconds that each step of the environment, and each opening, may take.
        should_abort: Ends them.

    Raises:
        EnvironmentFaultError: By each step: the environment failed, or gave something else than expected.
    """

    task: Task
    timeout_s: float | None
    should_abort: Callable[[], bool]

    @property
    def answers(self) -> bool:
        """Whether the environment may answer the policy."""
        return hasattr(self.task.environment, "answer")

    async def answer(self, reply: str) -> str | None:
        """The next user's message, or None."""
        said = await self._asked("answer", reply.strip())
        if said is not None and (not isinstance(said, str) or not said.strip()):
            raise EnvironmentFaultError(
                f"environment.answer gave {_shown(said)}; expected text, or None to end the episode"
            )
        return said

    async def score(self) -> dict[str, Any] | None:
        """The environment's score with the key `score`; None where it has none."""
        if not hasattr(self.task.environment, "score"):
            return None
        given = await self._asked("score")
        with foreign_code("the user's mapping and its values may raise anything") as outcome:
            found = dict(given) if isinstance(given, Mapping) else {"score": given}
            numbers = {name: usable_number(found[name]) for name in ("score", "acc") if name in found}
            if numbers.get("score") is not None and None not in numbers.values():
                plain: dict[str, Any] = json.loads(json.dumps({**found, **numbers}, allow_nan=False))
                if _depth(plain) > _DEEPEST_SCORE:
                    raise ValueError(f"it is nested more than {_DEEPEST_SCORE} levels deep")
                return plain
        if outcome.error is not None:
            raise EnvironmentFaultError(
                f"environment.score gave {_shown(given)}; expected plain JSON: {outcome.error}"
            ) from outcome.error
        raise EnvironmentFaultError(
            f"environment.score gave {_shown(given)}; expected a finite number, or a mapping with one as `score` and, "
            "if it likes, one as `acc`"
        )

    async def prepare(self) -> Task:
        """Bring the environment into its first state; the task, with its message in the row's place if it gave one."""
        if not hasattr(self.task.environment, "prepare"):
            return self.task
        said = await self._asked("prepare")
        if said is None:
            return self.task
        if not isinstance(said, str) or not said.strip():
            raise EnvironmentFaultError(f"environment.prepare gave {_shown(said)}; expected text, or None")
        return replace(self.task, messages=[*self.task.messages[:-1], {"role": "user", "content": [{"text": said}]}])

    async def _asked(self, name: str, *given: object) -> object:
        return await self.guarded(f"environment.{name}", getattr(self.task.environment, name), *given)

    async def guarded(self, what: str, call: Callable[..., Any], *given: object) -> Any:  # noqa: ANN401 - the user's
        """What the user's function gives, in time."""
        with foreign_code("the user's code may raise anything") as outcome, running(self.task):
            return await in_time(call, *given, what=what, timeout_s=self.timeout_s, should_abort=self.should_abort)
        error = cast("Exception", outcome.error)
        if isinstance(error, RolloutError) and not isinstance(error, ToolError):  # which sys.exit() is made into
            raise error
        raise EnvironmentFaultError(failure_words(what, error, self.task)) from error

    async def entered(self, stack: AsyncExitStack, what: str, resource: AbstractAsyncContextManager[Any]) -> object:
        """Open a resource, which the stack closes."""
        opened = await self.guarded(f"the opening of {what}", resource.__aenter__)
        stack.push_async_callback(_close, what, resource, self.task)
        return opened


def _depth(value: object) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(map(_depth, items), default=0)


def _shown(given: object) -> str:
    """The user's value in a message; its type where it can't be shown, as what is nested too deeply."""
    with foreign_code("the user's __repr__ may raise anything"):
        return f"{given!r:.200}"
    return f"a {type(given).__name__}"


@asynccontextmanager
async def open_context(
    settings: RolloutSettings, task: Task, should_abort: Callable[[], bool]
) -> AsyncIterator[EpisodeContext]:
    """Open the resources, make the environment and prepare it; close all of them when the block ends, however it does.

    Raises:
        ToolError: A path can't be loaded.
        EnvironmentFaultError: A resource or the environment can't be opened or prepared.
        EngineAbortedError: The rollout was aborted meanwhile.
    """
    context = EpisodeContext(task, settings.environment_timeout_s, should_abort)
    async with AsyncExitStack() as stack:
        for name, path in settings.resources.items():
            what = f"resource {name!r} ({path})"
            resource = await context.guarded(what, load_function(path, "a resource"), context.task)
            if not isinstance(resource, AbstractAsyncContextManager):
                raise EnvironmentFaultError(
                    f"{what} is a {type(resource).__name__}; expected an async context manager, such as a function "
                    "with @contextlib.asynccontextmanager makes"
                )
            opened = await context.entered(stack, what, resource)
            context = replace(context, task=replace(context.task, resources={**context.task.resources, name: opened}))
        if settings.environment is not None:
            context = await _with_environment(stack, settings.environment, context)
        prepared = await context.prepare()
        with running(prepared):
            yield replace(context, task=prepared)


async def _with_environment(stack: AsyncExitStack, path: str, context: EpisodeContext) -> EpisodeContext:
    what, task = f"environment {path!r}", context.task
    environment = await context.guarded(what, load_function(path, "an environment"), task)
    if isinstance(environment, AbstractAsyncContextManager):
        environment = await context.entered(stack, what, environment)
    tools = await context.guarded(f"{what}.tools", _tools_of, environment)
    if not any(hasattr(environment, name) for name in ("tools", "prepare", "answer", "score")):
        raise EnvironmentFaultError(
            f"{what} is a {type(environment).__name__} without tools, prepare, answer and score; expected some of them"
        )
    return replace(context, task=replace(task, environment=environment, tools=[*task.tools, *tools]))


def _tools_of(environment: object) -> list[object]:
    tools = getattr(environment, "tools", ())
    if isinstance(tools, str) or not isinstance(tools, Iterable):
        raise EnvironmentFaultError(f"environment.tools is a {type(tools).__name__}; expected a list of Strands tools")
    plain = [tool for tool in tools if inspect.isfunction(tool) or inspect.ismethod(tool)]
    if plain:
        raise EnvironmentFaultError(
            f"environment.tools holds {plain[0].__qualname__}, a plain function; decorate it with @strands.tool"
        )
    return list(tools)


async def _close(what: str, resource: AbstractAsyncContextManager[Any], task: Task) -> None:
    """Leave a resource, in the task that entered it, as some demand; its failure is not the episode's."""
    with foreign_code("the user's code may raise anything") as outcome:
        async with asyncio.timeout(CLOSE_LIMIT_S):
            with exits_as_errors("it"):
                await resource.__aexit__(None, None, None)
    if outcome.error is not None:
        logger.warning("event=not_closed %s", failure_words(f"the closing of {what}", outcome.error, task))
