"""Load tools, hooks, managers, models and functions by path; patch Strands; refuse agents that can't be played."""

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

from strands_rollout.code_origin import is_user_file
from strands_rollout.control import current_call, is_in_episode
from strands_rollout.errors import (
    BlockingCallError,
    ConfigError,
    NoModelError,
    ToolError,
)
from strands_rollout.exits import exits_as_errors, function_name, original_exception
from strands_rollout.own_thread import in_own_thread
from strands_rollout.settings import McpServer
from strands_rollout.user_code import resolve, suggest_name
from strands_rollout.watchdog import is_on_episode_loop

logger = logging.getLogger(__name__)

ToolNames: TypeAlias = Sequence[str | McpServer]
"""Value of the setting `tools`: paths and MCP servers."""


def load_tools(named: ToolNames) -> list[AgentTool | ToolProvider]:
    """Load the tools that the settings name.

    Args:
        named: MCP servers, and paths as `resolve` takes them. A path leads to a tool, a tool provider, or a module or
            file with tools. All `@strands.tool` functions of a module are loaded. A module may instead have a
            `TOOL_SPEC` and a function of the module's name.

    Raises:
        ToolError: A path can't be imported or leads to no tool; two tools have the same name; an MCP server's settings
            are invalid; or `named` is a string.
        NoModelError: A tool calls an agent that has no model.
    """
    if isinstance(named, str):
        raise ToolError(f"tools is the string {named!r}; expected a list of dotted paths: [{named!r}]")
    tools = [
        tool for entry in named for tool in (_load_tools_at(entry) if isinstance(entry, str) else [_mcp_tools(entry)])
    ]
    names = [tool.tool_name for tool in tools if isinstance(tool, AgentTool)]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        entries = [entry if isinstance(entry, str) else entry.shown_name for entry in named]
        raise ToolError(f"tools {entries} contain more than one tool named {', '.join(duplicates)}; use unique names")
    refuse_missing_model(tools)
    return tools


async def check_tools(named: ToolNames) -> None:
    """Load tools as an episode does, including the tools of tool providers; this connects once to each MCP server.

    Raises:
        SandboxError: A server can't be reached.
        ToolError, NoModelError: See `load_tools`.
    """
    for provider in load_tools(named):
        if isinstance(provider, ToolProvider):
            provider.add_consumer(check_tools)
            try:
                await provider.load_tools()
            finally:
                provider.remove_consumer(check_tools)


def end_mcp_connections() -> None:
    """End all connections to MCP servers, open or opening; block for a few seconds at most."""
    if (mcp := sys.modules.get("strands_rollout.agent.mcp")) is not None:  # importing it is slow
        mcp.end_connections()


def load_conversation_manager(path: str | None) -> ConversationManager | None:
    """Return the conversation manager that the class or function at a path makes; None if `path` is None.

    Raises:
        ToolError: The path can't be imported; or the class or function there is async, raises an exception, makes no
            conversation manager, or makes one that blocks the event loop.
    """
    if path is None:
        return None
    manager = _make_at(path, "a conversation manager")
    refuse_blocking(manager, path)
    if not isinstance(manager, ConversationManager):
        raise ToolError(f"{path!r} made a {type(manager).__name__}; expected a Strands ConversationManager")
    return manager


def refuse_blocking(manager: object, path: str) -> None:
    """Refuse a conversation manager that blocks the event loop.

    Raises:
        ToolError: The class or function at `path` made a SummarizingConversationManager.
    """
    if isinstance(manager, SummarizingConversationManager):
        raise ToolError(
            f"{path!r} made a SummarizingConversationManager, which blocks the event loop, and so every other episode, "
            "while it asks the policy. Use a manager that drops messages, or a hook on BeforeModelCallEvent that "
            "summarizes asynchronously"
        )


def refuse_unplayable(agent: Agent, path: str) -> None:
    """Refuse an agent that would stop half-way, or return another model's answers as the policy's.

    Raises:
        ConfigError: The agent has checkpoints, or a router with models other than the policy.
    """
    if getattr(agent, "_checkpointing", False):  # Strands has no public accessor
        raise ConfigError(
            f"{path!r} made the agent {agent.name!r} with checkpointing=True, which stops it before each turn's tools; "
            "remove checkpointing=True. This package resumes aborted episodes itself"
        )
    router = getattr(agent, "_model_router", None)  # in Strands 1.62 and later
    if router is not None and any(candidate.model is not agent.model for candidate in router.candidates):
        raise ConfigError(
            f"{path!r} gave the agent {agent.name!r} a ModelRouter with other models than the policy: their answers "
            "would be trained as the policy's; give the agent the policy's model itself, or ask other models in a tool"
        )


def load_function(path: str, what: str | None = None, arguments: Sequence[str] | None = None) -> Callable[..., Any]:
    """Return the function or class at a path, as `resolve` takes it.

    Args:
        path: Path of the function or class.
        what: Name of the function's result for messages, such as "an agent"; None for a function without a result.
        arguments: Names of the arguments that the function must accept; None for no check.

    Raises:
        ToolError: The path can't be imported; or the object at the path is not callable, can't be called with
            `arguments`, or is an agent, swarm or graph. The classes that Strands defines for these are refused, too: a
            function that makes an agent, swarm or graph is expected.
    """
    found = _resolve(path)
    kind = found if isinstance(found, type) else type(found)
    if issubclass(kind, Agent | MultiAgentBase) and (kind is not found or kind.__module__.startswith("strands.")):
        raise ToolError(_not_a_factory_message(path, found, what))
    expected = "a function" if what is None else f"a class or function that makes {what}"
    if not callable(found):
        hint = suggest_name("", found)
        raise ToolError(f"{path!r} is a {type(found).__name__}; expected {expected}{hint}")
    if arguments is not None:
        try:
            inspect.signature(found).bind(*arguments)
        except TypeError as e:
            raise ToolError(
                f"{path!r} can't be called with ({', '.join(arguments)}): {e}; expected {expected}, callable with "
                "these arguments"
            ) from e
        except ValueError:  # a builtin without a signature
            pass
    return found


def load_model(path: str) -> Model:
    """Return the Strands model at a dotted path, or the model that the class or function there makes.

    Raises:
        ToolError: The path can't be imported, or leads neither to a Strands model nor to a class or function that makes
            one without arguments.
    """
    found = _resolve(path)
    model = found if isinstance(found, Model) else _make_at(path, "a Strands model")
    if not isinstance(model, Model):
        raise ToolError(f"{path!r} made a {type(model).__name__}; expected a Strands model")
    return model


def _not_a_factory_message(path: str, found: object, what: str | None) -> str:
    kind = getattr(found, "__name__", type(found).__name__)
    message = f"{path!r} is {'the class' if isinstance(found, type) else 'an instance of'} {kind}"
    if what != "an agent":
        return f"{message}; expected a {'function' if what is None else f'class or function that makes {what}'}"
    tools = ", ".join(found.tool_registry.registry) if isinstance(found, Agent) else "..."
    given = f"model=model, system_prompt=task.system_prompt, tools=[{tools}]" if kind == "Agent" else "..."
    colon = ":" if ":" in path else "."
    home = "my_module" if isinstance(found, type) else path.rpartition(colon)[0]
    return (
        f"{message}; expected a function that builds a new one for each episode. Write\n"
        f"      def build(model, task):\n          return {kind}({given})\n"
        f"      # and in the configuration: agent_factory: {home}{colon}build"
    )


def load_hooks(paths: Sequence[str]) -> list[HookProvider]:
    """Return the hook providers that the classes or functions at these paths make.

    Raises:
        ToolError: A path can't be imported, or the class or function there is async, raises an exception, or makes no
            hook provider.
    """
    hooks = []
    for path in paths:
        hook = _make_at(path, "a hook provider")
        if not isinstance(hook, HookProvider):
            raise ToolError(
                f"{path!r} made a {type(hook).__name__}; expected a Strands HookProvider, with a method register_hooks"
            )
        hooks.append(hook)
    return hooks


def _make_at(path: str, what: str) -> object:
    make = load_function(path, what)
    if inspect.iscoroutinefunction(make):
        raise ToolError(f"{path!r} is an async function; expected a class or plain function that makes {what}")
    try:
        with exits_as_errors(repr(path)):
            return make()
    except Exception as e:  # a user's constructor may raise anything
        raised = original_exception(e)
        raise ToolError(
            f"{path!r} raised {type(raised).__name__}: {raised}; expected a class or function that makes {what} when "
            "called without arguments"
        ) from e


def _mcp_tools(server: McpServer) -> ToolProvider:
    from strands_rollout.agent.mcp import mcp_tools  # importing it is slow, and few users have servers

    return mcp_tools(server)


def _guard_mcp_client(provider: ToolProvider, path: str) -> ToolProvider:
    """Wrap an MCP client: its tools then raise SandboxError if the server is lost. Return other providers as is."""
    if "strands.tools.mcp" not in sys.modules:  # the provider can't be an MCP client, and the import is slow
        return provider
    from strands.tools.mcp import MCPClient

    from strands_rollout.agent.mcp import guard_client

    return guard_client(provider, path) if isinstance(provider, MCPClient) else provider


def _load_tools_at(path: str) -> list[AgentTool | ToolProvider]:
    found = _resolve(path)
    if path.startswith("strands_tools") and os.environ.get(_CONSENT_VARIABLE, "").lower() != "true":
        _warn_of_consent(path)
    if isinstance(found, ModuleType):
        name = Path(path).stem if path.endswith(".py") else found.__name__.rpartition(".")[2]
        try:
            return list(load_tools_from_module(found, name))
        except (AttributeError, TypeError) as e:
            hint = suggest_name("", found)
            raise ToolError(
                f"{path!r} is a module without Strands tools{hint}; decorate functions with @strands.tool"
            ) from e
    if isinstance(found, ToolProvider):
        return [_guard_mcp_client(found, path)]
    if isinstance(found, AgentTool):
        return [found]
    hint = "; decorate it with @strands.tool" if inspect.isroutine(found) else ""
    if isinstance(found, Agent):
        hint = "; build and ask the agent in a function with @strands.tool, with model=sub_agent_model()"
    kind = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
    raise ToolError(f"{path!r} is {kind}, expected a Strands tool{hint}")


_CONSENT_VARIABLE: Final = "BYPASS_TOOL_CONSENT"


@functools.cache
def _warn_of_consent(path: str) -> None:
    """Log a warning if a tool of strands-agents-tools asks a person for consent before it acts."""
    module = sys.modules.get(".".join(path.replace(":", ".").split(".")[:2]))
    try:
        asks = module is not None and _CONSENT_VARIABLE in inspect.getsource(module)
    except (OSError, TypeError):  # the module has no source
        return
    if asks:
        logger.warning(
            "the tool %r asks for consent on the trainer's terminal, where nobody answers; set %s=true in the "
            "trainer's environment, or use another tool",
            path,
            _CONSENT_VARIABLE,
        )


class _MissingModel(BedrockModel):
    """Model of an agent that was built without a model. The subclass distinguishes it from a user's `BedrockModel`."""

    def stream(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the base's
        if current_call() is not None or is_in_episode():
            agent = (kwargs.get("invocation_state") or {}).get("agent")
            shown = "an agent of a tool" if agent is None else f"the agent {agent.name!r}"
            raise NoModelError(f"{shown} {_MISSING_MODEL}")
        return super().stream(*args, **kwargs)


def _resolve(path: str) -> object:
    """Resolve a path; first patch Strands, before the user's code is imported."""
    # Strands looks up the classes of its defaults under these names; the replacements make a missing model
    # recognizable, and keep agents in tools from printing
    vars(strands.agent.agent)["BedrockModel"] = lambda **config: BedrockModel(**config) if config else _MissingModel()
    vars(strands.agent.agent)["PrintingCallbackHandler"] = _default_handler
    _keep_calls_off_the_loop()
    return resolve(path)


@functools.cache
def _keep_calls_off_the_loop() -> None:
    """Patch methods of Strands that block until a model answers.

    On the episodes' loop, a patched method raises BlockingCallError or runs in a thread.
    """
    for kind in (Agent, Swarm, Graph):
        kind.__call__ = _refuse_on_episode_loop(kind.__call__, _NOT_AWAITED_MESSAGE)  # type: ignore[method-assign]
    reduce = _refuse_on_episode_loop(SummarizingConversationManager.reduce_context, _SUMMARY_MESSAGE)
    SummarizingConversationManager.reduce_context = reduce  # type: ignore[method-assign]
    steer = _move_off_episode_loop(LLMSteeringHandler.steer_before_tool)
    LLMSteeringHandler.steer_before_tool = steer  # type: ignore[method-assign]


_NOT_AWAITED_MESSAGE: Final = (
    "{name} was called without await{place}, which would block the event loop of all episodes until it has "
    "answered; write `await agent.invoke_async(...)`, or make the tool that calls it a plain function (def, not async "
    "def), which runs in a thread"
)
_SUMMARY_MESSAGE: Final = (
    "a {kind} was called to summarize{place}, which would block the event loop of all episodes; use "
    "`Agent(context_manager=...)`, or make the tool that calls its agent a plain function (def, not async def), which "
    "runs in a thread"
)


def _refuse_on_episode_loop(call: Callable[..., Any], message: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(owner: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - Strands' signature
        if is_on_episode_loop():
            frames = [frame for frame in traceback.extract_stack() if is_user_file(frame.filename)]
            place = f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
            kind = type(owner).__name__
            name = f"the agent {owner.name!r}" if isinstance(owner, Agent) else f"a {kind}"
            raise BlockingCallError(message.format(name=name, kind=kind, place=place))
        return call(owner, *args, **kwargs)

    return wrapper


def _move_off_episode_loop(call: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(call)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - Strands' signature
        if not is_on_episode_loop():
            return await call(*args, **kwargs)
        in_thread = in_own_thread(
            lambda: asyncio.run(call(*args, **kwargs)), has_grace_period=False, name=function_name(call)
        )
        return await in_thread()

    return wrapper


def _default_handler() -> Callable[..., Any]:
    return null_callback_handler if current_call() is not None else PrintingCallbackHandler()


_MISSING_MODEL: Final = (
    "has no model, so Strands would call Amazon Bedrock; build it in a tool or factory with "
    "Agent(model=sub_agent_model(), ...), or pass another model"
)
_CHECKED_TOOLS: Final[weakref.WeakSet[AgentTool]] = weakref.WeakSet()


def refuse_missing_model(found: Iterable[object]) -> None:
    """Refuse agents without a model among these objects, their tools, and the variables that tools' functions use.

    Raises:
        NoModelError: An agent has no model; the message names it.
    """
    for owner in found:
        if isinstance(owner, AgentTool) and owner in _CHECKED_TOOLS:
            continue
        for agent in agents_in(owner):
            if isinstance(agent.model, _MissingModel):
                raise NoModelError(f"the agent {agent.name!r} {_MISSING_MODEL}")
            if agent is owner:
                refuse_missing_model(agent.tool_registry.registry.values())
        if isinstance(owner, AgentTool):
            _CHECKED_TOOLS.add(owner)


def agents_in(found: object) -> Iterator[Agent]:
    """Yield the agents in `found`, which may be an agent, a swarm, a graph or a tool.

    A tool has the agents that it wraps, and the agents in variables that its function uses.
    """
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
