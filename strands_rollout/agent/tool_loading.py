"""Strands tools, hooks, conversation managers and functions by dotted path; errors say what was found there instead."""

import asyncio
import functools
import inspect
import logging
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias

import strands.agent.agent
from strands import Agent
from strands.agent.conversation_manager import ConversationManager, SummarizingConversationManager
from strands.handlers.callback_handler import PrintingCallbackHandler, null_callback_handler
from strands.hooks import HookProvider
from strands.models import Model
from strands.models.bedrock import BedrockModel
from strands.multiagent.base import MultiAgentBase
from strands.multiagent.graph import Graph
from strands.multiagent.swarm import Swarm
from strands.tools import ToolProvider
from strands.tools.loader import load_tools_from_module
from strands.types.tools import AgentTool
from strands.vended_plugins.steering import LLMSteeringHandler

from strands_rollout.code_origin import is_users_file
from strands_rollout.control import current_call, is_in_episode
from strands_rollout.errors import (
    BlockingCallError,
    ConfigError,
    NoModelError,
    ToolError,
)
from strands_rollout.exits import exits_as_errors
from strands_rollout.own_thread import in_own_thread
from strands_rollout.settings import McpServer
from strands_rollout.user_code import nearest, resolve
from strands_rollout.watchdog import plays_episodes

logger = logging.getLogger(__name__)

Named: TypeAlias = Sequence[str | McpServer]
"""Tools as the settings name them."""


def load_tools(named: Named) -> list[AgentTool | ToolProvider]:
    """Resolve names of tools to Strands tools.

    Args:
        named: Each an MCP server, or a path as `resolve` takes it, of a tool or of a module or file: one that holds
            `@strands.tool` functions (all are taken) or a `TOOL_SPEC` with a function named like the module.

    Raises:
        ToolError: A path can't be imported, does not name a tool, or two tools have one name. The message says what was
            found there instead, and the nearest name. Or an MCP server can't be used as it is named.
        NoModelError: An agent that a tool calls has no model.
    """
    if isinstance(named, str):
        raise ToolError(f"tools is the string {named!r}; expected a list of dotted paths: [{named!r}]")
    tools = [found for one in named for found in (_tools_at(one) if isinstance(one, str) else [_tools_of(one)])]
    names = [found.tool_name for found in tools if isinstance(found, AgentTool)]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        paths = [one if isinstance(one, str) else one.shown_name for one in named]
        raise ToolError(f"tools {paths} hold more than one tool named {', '.join(doubled)}; names must be unique")
    refuse_no_model(tools)
    return tools


async def try_tools(named: Named) -> None:
    """Load tools as an episode does, and connect once to each MCP server; a SandboxError where one can't be reached."""
    for provider in load_tools(named):
        if isinstance(provider, ToolProvider):
            provider.add_consumer(try_tools)
            try:
                await provider.load_tools()
            finally:
                provider.remove_consumer(try_tools)


def end_mcp_connections() -> None:
    """End the connections to all MCP servers, and those that are being opened. Blocks, for seconds at most."""
    if (mcp := sys.modules.get("strands_rollout.agent.mcp")) is not None:  # its import takes long
        mcp.end_connections()


def load_conversation_manager(path: str | None) -> ConversationManager | None:
    """Make a conversation manager by the dotted path of its class, or of a function without arguments; None for None.

    Raises:
        ToolError: The path can't be imported, or does not give a conversation manager.
    """
    if path is None:
        return None
    manager = _made_at(path, "a conversation manager")
    refuse_blocking(manager, path)
    if not isinstance(manager, ConversationManager):
        raise ToolError(f"{path!r} made a {type(manager).__name__}; expected a Strands ConversationManager")
    return manager


def refuse_blocking(manager: object, path: str) -> None:
    """Refuse a conversation manager that would hold all episodes.

    Raises:
        ToolError: What is at this path made one.
    """
    if isinstance(manager, SummarizingConversationManager):
        raise ToolError(
            f"{path!r} made a SummarizingConversationManager, which blocks the event loop, and so every other episode, "
            "while it asks the policy. Use one that drops messages, or a hook on BeforeModelCallEvent that sums up "
            "asynchronously"
        )


def refuse_unplayable(agent: Agent, path: str) -> None:
    """Refuse an agent of the policy whose episode would stop half-way, or end with another's answer.

    Raises:
        ConfigError: It has checkpoints, or a router with other models than the agent's.
    """
    if getattr(agent, "_checkpointing", False):  # there is no public way to ask
        raise ConfigError(
            f"{path!r} made the agent {agent.name!r} with checkpointing=True, which stops before each turn's tools for "
            "somebody to resume it; expected an agent without. Aborted episodes are resumed by this package"
        )
    router = getattr(agent, "_model_router", None)  # of Strands from 1.62 on
    if router is not None and any(candidate.model is not agent.model for candidate in router.candidates):
        raise ConfigError(
            f"{path!r} gave the agent {agent.name!r} a ModelRouter with other models than the policy's, whose answers "
            "would count as the policy's; expected one model. Give the agent the model itself, or ask others in a tool"
        )


def load_function(path: str, what: str | None = None, given: Sequence[str] | None = None) -> Callable[..., Any]:
    """Return the function or class at a path, as `resolve` takes it.

    Args:
        path: Of the function.
        what: What it makes, for messages, where it makes something.
        given: What it will be called with, where that is to be checked.

    Raises:
        ToolError: The path can't be imported, names something else, or can't be called so.
    """
    found = _resolve(path)
    kind = found if isinstance(found, type) else type(found)
    if issubclass(kind, Agent | MultiAgentBase) and (kind is not found or kind.__module__.startswith("strands.")):
        raise ToolError(_instead_of_agent(path, found, what))
    expected = "a function" if what is None else f"a class or function that makes {what}"
    if not callable(found):
        hint = nearest("", found)
        raise ToolError(f"{path!r} is a {type(found).__name__}; expected {expected}{hint}")
    if given is not None:
        try:
            inspect.signature(found).bind(*given)
        except TypeError as e:
            raise ToolError(f"{path!r} can't be called with ({', '.join(given)}): {e}; expected {expected}") from e
        except ValueError:  # it has no signature to look at
            pass
    return found


def load_model(path: str) -> Model:
    """Return the Strands model at a dotted path, or that a class or function there makes.

    Raises:
        ToolError: The path can't be imported, or gives no Strands model.
    """
    found = _resolve(path)
    model = found if isinstance(found, Model) else _made_at(path, "a Strands model")
    if not isinstance(model, Model):
        raise ToolError(f"{path!r} made a {type(model).__name__}; expected a Strands model")
    return model


def _instead_of_agent(path: str, found: object, what: str | None) -> str:
    kind = getattr(found, "__name__", type(found).__name__)
    said = f"{path!r} is {'the class' if isinstance(found, type) else 'one'} {kind}"
    if what != "an agent":
        return f"{said}; expected a {'function' if what is None else f'class or function that makes {what}'}"
    tools = ", ".join(found.tool_registry.registry) if isinstance(found, Agent) else "..."
    given = f"model=model, system_prompt=task.system_prompt, tools=[{tools}]" if kind == "Agent" else "..."
    colon = ":" if ":" in path else "."
    home = "my_module" if isinstance(found, type) else path.rpartition(colon)[0]
    return (
        f"{said}; expected a function that builds a new one for each episode. Write\n"
        f"      def build(model, task):\n          return {kind}({given})\n"
        f"      # and in the configuration: agent_factory: {home}{colon}build"
    )


def load_hooks(paths: Sequence[str]) -> list[HookProvider]:
    """Make hook providers by the dotted paths of their classes, or of functions without arguments.

    Raises:
        ToolError: A path can't be imported, or does not give a hook provider.
    """
    hooks = []
    for path in paths:
        hook = _made_at(path, "a hook provider")
        if not isinstance(hook, HookProvider):
            raise ToolError(
                f"{path!r} made a {type(hook).__name__}; expected a Strands HookProvider, with a method register_hooks"
            )
        hooks.append(hook)
    return hooks


def _made_at(path: str, what: str) -> object:
    """Call the class or function at a path, and return what it makes."""
    make = load_function(path, what)
    if inspect.iscoroutinefunction(make):
        raise ToolError(f"{path!r} is an async function; expected a class or plain function that makes {what}")
    try:
        with exits_as_errors("it"):
            return make()
    except Exception as e:  # a user's constructor may raise anything
        raise ToolError(
            f"{path!r} raised {type(e).__name__}: {e}; expected a class or function without arguments that makes {what}"
        ) from e


def _tools_of(server: McpServer) -> ToolProvider:
    from strands_rollout.agent.mcp import mcp_tools  # the import takes long, and few have servers

    return mcp_tools(server)


def _guarded(provider: ToolProvider, path: str) -> ToolProvider:
    """Let an MCP client tell an outage of its server from an answer."""
    if "strands.tools.mcp" not in sys.modules:  # then it is none, and the import takes long
        return provider
    from strands.tools.mcp import MCPClient

    from strands_rollout.agent.mcp import guarded

    return guarded(provider, path) if isinstance(provider, MCPClient) else provider


def _tools_at(path: str) -> list[AgentTool | ToolProvider]:
    found = _resolve(path)
    if path.startswith("strands_tools") and os.environ.get(_CONSENT, "").lower() != "true":
        _warn_of_consent(path)
    if isinstance(found, ModuleType):
        name = Path(path).stem if path.endswith(".py") else found.__name__.rpartition(".")[2]
        try:
            return list(load_tools_from_module(found, name))
        except (AttributeError, TypeError) as e:
            raise ToolError(
                f"{path!r} is a module without Strands tools{nearest('', found)}; decorate functions with @strands.tool"
            ) from e
    if isinstance(found, ToolProvider):
        return [_guarded(found, path)]
    if isinstance(found, AgentTool):
        return [found]
    hint = "; decorate it with @strands.tool" if inspect.isroutine(found) else ""
    if isinstance(found, Agent):
        hint = "; ask one in a function with @strands.tool, which makes it with model=sub_agent_model()"
    kind = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
    raise ToolError(f"{path!r} is {kind}, expected a Strands tool{hint}")


_CONSENT: Final = "BYPASS_TOOL_CONSENT"


@functools.cache
def _warn_of_consent(path: str) -> None:
    """Say that a tool of strands-agents-tools asks a person before it acts, where it does."""
    module = sys.modules.get(".".join(path.replace(":", ".").split(".")[:2]))
    try:
        asks = module is not None and _CONSENT in inspect.getsource(module)
    except (OSError, TypeError):  # it has no source
        return
    if asks:
        logger.warning(
            "the tool %r asks on the trainer's terminal before it acts, where nobody answers; set %s=true in the "
            "environment of the trainer, or take another tool",
            path,
            _CONSENT,
        )


class _NoModel(BedrockModel):
    """The model of an agent that was given none; Strands takes Bedrock, which a user may have asked for, too."""

    def stream(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the base's
        if current_call() is not None or is_in_episode():  # of an agent that a tool or environment has built
            agent = (kwargs.get("invocation_state") or {}).get("agent")
            raise NoModelError(_NO_MODEL.format(getattr(agent, "name", "of a tool")))
        return super().stream(*args, **kwargs)


def _resolve(path: str) -> object:
    """Resolve a path; its agents without a model can be told, and those that a tool builds print nothing."""
    # Strands calls both by these names, where an agent was given no model, and no callback handler
    vars(strands.agent.agent)["BedrockModel"] = lambda **config: BedrockModel(**config) if config else _NoModel()
    vars(strands.agent.agent)["PrintingCallbackHandler"] = _default_handler
    _keep_calls_off_the_loop()
    return resolve(path)


@functools.cache
def _keep_calls_off_the_loop() -> None:
    """Let nothing of Strands ask a model without `await` on a loop that plays episodes."""
    for kind in (Agent, Swarm, Graph):
        kind.__call__ = _refused_on_the_loop(kind.__call__, _NOT_AWAITED)  # type: ignore[method-assign]
    reduce = _refused_on_the_loop(SummarizingConversationManager.reduce_context, _SUMS_UP)
    SummarizingConversationManager.reduce_context = reduce  # type: ignore[method-assign]
    steer = _off_the_loop(LLMSteeringHandler.steer_before_tool)
    LLMSteeringHandler.steer_before_tool = steer  # type: ignore[method-assign]


_NOT_AWAITED: Final = (
    "{name} was asked without await{place}, on the event loop of all episodes, which would stand still until it has "
    "answered; write `await agent.invoke_async(...)`, or make the tool around it a plain function, which runs in a "
    "thread"
)
_SUMS_UP: Final = (
    "a {kind} was to sum up{place}, on the event loop of all episodes, which would stand still meanwhile; use "
    "`context_manager=`, or make the tool around its agent a plain function, which runs in a thread"
)


def _refused_on_the_loop(call: Callable[..., Any], words: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(one: Any, *given: Any, **named: Any) -> Any:  # noqa: ANN401 - Strands' signature
        if plays_episodes():
            own = [frame for frame in traceback.extract_stack() if is_users_file(frame.filename)]
            place = f" ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})" if own else ""
            kind = type(one).__name__
            name = f"the agent {one.name!r}" if isinstance(one, Agent) else f"a {kind}"
            raise BlockingCallError(words.format(name=name, kind=kind, place=place))
        return call(one, *given, **named)

    return called


def _off_the_loop(call: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """An async method that blocks, in a thread with a loop of its own where it is called on that of episodes."""

    @functools.wraps(call)
    async def called(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - Strands' signature
        if not plays_episodes():
            return await call(*given, **named)
        return await in_own_thread(lambda: asyncio.run(call(*given, **named)), has_last_moment=False)()

    return called


def _default_handler() -> Callable[..., Any]:
    return null_callback_handler if current_call() is not None else PrintingCallbackHandler()


_NO_MODEL: Final = (
    "the agent {!r} has no model, so that Strands would ask Amazon Bedrock; build it in a tool or factory with "
    "Agent(model=sub_agent_model(), ...), or name another model"
)
_checked: Final[weakref.WeakSet[AgentTool]] = weakref.WeakSet()


def refuse_no_model(found: Iterable[object]) -> None:
    """Refuse agents without a model among these, their tools, and what functions of tools refer to.

    Raises:
        NoModelError: There is one, which the message names.
    """
    for one in found:
        if isinstance(one, AgentTool) and one in _checked:
            continue
        for agent in agents_in(one):
            if isinstance(agent.model, _NoModel):
                raise NoModelError(_NO_MODEL.format(agent.name))
            if agent is one:
                refuse_no_model(agent.tool_registry.registry.values())
        if isinstance(one, AgentTool):
            _checked.add(one)


def agents_in(found: object) -> Iterator[Agent]:
    """Yield the agents of a swarm or graph, those that a tool is or refers to, or an agent itself."""
    parts: Iterable[object] = ()
    if isinstance(found, Agent):
        yield found
    elif isinstance(found, MultiAgentBase):
        parts = [node.executor for node in getattr(found, "nodes", {}).values()]
    elif isinstance(found, AgentTool):
        parts = [getattr(found, "agent", None)]
        function = getattr(found, "_tool_func", None)
        if inspect.isfunction(function) or inspect.ismethod(function):
            known = inspect.getclosurevars(function)
            parts = [*parts, *known.nonlocals.values(), *known.globals.values()]
        parts = [part for part in parts if isinstance(part, Agent | MultiAgentBase)]
    for part in parts:
        yield from agents_in(part)
