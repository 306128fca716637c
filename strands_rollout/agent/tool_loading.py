"""The tools of an episode: Strands tools, hooks, conversation managers and functions by dotted path, and MCP servers.

Errors say what was found at a path instead. An MCP server has one client for all episodes, or one for each; one that is
lost is an outage, never an answer that the policy is to learn from.
"""

import asyncio
import contextlib
import difflib
import functools
import importlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Final, TypeAlias

from strands.agent.conversation_manager import ConversationManager, SummarizingConversationManager
from strands.hooks import HookProvider
from strands.tools import ToolProvider
from strands.tools.loader import load_tools_from_module
from strands.tools.mcp import MCPClient
from strands.types.tools import AgentTool, ToolGenerator, ToolSpec, ToolUse

from strands_rollout.aio import exits_as_errors
from strands_rollout.errors import SandboxError, ToolError, foreign_code
from strands_rollout.secret_mask import masked_text
from strands_rollout.settings import McpServer

Named: TypeAlias = Sequence[str | McpServer]
"""Tools as the settings name them."""

# how Strands' client begins an error result that is its own, not the server's (strands/tools/mcp/mcp_client.py)
_CLIENTS_OWN: Final = "Tool execution failed"
_LOGGER: Final = logging.getLogger(__name__)
# that log a traceback of hundreds of lines for each agent that can't have its server's tools
_TRACEBACK_LOGGERS: Final = ("strands.tools.mcp.mcp_client", "strands.tools.registry")
_HIDES_TRACEBACKS: Final = ContextVar("_HIDES_TRACEBACKS", default=False)


# for so long a server that did not start is not started again, by the hundreds of episodes that wait for it
_NOT_AGAIN_S: Final = 5.0
# a server that starts among hundreds would not be there in time
_STARTING: Final = threading.BoundedSemaphore(max(4, os.cpu_count() or 1))


def mcp_tools(server: McpServer) -> ToolProvider:
    """The tools of a server, to be given to an agent; its connection opens with the first agent that uses it.

    Raises:
        ToolError: The server can't be used as it is named.
    """
    return _client(server) if server.per_episode else _shared_client(server.model_dump_json())


@functools.lru_cache(maxsize=64)
def _shared_client(server: str) -> ToolProvider:
    return _client(McpServer.model_validate_json(server))


@functools.lru_cache(maxsize=64)
def guarded(client: MCPClient, name: str) -> ToolProvider:
    """The one guard of a client of the user's, which all episodes share."""
    return GuardedMcpClient(client, name)


def _client(server: McpServer) -> ToolProvider:
    name = server.shown_name
    try:
        [client] = MCPClient.load_servers({name: server.as_strands_config()})
    except ValueError as e:
        raise ToolError(f"the MCP server {name!r} can't be used: {masked_text(str(e))}") from e
    return GuardedMcpClient(client, name, is_shared=not server.per_episode)


class GuardedMcpClient(ToolProvider):
    """A client's tools, which tell an outage of their server from an answer of it.

    Args:
        client: Strands' own.
        name: Of the server, for messages.
        is_shared: Whether more than one episode uses it.
    """

    def __init__(self, client: MCPClient, name: str, *, is_shared: bool = True) -> None:
        self.is_shared = is_shared
        self._client = client
        self._name = name
        self._consumers: set[Any] = set()
        self.may_be_lost = False  # then the connection is tried before another agent relies on it
        self._lock = threading.Lock()  # Strands' client has none
        self._failure = ""  # why its last start failed
        self._failed_at = -_NOT_AGAIN_S
        for logger in map(logging.getLogger, _TRACEBACK_LOGGERS):
            logger.addFilter(_hides_tracebacks)
        # Strands' client does so where its own thread has ended
        warnings.filterwarnings("ignore", "coroutine 'MCPClient.stop", RuntimeWarning)

    async def load_tools(self, **kwargs: object) -> Sequence[AgentTool]:
        """Connect if need be; the server's tools.

        Raises:
            SandboxError: The server can't be reached, or could not a moment ago.
        """
        with self._lock:
            if time.monotonic() < self._failed_at + _NOT_AGAIN_S:
                raise SandboxError(self._failure)
            with foreign_code("Strands wraps what the connection raised") as outcome, _STARTING, _hidden_tracebacks():
                if self.may_be_lost:
                    self._drop_lost_connection()
                tools = await self._client.load_tools(**kwargs)
            if (error := outcome.error) is not None:
                self._failure = f"the MCP server {self._name!r} did not start: {masked_text(_first_cause(error))}"
                self._failed_at = time.monotonic()
                raise SandboxError(self._failure) from error
        return [_GuardedTool(tool, self) for tool in tools]

    def add_consumer(self, consumer_id: object, **kwargs: object) -> None:
        """See `ToolProvider`."""
        with self._lock:
            self._consumers.add(consumer_id)
            self._client.add_consumer(consumer_id, **kwargs)

    def remove_consumer(self, consumer_id: object, **kwargs: object) -> None:
        """See `ToolProvider`; returns at once.

        Agents call this in their finalizers, on whatever thread collects garbage: it may be the client's own, for which
        the holder of the lock waits.
        """
        with contextlib.suppress(RuntimeError):  # the interpreter is ending, and the connection with it
            threading.Thread(target=self._remove, args=(consumer_id,), kwargs=kwargs, daemon=True).start()

    def _remove(self, consumer_id: object, **kwargs: object) -> None:
        with self._lock, foreign_code("the kind depends on how the connection ended") as outcome, _hidden_tracebacks():
            self._consumers.discard(consumer_id)
            self._client.remove_consumer(consumer_id, **kwargs)
        if outcome.error is not None:
            _LOGGER.warning("the MCP server %r did not stop: %s", self._name, masked_text(_first_cause(outcome.error)))

    def _drop_lost_connection(self) -> None:
        """Let the client connect anew, though other agents use it yet."""
        with foreign_code("the kind depends on how the connection ended") as trial:
            self.try_connection()
        if trial.error is not None:
            with foreign_code("it says again that the connection is lost"):
                self._client.stop(None, None, None)
            for consumer_id in self._consumers:
                self._client.add_consumer(consumer_id)
        self.may_be_lost = False

    def try_connection(self) -> None:
        """Ask the server for something; raises whatever tells that it is gone. Blocks."""
        self._client.list_tools_sync()

    def lost(self, error: Exception) -> SandboxError:
        """What a call raises whose server was lost."""
        self.may_be_lost = True
        return SandboxError(f"the MCP server {self._name!r} was lost: {masked_text(str(error))}")


class _GuardedTool(AgentTool):
    """A server's tool that raises when the server is gone."""

    def __init__(self, tool: AgentTool, client: GuardedMcpClient) -> None:
        super().__init__()
        self._tool = tool
        self._client = client

    @property
    def tool_name(self) -> str:
        return self._tool.tool_name

    @property
    def tool_spec(self) -> ToolSpec:
        return self._tool.tool_spec

    @property
    def tool_type(self) -> str:
        return self._tool.tool_type

    async def stream(self, tool_use: ToolUse, invocation_state: dict[str, Any], **kwargs: object) -> ToolGenerator:
        """The tool's events; a SandboxError where the server does not answer any more."""
        with foreign_code("the kind depends on how the connection ended") as outcome:
            async for event in self._tool.stream(tool_use, invocation_state, **kwargs):
                if _is_clients_own(getattr(event, "tool_result", event)):
                    await asyncio.to_thread(self._client.try_connection)
                yield event
        if outcome.error is not None:
            raise self._client.lost(outcome.error) from outcome.error


@contextlib.contextmanager
def _hidden_tracebacks() -> Iterator[None]:
    token = _HIDES_TRACEBACKS.set(True)
    try:
        yield
    finally:
        _HIDES_TRACEBACKS.reset(token)


def _hides_tracebacks(record: logging.LogRecord) -> bool:
    """Whether a record is shown: not what Strands logs of an error that the episode reports in one line."""
    error = record.exc_info[1] if record.exc_info else None
    return not (_HIDES_TRACEBACKS.get() or isinstance(error, SandboxError))


def _first_cause(error: BaseException) -> str:
    """What all began with: `[Errno 111] Connection refused`, below the groups and wrappers of three libraries."""
    text = str(error)
    while (below := getattr(error, "exceptions", (None,))[0] or error.__cause__ or error.__context__) is not None:
        error = below
        text = str(error) or text
    return text


def _is_clients_own(result: object) -> bool:
    if not isinstance(result, dict) or result.get("status") != "error":
        return False
    texts = [block.get("text", "") for block in result.get("content", ())]
    return any(text.startswith(_CLIENTS_OWN) for text in texts)


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
    """Load tools as an episode does, and connect once to each MCP server among them.

    Raises:
        ToolError: See `load_tools`.
        SandboxError: A server can't be reached.
    """
    for provider in load_tools(named):
        if isinstance(provider, GuardedMcpClient):
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
    from strands_rollout.agent.tool_loading import mcp_tools  # the import takes long, and few have servers

    return mcp_tools(server)


def _guarded(provider: ToolProvider, path: str) -> ToolProvider:
    """Let an MCP client tell an outage of its server from an answer."""
    if "strands.tools.mcp" not in sys.modules:  # then it is none, and the import takes long
        return provider
    from strands.tools.mcp import MCPClient

    from strands_rollout.agent.tool_loading import guarded

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
