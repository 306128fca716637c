"""Strands tools, hooks, conversation managers and functions by dotted path; errors say what was found there instead."""

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeAlias

from strands.agent.conversation_manager import ConversationManager, SummarizingConversationManager
from strands.hooks import HookProvider
from strands.models import Model
from strands.tools import ToolProvider
from strands.tools.loader import load_tools_from_module
from strands.types.tools import AgentTool

from strands_rollout.aio import exits_as_errors
from strands_rollout.errors import ToolError, foreign_code
from strands_rollout.settings import McpServer

Named: TypeAlias = Sequence[str | McpServer]
"""Tools as the settings name them."""


def load_tools(named: Named) -> list[AgentTool | ToolProvider]:
    """Resolve names of tools to Strands tools.

    Args:
        named: Each an MCP server, or a dotted path: `package.module.attribute`, `package.module:attribute`, or a
            module: one that holds `@strands.tool` functions (all are taken) or a `TOOL_SPEC` with a function named like
            the module.

    Raises:
        ToolError: A path can't be imported, does not name a tool, or two tools have one name. The message says what was
            found there instead, and the nearest name. Or an MCP server can't be used as it is named.
    """
    if isinstance(named, str):
        raise ToolError(f"tools is the string {named!r}; expected a list of dotted paths: [{named!r}]")
    tools = [found for one in named for found in (_tools_at(one) if isinstance(one, str) else [_tools_of(one)])]
    names = [found.tool_name for found in tools if isinstance(found, AgentTool)]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        paths = [one if isinstance(one, str) else one.shown_name for one in named]
        raise ToolError(f"tools {paths} hold more than one tool named {', '.join(doubled)}; names must be unique")
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


def load_conversation_manager(path: str | None) -> ConversationManager | None:
    """A new conversation manager by the dotted path of its class, or of a function without arguments; None for None.

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


def load_function(path: str, what: str | None = None) -> Callable[..., Any]:
    """What can be called at a dotted path: a function or a class.

    Args:
        path: As for `load_tools`.
        what: What it makes, for messages, where it makes something.

    Raises:
        ToolError: The path can't be imported, or names something else.
    """
    found = _resolve(path)
    if not callable(found):
        expected = "a function" if what is None else f"a class or function that makes {what}"
        raise ToolError(f"{path!r} is a {type(found).__name__}; expected {expected}")
    return found


def load_model(path: str) -> Model:
    """The Strands model at a dotted path, or that a class or function there makes.

    Raises:
        ToolError: The path can't be imported, or gives no Strands model.
    """
    found = _resolve(path)
    model = found if isinstance(found, Model) else _made_at(path, "a Strands model")
    if not isinstance(model, Model):
        raise ToolError(f"{path!r} made a {type(model).__name__}; expected a Strands model")
    return model


def load_hooks(paths: Sequence[str]) -> list[HookProvider]:
    """New hook providers by the dotted paths of their classes, or of functions without arguments.

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
    """What the class or function at a path makes."""
    make = load_function(path, what)
    with foreign_code("a user's constructor may raise anything") as outcome, exits_as_errors("it"):
        return make()
    e = outcome.error
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
    if isinstance(found, ModuleType):
        try:
            return list(load_tools_from_module(found, found.__name__.rpartition(".")[2]))
        except (AttributeError, TypeError) as e:
            raise ToolError(f"{path!r} is a module without Strands tools{_nearest('', found)}") from e
    if isinstance(found, ToolProvider):
        return [_guarded(found, path)]
    if isinstance(found, AgentTool):
        return [found]
    hint = "; decorate it with @strands.tool" if callable(found) and not isinstance(found, type) else ""
    raise ToolError(f"{path!r} is a {type(found).__name__}, expected a Strands tool{hint}")


def _resolve(path: str) -> object:
    """Import as much of a dotted path as is modules, then follow the attributes."""
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.replace(":", ".").split(".")):
        raise ToolError(f"{path!r} is not a dotted path; expected 'package.module.attribute'")
    module_path, _, attributes = path.partition(":")
    names = module_path.split(".")
    found: object = None
    depth = 0
    while depth < len(names) and (module := _import(".".join(names[: depth + 1]), path)) is not None:
        found = module
        depth += 1
    rest = [*names[depth:], *(attributes.split(".") if attributes else [])]
    if found is None or (attributes and depth < len(names)):
        remedy = "; pip install 'strands-rollout[tools]'" if names[0] == "strands_tools" else ""
        raise ToolError(f"can't load {path!r}: there is no module {'.'.join(names[: depth + 1])!r}{remedy}")
    for name in rest:
        if not hasattr(found, name):
            owner = getattr(found, "__name__", type(found).__name__)
            raise ToolError(f"can't load {path!r}: {owner!r} has no attribute {name!r}{_nearest(name, found)}")
        found = getattr(found, name)
    return found


def _import(module_path: str, path: str) -> ModuleType | None:
    """The module, or None where no such module exists; a module that exists but fails to import is an error."""
    with foreign_code("a user's module may raise anything while it is imported") as outcome, exits_as_errors("it"):
        return importlib.import_module(module_path)
    e = outcome.error
    if not isinstance(e, ModuleNotFoundError):
        raise ToolError(f"can't load {path!r}: importing {module_path!r} raised {type(e).__name__}: {e}") from e
    if e.name is not None and f"{module_path}.".startswith(f"{e.name}."):
        return None
    raise ToolError(f"can't load {path!r}: importing {module_path!r} needs {e.name!r}") from e


def _nearest(name: str, owner: object) -> str:
    """A hint: the closest public name, else the tools that the module does hold."""
    public = [known for known in dir(owner) if not known.startswith("_")]
    close = difflib.get_close_matches(name, public, n=1) if name else []
    if close:
        return f"; did you mean {close[0]!r}?"
    tools = [known for known in public if isinstance(getattr(owner, known, None), AgentTool)]
    return f"; its tools are {', '.join(tools)}" if tools else "; it holds no Strands tools"
