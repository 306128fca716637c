"""The user's own code around an episode: the task that it is told, its resources, its steps and user turns.

Failures of the user's code name its file and line, and the sample.
"""

import asyncio
import functools
import inspect
import json
import logging
import reprlib
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, Self

from strands_rollout import errors
from strands_rollout.agent.tool_loading import load_function, refuse_no_model
from strands_rollout.code_origin import is_users_file
from strands_rollout.control import Control
from strands_rollout.exits import exits_as_errors
from strands_rollout.own_loop import OwnLoop
from strands_rollout.own_thread import in_own_thread
from strands_rollout.samples import usable_number
from strands_rollout.settings import RolloutSettings


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
class _TaskScope:
    """The task of an episode, as its contexts hold it, which outlive it in timers and idle connections."""

    task: Task | None


_CURRENT: Final[ContextVar[_TaskScope | None]] = ContextVar("strands_rollout_task", default=None)


def current_task() -> Task:
    """The task of the episode that runs here, for tools and hooks: `current_task().resources["database"]`.

    Raises:
        ConfigError: No episode of `generate` runs here.
    """
    scope = _CURRENT.get()
    task = None if scope is None else scope.task
    if task is None:
        raise errors.ConfigError(
            "current_task() was called outside of an episode; expected a call from a tool, a hook or an agent factory "
            "of an episode that strands_rollout.generate runs"
        )
    return task


@contextmanager
def running(task: Task) -> Iterator[None]:
    """Make this the task of whatever the block calls, awaits or starts."""
    scope = _TaskScope(task)
    token = _CURRENT.set(scope)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        scope.task = None


def failure_words(what: str, error: BaseException, task: Task) -> str:
    """Say what failed, how, where in the user's files, and for which sample; `what` names it as the settings do."""
    if isinstance(error, errors.ToolError) and error.__cause__ is not None:  # what sys.exit() was made into
        error = error.__cause__
    place = place_in_users_code(error)
    return f"{what} raised {type(error).__name__}: {error}{place}, for the sample of index {task.index}"


def place_in_users_code(error: BaseException) -> str:
    """Return the line of the user's files that raised an error, in brackets; "" if none did."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users_file(frame.filename)]
    return f" ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})" if own else ""


async def result_of(
    call: Callable[..., Any],
    *given: object,
    loop: OwnLoop | None = None,
    in_thread: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None,
) -> Any:  # noqa: ANN401 - the user's
    """Call the user's function and return what it gives.

    Args:
        call: The function. A coroutine function runs on the loop, any other in a thread, as it may block.
        given: Its arguments.
        loop: Where coroutines run; None for the running loop.
        in_thread: Runs a function that is no coroutine function; by default in a thread of its own: one that never ends
            must not take a place from others, as in the loop's pool.

    Raises:
        ToolError: The function raised SystemExit, or another exception that would end the event loop.
        Exception: Whatever else the function raises.
    """
    with exits_as_errors("it"):
        if asyncio.iscoroutinefunction(call):
            return await _awaited(loop, call, *given)
        bound = functools.partial(call, *given)
        result = await (in_thread(bound) if in_thread else in_own_thread(bound, has_last_moment=False)())
        return await _awaited(loop, lambda: result) if asyncio.iscoroutine(result) else result


async def _awaited(loop: OwnLoop | None, call: Callable[..., Awaitable[Any]], *given: object) -> Any:  # noqa: ANN401 - the user's
    return await (call(*given) if loop is None else loop.run(call, *given))


logger = logging.getLogger(__name__)

CLOSE_LIMIT_S: Final = 30.0
# of lists and mappings in one another; deep copies of a sample recurse several times as deep
_DEEPEST_SCORE: Final = 20


class Environment(Protocol):
    """An environment, which the setting `environment` makes for each episode; any method may be left out, or be async.

    Made with the `Task`, whose `resources` are open. Where it is an async context manager, it is entered before
    `prepare`, and left whatever happens. Methods that are not async run in threads.

    Attributes:
        tools: Strands tools that act on it, offered to the agent beside the configured ones.
    """

    tools: Any

    def prepare(self) -> str | Awaitable[str | None] | None:
        """Bring it into its first state; text, if any, replaces the row's user message."""

    def answer(self, reply: str) -> str | Awaitable[str | None] | None:
        """Return what a user says to the policy's answer, for another turn; None ends the episode."""

    def score(self) -> float | Mapping[str, Any] | Awaitable[float | Mapping[str, Any]]:
        """Return what the episode is worth: a number, or a mapping with `score` and, if it likes, `acc`; plain JSON."""

    def state(self) -> Mapping[str, Any] | Awaitable[Mapping[str, Any]]:
        """Return the state after the episode, by name, for evaluators that compare it; plain JSON."""


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """The resources and environment that are open around one episode, and the steps of the latter.

    Attributes:
        task: With resources, environment and the environment's tools.
        timeout_s: Seconds that each step of the environment, and each opening, may take.
        control: That of the episode; an abort ends them.
        loop: Where the user's coroutines run, so that what one has opened is bound to it; None for the running loop.
        question: What the environment asks in place of the row; None for the row's.

    Raises:
        EnvironmentFaultError: By each step: the environment failed, or gave something else than expected.
    """

    task: Task
    timeout_s: float | None
    control: Control
    loop: OwnLoop | None = None
    question: str | None = None

    @property
    def answers(self) -> bool:
        """True if the environment may answer the policy."""
        return hasattr(self.task.environment, "answer")

    async def answer(self, reply: str) -> str | None:
        """Return the next user's message, or None."""
        said = await self._asked("answer", reply.strip())
        if said is not None and (not isinstance(said, str) or not said.strip()):
            raise errors.EnvironmentFaultError(
                f"environment.answer gave {_shown(said)}; expected text, or None to end the episode"
            )
        return said

    async def score(self) -> dict[str, Any] | None:
        """Return the environment's score with the key `score`; None where it has none."""
        if not hasattr(self.task.environment, "score"):
            return None
        return checked_score(await self._asked("score"), "environment.score")

    async def state(self) -> dict[str, Any] | None:
        """Return the state that evaluators may compare, as plain JSON by name; None where there is none."""
        if not hasattr(self.task.environment, "state"):
            return None
        given = await self._asked("state")
        try:
            return dict(json.loads(json.dumps(given, allow_nan=False)))
        except Exception as e:  # the user's mapping and its values may raise anything
            words = f"environment.state gave {_shown(given)}; expected a mapping of plain JSON"
            raise errors.EnvironmentFaultError(words) from e

    async def prepare(self) -> Self:
        """Bring the environment into its first state; its message takes the row's place if it gave one."""
        if not hasattr(self.task.environment, "prepare"):
            return self
        said = await self._asked("prepare")
        if said is None:
            return self
        if not isinstance(said, str) or not said.strip():
            raise errors.EnvironmentFaultError(f"environment.prepare gave {_shown(said)}; expected text, or None")
        messages = [*self.task.messages[:-1], {"role": "user", "content": [{"text": said}]}]
        return replace(self, task=replace(self.task, messages=messages), question=said)

    async def _asked(self, name: str, *given: object) -> object:
        return await self.guarded(f"environment.{name}", getattr(self.task.environment, name), *given)

    async def guarded(self, what: str, call: Callable[..., Any], *given: object) -> Any:  # noqa: ANN401 - the user's
        """Return what the user's function, named `what` in messages, gives in time, unless the rollout is aborted."""
        deadline = self.control.deadline(self.timeout_s, during=f"during {what}")
        try:
            with running(self.task):
                async with deadline:
                    return await result_of(call, *given, loop=self.loop)
        except Exception as e:  # the user's code may raise anything
            # sys.exit() is made into a ToolError
            if isinstance(e, errors.RolloutError) and not isinstance(e, errors.ToolError):
                raise
            is_late = deadline.expired() and isinstance(e, TimeoutError)
            fault = TimeoutError(f"it took more than {self.timeout_s:g} s") if is_late else e
            raise errors.EnvironmentFaultError(failure_words(what, fault, self.task)) from fault

    async def entered(self, stack: AsyncExitStack, what: str, resource: AbstractAsyncContextManager[Any]) -> object:
        """Open a resource, which the stack closes."""
        opened = await self.guarded(f"the opening of {what}", resource.__aenter__)
        stack.push_async_callback(_close, what, resource, self)
        return opened


def checked_score(given: object, what: str) -> dict[str, Any]:
    """Return a score that the user's code, named `what` in messages, has given, as a mapping with `score`.

    Raises:
        EnvironmentFaultError: It is neither a finite number nor a mapping of plain JSON with one.
    """
    fault = "a finite number, or a mapping with one as `score` and, if it likes, one as `acc`"
    try:
        found = dict(given) if isinstance(given, Mapping) else {"score": given}
        numbers = {name: usable_number(found[name]) for name in ("score", "acc") if name in found}
        if numbers.get("score") is not None and None not in numbers.values():
            plain: dict[str, Any] = json.loads(json.dumps({**found, **numbers}, allow_nan=False))
            if _depth(plain) <= _DEEPEST_SCORE:
                return plain
            fault = f"plain JSON: it is nested more than {_DEEPEST_SCORE} levels deep"
    except Exception as e:  # the user's mapping and its values may raise anything
        raise errors.EnvironmentFaultError(f"{what} gave {_shown(given)}; expected plain JSON: {e}") from e
    raise errors.EnvironmentFaultError(f"{what} gave {_shown(given)}; expected {fault}")


_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def _depth(value: object) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(map(_depth, items), default=0)


def _shown(given: object) -> str:
    """Return a user's value for a message: at most 6 levels deep and 200 characters long; its `__repr__` may raise."""
    return f"{_SHORT.repr(given):.200}"


@asynccontextmanager
async def open_context(
    settings: RolloutSettings, task: Task, control: Control, loop: OwnLoop | None = None
) -> AsyncIterator[EpisodeContext]:
    """Open the resources, make the environment and prepare it; close all of them when the block ends, however it does.

    Raises:
        ToolError: A path can't be loaded.
        EnvironmentFaultError: A resource or the environment can't be opened or prepared.
        EngineAbortedError: The rollout was aborted meanwhile.
    """
    context = EpisodeContext(task, settings.environment_timeout_s, control, loop)
    async with AsyncExitStack() as stack:
        for name, path in settings.resources.items():
            what = f"resource {name!r} ({path})"
            resource = await context.guarded(what, load_function(path, "a resource"), context.task)
            if not isinstance(resource, AbstractAsyncContextManager):
                raise errors.EnvironmentFaultError(
                    f"{what} is a {type(resource).__name__}; expected an async context manager, such as a function "
                    "with @contextlib.asynccontextmanager makes"
                )
            opened = await context.entered(stack, what, resource)
            context = replace(context, task=replace(context.task, resources={**context.task.resources, name: opened}))
        if settings.environment is not None:
            context = await _with_environment(stack, settings.environment, context)
        prepared = await context.prepare()
        with running(prepared.task):
            yield prepared


async def _with_environment(stack: AsyncExitStack, path: str, context: EpisodeContext) -> EpisodeContext:
    what, task = f"environment {path!r}", context.task
    environment = await context.guarded(what, load_function(path, "an environment"), task)
    if isinstance(environment, AbstractAsyncContextManager):
        environment = await context.entered(stack, what, environment)
    tools = await context.guarded(f"{what}.tools", _tools_of, environment)
    if not any(hasattr(environment, name) for name in ("tools", "prepare", "answer", "score")):
        raise errors.EnvironmentFaultError(
            f"{what} is a {type(environment).__name__} without tools, prepare, answer and score; expected some of them"
        )
    refuse_no_model(tools)
    return replace(context, task=replace(task, environment=environment, tools=[*task.tools, *tools]))


def _tools_of(environment: object) -> list[object]:
    tools = getattr(environment, "tools", ())
    if isinstance(tools, str) or not isinstance(tools, Iterable):
        raise errors.EnvironmentFaultError(
            f"environment.tools is a {type(tools).__name__}; expected a list of Strands tools"
        )
    plain = [tool for tool in tools if inspect.isfunction(tool) or inspect.ismethod(tool)]
    if plain:
        raise errors.EnvironmentFaultError(
            f"environment.tools holds {plain[0].__qualname__}, a plain function; decorate it with @strands.tool"
        )
    return list(tools)


async def _close(what: str, resource: AbstractAsyncContextManager[Any], context: EpisodeContext) -> None:
    """Leave a resource, in the task that entered it, as some demand; its failure is not the episode's."""
    try:
        async with asyncio.timeout(CLOSE_LIMIT_S):
            with exits_as_errors("it"):
                await _awaited(context.loop, resource.__aexit__, None, None, None)
    except Exception as e:  # the user's code may raise anything
        logger.warning("event=not_closed %s", failure_words(f"the closing of {what}", e, context.task))
