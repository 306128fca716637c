"""Environments of strands-env, played unchanged: `environment: strands_env`, with the setting `environment_factory`.

`StrandsEnvironment` makes a new environment for each episode, and calls the environment's `rollout` with the policy as
the model. The environment's reward becomes the score, and its termination reason the stop reason.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import orjson
import yaml
from pydantic import ValidationError
from strands.hooks import HookProvider
from strands.models import Model

from strands_rollout.agent.environment import Task, call_user_code, describe_failure
from strands_rollout.agent.limits import LENGTH_REASONS, StopReason
from strands_rollout.agent.multi_agent import sub_agent_model
from strands_rollout.agent.run import PlayedEpisode
from strands_rollout.errors import ConfigError, EnvironmentFaultError, PromptError, RolloutError, ToolError
from strands_rollout.files.yaml_files import yaml_text
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.user_code import resolve

_INSTALL: Final = "pip install 'strands-rollout[strands-env]', on Python 3.12 or newer"
_HOOK: Final = "create_env_factory"
_MODEL_FACTORIES: Final = ("model_factory", "agent_model_factory")
_STOP_REASONS: Final = {
    "task_complete": StopReason.COMPLETED,
    "not_terminated": StopReason.COMPLETED,  # the default if an environment's `_rollout` sets no reason
    "context_window_overflow": StopReason.CONTEXT_LENGTH,
    "max_tool_iterations_reached": StopReason.MAX_TOOL_ITERATIONS,
    "max_tool_calls_reached": StopReason.MAX_TOOL_CALLS,
    "max_messages_reached": StopReason.ENVIRONMENT_LIMIT,
    "recursion_depth_exceeded": StopReason.ENVIRONMENT_LIMIT,
}
# environment factories from hook files, by event loop: their rate limiters and clients may be bound to a loop
_FACTORIES: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[asyncio.Lock, dict[bytes, Any]]]] = (
    weakref.WeakKeyDictionary()
)
_POLICY_URL: Final[ContextVar[str | None]] = ContextVar("strands_rollout_policy_url", default=None)
_USED_ENVIRONMENTS: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


class StrandsEnvironment:
    """An environment of strands-env for one episode.

    Args:
        task: The episode's task, which becomes a `Task` of the environment's `task_cls`.
        factory: Path (see `user_code.resolve`). It leads to a hook file (a module with `create_env_factory`), a
            function like `create_env_factory`, a function that returns an environment, or an environment class.
        config: Keyword arguments of the factory, or the path of a YAML or JSON file with them; None for no arguments.

    Raises:
        ConfigError: The file of `config` can't be read, or does not hold a mapping.
    """

    def __init__(self, task: Task, factory: str, config: Mapping[str, Any] | str | None) -> None:
        self._task = task
        self._path = factory
        self._config = _read_config(config) if isinstance(config, str) else dict(config or {})

    @staticmethod
    def check(factory: str) -> Callable[..., Any]:
        """Return the function or class at the path of a factory.

        Raises:
            ConfigError: strands-env is not installed.
            ToolError: The path can't be imported, or does not lead to a hook file, a function or a class.
        """
        _import_library()
        found: Any = resolve(factory)
        found = getattr(found, _HOOK, found)
        if not callable(found):
            raise ToolError(
                f"{factory!r} is a {type(found).__name__}; expected a module with {_HOOK}, an environment class of "
                "strands-env, or a function that returns an environment or a factory of environments"
            )
        return found  # type: ignore[no-any-return]

    async def play(self, model: SGLangModel, hooks: Sequence[HookProvider]) -> PlayedEpisode:
        """Make the environment, run its `rollout` with the policy as its model, and return the outcome.

        Args:
            model: The policy, which the environment's `model_factory` returns first. Later models of the factory, and
                other models on the policy's server, belong to sub-agents.
            hooks: Hooks of the episode, which the environment's agent gets after the environment's own hooks.

        Raises:
            ConfigError: As `check`; or the factory returns no environment, or the same environment for two episodes.
            EnvironmentFaultError: The factory or the environment raised a ToolError, or an exception that is not a
                RolloutError.
            PromptError: The row can't be read as a task of the environment.
            RolloutError: The factory or the environment raised a RolloutError that is not a ToolError.
            ToolError: As `check`.
        """
        _POLICY_URL.set(str(model.base_url).rstrip("/"))
        environment = await self._make(model)
        environment.model_factory = _policy_first_factory(model)
        own_hooks = environment.get_hooks
        environment.get_hooks = lambda: [*own_hooks(), *hooks]
        if self._task.system_prompt is not None:
            environment.system_prompt = self._task.system_prompt
        task = task_of(self._task, environment.task_cls)
        try:
            result = await environment.rollout(task)
        except Exception as e:  # the user's environment may raise anything
            if isinstance(e, RolloutError) and not isinstance(e, ToolError):
                raise
            raise EnvironmentFaultError(describe_failure(f"{type(environment).__name__}.rollout", e, self._task)) from e
        return _to_played_episode(result, model)

    async def _make(self, model: SGLangModel) -> Any:  # noqa: ANN401 - an environment of an optional library
        create = self.check(self._path)
        try:
            environment = await self._create(create, model)
        except Exception as e:  # the user's hook file may raise anything
            if isinstance(e, RolloutError) and not isinstance(e, ToolError):
                raise
            raise EnvironmentFaultError(describe_failure(f"environment_factory {self._path!r}", e, self._task)) from e
        if not isinstance(environment, _import_library().Environment):
            raise ConfigError(
                f"environment_factory {self._path!r} made a {type(environment).__name__}; expected an Environment of "
                "strands-env, or an async function that returns one"
            )
        if environment in _USED_ENVIRONMENTS:
            raise ConfigError(
                f"environment_factory {self._path!r} returned the same environment for two episodes; expected a new "
                "environment for each episode"
            )
        _USED_ENVIRONMENTS.add(environment)
        return environment

    async def _create(self, create: Callable[..., Any], model: SGLangModel) -> Any:  # noqa: ANN401
        """Return the environment for this episode, made by `create` or by the factory that `create` returns.

        If `create` returns a factory, `create` is called once per event loop, path, policy URL and configuration;
        otherwise once per episode.
        """
        call = functools.partial(create, *self._arguments(create, model), **self._keywords(create))
        if isinstance(create, type) or inspect.iscoroutinefunction(create):
            return await call_user_code(call)
        async with _locked_factories() as factories:
            key = orjson.dumps([self._path, model.base_url, self._config], default=repr, option=orjson.OPT_SORT_KEYS)
            if key not in factories:
                made = await call_user_code(call)
                if isinstance(made, _import_library().Environment) or not callable(made):
                    factories[key] = None  # the function itself makes an environment for each episode
                    return made
                factories[key] = made
            factory = factories[key]
        return await call_user_code(call if factory is None else factory)

    def _keywords(self, create: Callable[..., Any]) -> dict[str, Any]:
        """Return the keyword arguments: the configuration, and a model factory for each parameter that takes one."""
        named = inspect.signature(create).parameters
        if isinstance(create, type) and not any(name in named for name in _MODEL_FACTORIES):
            return {"model_factory": sub_agent_model, **self._config}
        return {name: sub_agent_model for name in _MODEL_FACTORIES if name in named} | self._config

    def _arguments(self, create: Callable[..., Any], model: SGLangModel) -> list[dict[str, Any]]:
        """Return the positional arguments: the policy as strands-env's model configuration, or none.

        A function gets the configuration if it has a positional parameter without a default. Parameters set by keyword
        don't count.
        """
        named = [
            parameter
            for parameter in inspect.signature(create).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and parameter.default is parameter.empty
            and parameter.name not in (*_MODEL_FACTORIES, *self._config)
        ]
        if isinstance(create, type) or not named:
            return []
        folder = str(model.tokenizer.name_or_path)
        params = {name: value for name, value in model.config["sampling_params"].items() if value is not None}
        return [{"base_url": model.base_url, "model_id": folder, "tokenizer_path": folder, "sampling_params": params}]


def _read_config(path: str) -> dict[str, Any]:
    try:
        given = yaml.safe_load(yaml_text(Path(path)))
    except (yaml.YAMLError, ValueError, ArithmeticError) as e:
        raise ConfigError(f"environment_config {path} can't be read as YAML: {e}") from e
    if not isinstance(given, dict):
        raise ConfigError(f"environment_config {path} holds a {type(given).__name__}; expected a mapping")
    return given


def task_of(task: Task, task_cls: type) -> Any:  # noqa: ANN401 - a class of an optional library
    """Convert a row to a task of strands-env, whose fields are the row's prompt, label and metadata.

    Raises:
        PromptError: The row lacks fields that the class needs, or has invalid ones.
    """
    *history, last = task.messages
    blocks = last["content"]
    is_text = all(set(block) == {"text"} for block in blocks)
    fields = {
        "id": str(task.index),
        "message": task.text if is_text else last,
        "ground_truth": task.label,
        "conversation_history": list(history),
        **task.metadata,
    }
    try:
        return task_cls.model_validate(fields)  # type: ignore[attr-defined]
    except ValidationError as e:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in e.errors())
        raise PromptError(
            f"the row with index {task.index} can't be read as a {task_cls.__name__}: {faults}; expected its fields in "
            "the row's metadata (slime's --metadata-key)"
        ) from e


def row_of(task: Any) -> dict[str, Any]:  # noqa: ANN401 - a class of an optional library
    """Convert a task of strands-env to a row of slime's `--prompt-data`, with the keys prompt, label and metadata."""
    fields = task.model_dump(mode="json")
    metadata = {name: value for name, value in fields.items() if name not in ("ground_truth",) and value is not None}
    message = fields["message"]
    text = message if isinstance(message, str) else "\n".join(one.get("text", "") for one in message["content"])
    label = fields["ground_truth"]
    return {"prompt": text or str(fields["id"]), "label": label, "metadata": metadata}


def _to_played_episode(result: Any, model: SGLangModel) -> PlayedEpisode:  # noqa: ANN401 - a class of an optional library
    reason, rewarded = result.termination_reason.value, result.reward_result
    info = {} if rewarded is None else _to_json(rewarded.info)
    facts = {"termination_reason": reason, "reward_info": info, "metrics": _to_json(result.metrics)}
    if failed := _reported_fault(info, result.metrics):
        error = EnvironmentFaultError(failed)
        return PlayedEpisode(StopReason.ENVIRONMENT_ERROR, scoring_error=error, facts=facts)
    score = None if rewarded is None else {**_numbers(info), "score": rewarded.reward}
    if reason not in (*_STOP_REASONS, "max_tokens_reached"):
        fault = EnvironmentFaultError(
            f"strands-env ended the episode with the reason {reason}: a hook, a limiter or a conversation manager "
            "raised an exception, which strands-env has logged"
        )
        return PlayedEpisode(StopReason.ENVIRONMENT_ERROR, fault, score=score, facts=facts)
    stop_reason = _STOP_REASONS.get(reason) or LENGTH_REASONS[model.cut_by or "turn"]
    return PlayedEpisode(stop_reason, score=score, facts=facts)


def _reported_fault(info: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Return the fault of a reward or a simulated user that strands-env reports; "" if it reports none.

    strands-env's evaluator also leaves out episodes with such a fault.
    """
    for name, part in {"the reward": info, **info}.items():
        if isinstance(part, Mapping) and part.get("status") == "error":
            return f"strands-env could not compute {name}: {part!r:.300}"
    user = metrics.get("user_simulator")
    if isinstance(user, Mapping) and user.get("termination") == "aborted":
        return "strands-env's simulated user failed; strands-env has logged the reason"
    return ""


def _policy_first_factory(model: SGLangModel) -> Callable[[], Model]:
    models = iter([model])
    return lambda: next(models, None) or sub_agent_model()


def _numbers(info: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in info.items() if isinstance(value, int | float) and name != "acc"}


def _to_json(value: object) -> Any:  # noqa: ANN401 - JSON
    return orjson.loads(orjson.dumps(value, default=repr, option=orjson.OPT_NON_STR_KEYS))


@asynccontextmanager
async def _locked_factories() -> AsyncIterator[dict[bytes, Any]]:
    """Yield the factories of hook files on the running loop, by key; one caller at a time may add factories."""
    lock, factories = _FACTORIES.setdefault(asyncio.get_running_loop(), (asyncio.Lock(), {}))
    async with lock:
        yield factories


@functools.cache
def _import_library() -> Any:  # noqa: ANN401 - a module of an optional library
    """Return strands-env's module `core`; patch strands-env, so that models on the policy's server record tokens."""
    try:
        from strands_env import core
        from strands_env.core import models
    except ImportError as e:
        raise ConfigError(f"environment strands_env needs the package strands-env ({e}); run: {_INSTALL}") from e
    original_factory = models.sglang_model_factory

    def sglang_model_factory(**given: Any) -> Callable[[], Model]:  # noqa: ANN401 - strands-env's arguments
        original, url = original_factory(**given), given["client"].base_url

        return lambda: sub_agent_model() if url == _POLICY_URL.get() else original()

    models.sglang_model_factory = sglang_model_factory
    return core
