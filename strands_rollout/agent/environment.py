"""Run the user's code of an episode: open its resources, make its environment, and call the environment's methods.

The user's code receives a `Task`. If the code raises an exception, the error message names the file, the line and the
sample's index.
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
from strands_rollout.agent.tool_loading import load_function, refuse_missing_model
from strands_rollout.code_origin import is_user_file
from strands_rollout.control import Control
from strands_rollout.exits import exits_as_errors, function_name, original_exception
from strands_rollout.own_loop import OwnLoop
from strands_rollout.own_thread import in_own_thread
from strands_rollout.samples import usable_number
from strands_rollout.settings import RolloutSettings

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 30.0
# levels of nesting in a score; with many more, `copy.deepcopy` of the sample would exceed Python's recursion limit
_MAX_SCORE_DEPTH: Final = 20


@dataclass(frozen=True, slots=True)
class Task:
    """The row of the data set that an episode plays, with the tools and resources of the episode.

    Attributes:
        messages: Strands messages that the agent starts with; the last is a user message.
        system_prompt: The row's system prompt, otherwise the configured system prompt; None if neither is set.
        label: The row's label.
        metadata: The row's metadata, without the keys that this package writes.
        index: The sample's index; None if the sample has no index.
        evaluation: True in an evaluation, False in training.
        tools: The configured tools, in a form for `strands.Agent(tools=...)`. Once the environment is made, also the
            environment's tools.
        resources: Open resources by their names in the setting `resources`.
        environment: The episode's environment, made by the class or function in the setting `environment`; None if the
            setting is missing, and before the environment is made.
        environment_config: Path of the file that the setting `environment_config` names; None if the setting is
            missing or is a mapping.
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
    environment_config: str | None = None

    @property
    def text(self) -> str:
        """Text of the last user message."""
        return "\n".join(block["text"] for block in self.messages[-1]["content"] if "text" in block)


@dataclass(slots=True)
class _TaskScope:
    """An episode's task; None after the episode, since timers and idle connections may keep this object longer."""

    task: Task | None


_CURRENT: Final[ContextVar[_TaskScope | None]] = ContextVar("strands_rollout_task", default=None)


def current_task() -> Task:
    """Return the task of the running episode, for tools and hooks: `current_task().resources["database"]`.

    Raises:
        ConfigError: The caller isn't part of an episode that `generate` runs.
    """
    scope = _CURRENT.get()
    task = None if scope is None else scope.task
    if task is None:
        raise errors.ConfigError(
            "current_task() was called outside of an episode; call it in a tool, a hook or an agent factory of an "
            "episode that strands_rollout.generate runs"
        )
    return task


@contextmanager
def task_scope(task: Task) -> Iterator[None]:
    """Make `current_task` return `task` in everything that the block calls, awaits or starts."""
    scope = _TaskScope(task)
    token = _CURRENT.set(scope)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        scope.task = None


def describe_failure(what: str, error: BaseException, task: Task) -> str:
    """Return an error message with the exception, its line in the user's files and the sample's index.

    `what` names what has failed, such as `environment.score`.
    """
    error = original_exception(error)
    place = user_code_location(error)
    return f"{what} raised {type(error).__name__}: {error}{place}, for the sample of index {task.index}"


def user_code_location(error: BaseException) -> str:
    """Return " (FILE, line N, in FUNCTION)" for the error's innermost frame in a user's file; "" if there is none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    return f" ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})" if own else ""


async def call_user_code(
    call: Callable[..., Any],
    *args: object,
    loop: OwnLoop | None = None,
    in_thread: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None,
) -> Any:  # noqa: ANN401 - the user's
    """Call the user's function, await the result if it is a coroutine, and return it.

    Args:
        call: The function. A coroutine function runs on the loop. Any other function may block, so it runs in a thread.
            If it returns a coroutine there, the loop runs the coroutine.
        args: The arguments of the function.
        loop: Loop that runs coroutines; None for the running loop.
        in_thread: Runs a sync function in a thread. By default, each call has a thread of its own. In the loop's thread
            pool, a function that never returns would occupy a worker forever.

    Raises:
        ToolError: The function raised an exception that `except Exception` doesn't catch, such as SystemExit.
        Exception: Any other exception of the function.
    """
    with exits_as_errors(function_name(call)):
        if asyncio.iscoroutinefunction(call):
            return await _await_call(loop, call, *args)
        bound = functools.partial(call, *args)
        result = await (in_thread(bound) if in_thread else in_own_thread(bound, has_grace_period=False)())
        return await _await_call(loop, lambda: result) if asyncio.iscoroutine(result) else result


async def _await_call(loop: OwnLoop | None, call: Callable[..., Awaitable[Any]], *args: object) -> Any:  # noqa: ANN401 - the user's
    return await (call(*args) if loop is None else loop.run(call, *args))


class Environment(Protocol):
    """Protocol of environments; the class or function in the setting `environment` makes one for each episode.

    Each method is optional and may be async; sync methods run in threads. At least one of `tools`, `prepare`, `answer`,
    `score` and `play` is required. The class or function at the setting's path is called with the `Task`, whose
    `resources` are open. If the environment is an async context manager, it is entered before `prepare`, and exited at
    the end of the episode.

    Only environments of the classes in `ENVIRONMENT_LIBRARIES` play episodes: `EnvironmentRun` calls their method
    `play`. These classes are called with the `Task` and the settings `environment_factory` and `environment_config`.

    Attributes:
        tools: Strands tools that act on the environment; the agent has them in addition to the configured tools.
    """

    tools: Any

    def prepare(self) -> str | Awaitable[str | None] | None:
        """Set the initial state; if this returns text, the text replaces the row's last user message."""

    def answer(self, reply: str) -> str | Awaitable[str | None] | None:
        """Return the next user message, or None to end the episode; `reply` is the text of the policy's answer."""

    def score(self) -> float | Mapping[str, Any] | Awaitable[float | Mapping[str, Any]]:
        """Return the episode's score: a number, or a mapping of plain JSON with `score` and optionally `acc`."""

    def state(self) -> Mapping[str, Any] | Awaitable[Mapping[str, Any]]:
        """Return the final state as a mapping of plain JSON; evaluators compare it with the expected state."""


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """The environment and the open resources of one episode, with methods that call the environment.

    Attributes:
        task: The task, with its resources, its environment and the environment's tools.
        timeout_s: Maximum seconds of each call of the environment, and of opening each resource; None for no limit.
        control: The episode's control; an abort cancels running calls.
        loop: Loop that runs all of the user's coroutines; None for the running loop. A connection can be used only on
            the loop that opened it.
        prompt: User message that the environment's `prepare` returned; None if the row's message is used.

    Raises:
        EnvironmentFaultError: From each method, if the environment or a resource fails or takes too long. Also if the
            environment returns an unexpected value.
        EngineAbortedError: From each method, if the rollout is aborted.
        RolloutError: From each method, if the user's code raises a RolloutError other than a ToolError.
    """

    task: Task
    timeout_s: float | None
    control: Control
    loop: OwnLoop | None = None
    prompt: str | None = None

    @property
    def can_answer(self) -> bool:
        """True if the environment has a method `answer`."""
        return hasattr(self.task.environment, "answer")

    async def answer(self, reply: str) -> str | None:
        """Return the next user message; None ends the episode."""
        text = await self._call_method("answer", reply.strip())
        if text is not None and (not isinstance(text, str) or not text.strip()):
            raise errors.EnvironmentFaultError(
                f"environment.answer returned {_short_repr(text)}; expected text that is not blank, or None to end the "
                "episode"
            )
        return text

    async def score(self) -> dict[str, Any] | None:
        """Return the environment's score as a mapping with `score`; None if the environment has no `score` method."""
        if not hasattr(self.task.environment, "score"):
            return None
        return checked_score(await self._call_method("score"), "environment.score")

    async def state(self) -> dict[str, Any] | None:
        """Return the environment's final state as plain JSON; None if the environment has no `state` method."""
        if not hasattr(self.task.environment, "state"):
            return None
        given = await self._call_method("state")
        try:
            return dict(json.loads(json.dumps(given, allow_nan=False)))
        except Exception as e:  # the user's mapping and its values may raise anything
            message = f"environment.state returned {_short_repr(given)}; expected a mapping with plain JSON values"
            raise errors.EnvironmentFaultError(message) from e

    async def prepare(self) -> Self:
        """Call the environment's `prepare`, and return the context for the episode.

        If `prepare` returns text, the result is a copy with this text as the last user message.
        """
        if not hasattr(self.task.environment, "prepare"):
            return self
        text = await self._call_method("prepare")
        if text is None:
            return self
        if not isinstance(text, str) or not text.strip():
            raise errors.EnvironmentFaultError(
                f"environment.prepare returned {_short_repr(text)}; expected text that is not blank, or None to keep "
                "the row's prompt"
            )
        messages = [*self.task.messages[:-1], {"role": "user", "content": [{"text": text}]}]
        return replace(self, task=replace(self.task, messages=messages), prompt=text)

    async def _call_method(self, name: str, *args: object) -> object:
        return await self.call_guarded(f"environment.{name}", getattr(self.task.environment, name), *args)

    async def call_guarded(self, what: str, call: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401 - the user's
        """Call a user's function, named `what` in error messages; the time limit or an abort cancels the call."""
        deadline = self.control.deadline(self.timeout_s, during=f"during {what}")
        try:
            with task_scope(self.task):
                async with deadline:
                    return await call_user_code(call, *args, loop=self.loop)
        except Exception as e:  # the user's code may raise anything
            # a ToolError may come from the user's sys.exit(); see `exits_as_errors`
            if isinstance(e, errors.RolloutError) and not isinstance(e, errors.ToolError):
                raise
            is_late = deadline.expired() and isinstance(e, TimeoutError)
            fault = TimeoutError(f"took more than {self.timeout_s:g} s (environment_timeout_s)") if is_late else e
            raise errors.EnvironmentFaultError(describe_failure(what, fault, self.task)) from fault

    async def open_resource(
        self, stack: AsyncExitStack, what: str, resource: AbstractAsyncContextManager[Any]
    ) -> object:
        """Enter a resource, register its exit on `stack`, and return what the resource's `__aenter__` returned."""
        opened = await self.call_guarded(f"the opening of {what}", resource.__aenter__)
        stack.push_async_callback(_close, what, resource, self)
        return opened


def checked_score(given: object, what: str) -> dict[str, Any]:
    """Check a score that the user's code returned, and return it as a mapping with `score`.

    `what` names the user's code in error messages.

    Raises:
        EnvironmentFaultError: The score is neither a finite number nor a mapping of plain JSON with a finite `score`;
            the mapping's `acc` is not a finite number; or the mapping has more than `_MAX_SCORE_DEPTH` nested levels.
    """
    expected = "a finite number, or a mapping with a finite number as `score` and optionally as `acc`"
    try:
        found = dict(given) if isinstance(given, Mapping) else {"score": given}
        numbers = {name: usable_number(found[name]) for name in ("score", "acc") if name in found}
        if numbers.get("score") is not None and None not in numbers.values():
            plain: dict[str, Any] = json.loads(json.dumps({**found, **numbers}, allow_nan=False))
            if _depth(plain) <= _MAX_SCORE_DEPTH:
                return plain
            expected = f"plain JSON of at most {_MAX_SCORE_DEPTH} nested levels"
    except Exception as e:  # the user's mapping and its values may raise anything
        raise errors.EnvironmentFaultError(f"{what} returned {_short_repr(given)}; expected plain JSON ({e})") from e
    raise errors.EnvironmentFaultError(f"{what} returned {_short_repr(given)}; expected {expected}")


_SHORT_REPR: Final = reprlib.Repr()
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = 200


def _depth(value: object) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(map(_depth, items), default=0)


def _short_repr(given: object) -> str:
    """Return a repr of at most 200 characters, even if the value's `__repr__` raises."""
    return f"{_SHORT_REPR.repr(given):.200}"


@asynccontextmanager
async def open_context(
    settings: RolloutSettings, task: Task, control: Control, loop: OwnLoop | None = None
) -> AsyncIterator[EpisodeContext]:
    """Open the resources, then make and prepare the environment; close all of them when the block ends.

    Raises:
        ToolError: The path of a resource or of the environment can't be loaded.
        NoModelError: A tool of the environment calls an agent that has no model.
        EnvironmentFaultError: A resource or the environment has the wrong type, takes too long, or fails while it is
            made, opened or prepared.
        EngineAbortedError: The rollout was aborted during one of these steps.
        RolloutError: The user's code raised a RolloutError other than a ToolError, such as a ConfigError.
    """
    context = EpisodeContext(task, settings.environment_timeout_s, control, loop)
    async with AsyncExitStack() as stack:
        for name, path in settings.resources.items():
            what = f"resource {name!r} ({path})"
            resource = await context.call_guarded(what, load_function(path, "a resource"), context.task)
            if not isinstance(resource, AbstractAsyncContextManager):
                raise errors.EnvironmentFaultError(
                    f"the class or function of {what} made a {type(resource).__name__}; expected an async context "
                    "manager. If it is a function that yields the resource, decorate it with "
                    "@contextlib.asynccontextmanager"
                )
            opened = await context.open_resource(stack, what, resource)
            context = replace(context, task=replace(context.task, resources={**context.task.resources, name: opened}))
        if settings.environment is not None:
            context = await _open_environment(stack, settings, context)
        prepared = await context.prepare()
        with task_scope(prepared.task):
            yield prepared


async def _open_environment(
    stack: AsyncExitStack, settings: RolloutSettings, context: EpisodeContext
) -> EpisodeContext:
    what, task = f"environment {settings.environment!r}", context.task
    config = task.environment_config or settings.environment_config
    given = (task, settings.environment_factory, config) if settings.environment_plays else (task,)
    make = load_function(settings.environment_path or "", "an environment")
    environment = await context.call_guarded(what, make, *given)
    if isinstance(environment, AbstractAsyncContextManager):
        environment = await context.open_resource(stack, what, environment)
    tools = await context.call_guarded(f"{what}.tools", _environment_tools, environment)
    if not any(hasattr(environment, name) for name in ("tools", "prepare", "answer", "score", "play")):
        raise errors.EnvironmentFaultError(
            f"{what} is a {type(environment).__name__} that has none of tools, prepare, answer, score and play; define "
            "at least one of them"
        )
    refuse_missing_model(tools)
    return replace(context, task=replace(task, environment=environment, tools=[*task.tools, *tools]))


def _environment_tools(environment: object) -> list[object]:
    tools = getattr(environment, "tools", ())
    if isinstance(tools, str) or not isinstance(tools, Iterable):
        raise errors.EnvironmentFaultError(
            f"environment.tools is a {type(tools).__name__}; expected a list of Strands tools"
        )
    plain = [tool for tool in tools if inspect.isfunction(tool) or inspect.ismethod(tool)]
    if plain:
        raise errors.EnvironmentFaultError(
            f"environment.tools contains the plain function {plain[0].__qualname__}; decorate it with @strands.tool"
        )
    return list(tools)


async def _close(what: str, resource: AbstractAsyncContextManager[Any], context: EpisodeContext) -> None:
    """Exit a resource in the task that entered it, as anyio's cancel scopes require."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            with exits_as_errors(function_name(resource.__aexit__)):
                await _await_call(context.loop, resource.__aexit__, None, None, None)
    except Exception as e:  # the user's code may raise anything
        logger.warning("event=not_closed: %s", describe_failure(f"the closing of {what}", e, context.task))
