"""Clients of the MCP servers that the settings name: one for all episodes, or one for each.

A server that is lost is an outage, never an answer that the policy is to learn from.
"""

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Any, Final

from strands.tools import ToolProvider
from strands.tools.mcp import MCPClient
from strands.types.tools import AgentTool, ToolGenerator, ToolUse

from strands_rollout.agent.tool_call import WrappedTool, callable_names
from strands_rollout.errors import SandboxError, ToolError
from strands_rollout.secret_mask import masked_text
from strands_rollout.settings import McpServer
from strands_rollout.user_code import beside

# how Strands' client begins an error result that is its own, not the server's (strands/tools/mcp/mcp_client.py)
_CLIENTS_OWN: Final = "Tool execution failed"
_LOGGER: Final = logging.getLogger(__name__)
# that log hundreds of lines for each agent that can't have its server's tools, and each call or line of a broken server
_OF_CONNECTIONS: Final = frozenset({"strands.tools.mcp.mcp_client", "mcp.client.session", "mcp.client.stdio", "client"})
_TRACEBACK_LOGGERS: Final = (
    *_OF_CONNECTIONS,
    "strands.tools.registry",
    "strands.tools.executors._executor",
    "asyncio",
    "root",
)
_HIDES_TRACEBACKS: Final = ContextVar("_HIDES_TRACEBACKS", default=False)


# for so long a server that did not start is not started again, by the hundreds of episodes that wait for it
_NOT_AGAIN_S: Final = 5.0
# a server that starts among hundreds would not be there in time
_STARTING: Final = threading.BoundedSemaphore(max(4, os.cpu_count() or 1))
_END_S: Final = 5.0  # a server that is told to end is killed after 2 s
_CLIENTS: "Final[weakref.WeakSet[GuardedMcpClient]]" = weakref.WeakSet()


def mcp_tools(server: McpServer) -> ToolProvider:
    """Return the tools of a server, for an agent; the connection opens with the first agent that uses it.

    Raises:
        ToolError: The server can't be used as it is named.
    """
    if server.cwd is not None:
        server = server.model_copy(update={"cwd": str(beside(server.cwd))})
    return _client(server) if server.per_episode else _shared_client(server.model_dump_json())


@functools.lru_cache(maxsize=64)
def _shared_client(server: str) -> ToolProvider:
    return _client(McpServer.model_validate_json(server))


@functools.lru_cache(maxsize=64)
def guarded(client: MCPClient, name: str) -> ToolProvider:
    """Return the one guard of a client of the user's, which all episodes share."""
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
        self._startup_s = client._startup_timeout
        self._limit: tuple[asyncio.AbstractEventLoop, asyncio.Timeout] | None = None  # of the connection that is open
        self._is_late = False  # whether the last one was ended by it
        self._closed = threading.Event()
        self._closed.set()
        client._transport_callable = self._limited(client._transport_callable)
        _CLIENTS.add(self)
        for logger in map(logging.getLogger, _TRACEBACK_LOGGERS):
            logger.addFilter(_hides_tracebacks)
        # Strands' client does so where its own thread has ended
        warnings.filterwarnings("ignore", "coroutine 'MCPClient.stop", RuntimeWarning)

    async def load_tools(self, **kwargs: object) -> Sequence[AgentTool]:
        """Connect if need be, and return the server's tools.

        Raises:
            SandboxError: The server can't be reached, or could not a moment ago.
            ToolError: A tool of it has a name that nobody can call.
        """
        with self._lock:
            if time.monotonic() < self._failed_at + _NOT_AGAIN_S:
                raise SandboxError(self._failure)
            began_at = time.monotonic()
            try:
                with _STARTING, _hidden_tracebacks():
                    if self.may_be_lost:
                        self._drop_lost_connection()
                    tools = await self._client.load_tools(**kwargs)
                    self._reschedule(None)
            except Exception as e:  # Strands wraps whatever the connection raised
                is_late = self._is_late or time.monotonic() >= began_at + self._startup_s
                late = f"it did not answer within startup_timeout={self._startup_s:g} s, or was given up"
                why = late if is_late else masked_text(_first_cause(e))
                self._failure = f"the MCP server {self._name!r} did not start: {why}"
                self._failed_at = time.monotonic()
                raise SandboxError(self._failure) from e
        names = callable_names([tool.tool_name for tool in tools])
        return [_GuardedTool(tool, self, names[tool.tool_name]) for tool in tools]

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
        if sys.is_finalizing():  # then no thread starts, and Python 3.11 would wait for it
            return
        with contextlib.suppress(RuntimeError):  # the interpreter is ending, and the connection with it
            threading.Thread(target=self._remove, args=(consumer_id,), kwargs=kwargs, daemon=True).start()

    def _remove(self, consumer_id: object, **kwargs: object) -> None:
        try:
            with self._lock, _hidden_tracebacks():
                self._consumers.discard(consumer_id)
                self._client.remove_consumer(consumer_id, **kwargs)
        except Exception as e:  # the kind depends on how the connection ended
            _LOGGER.warning("the MCP server %r did not stop: %s", self._name, masked_text(_first_cause(e)))

    def _limited(
        self, transport: Callable[[], AbstractAsyncContextManager[Any]]
    ) -> Callable[[], AbstractAsyncContextManager[Any]]:
        """The client's transport, whose block ends with a TimeoutError if the start takes too long, or by `end`.

        Strands' client gives up after its timeout, but then waits for its thread, and that for the server's answer.
        """

        @contextlib.asynccontextmanager
        async def opened() -> AsyncIterator[Any]:
            limit = asyncio.timeout(self._startup_s)
            self._closed.clear()
            self._limit, self._is_late = (asyncio.get_running_loop(), limit), False
            try:
                async with limit, transport() as streams:
                    try:
                        yield streams
                    finally:  # what ends a server's process must not be cut short
                        self._limit = None
                        if not limit.expired():
                            limit.reschedule(None)
            finally:
                self._is_late = limit.expired()
                self._closed.set()

        return opened

    def _reschedule(self, when: float | None) -> None:
        """Let the connection end at a time of its loop; None for no time."""

        def reschedule(limit: asyncio.Timeout) -> None:
            with contextlib.suppress(RuntimeError):  # it has ended
                limit.reschedule(when)

        if self._limit is not None:
            loop, limit = self._limit
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(reschedule, limit)

    def end(self) -> None:
        """End the connection, or the attempt to open it; another agent may open it again. Does not wait."""
        if not self._closed.is_set():
            self.may_be_lost = True
            self._reschedule(0.0)

    def has_ended(self, within_s: float) -> bool:
        """Wait for the end of the connection and of a server that was started for it; False if they go on. Blocks."""
        return self._closed.wait(within_s)

    def _drop_lost_connection(self) -> None:
        """Let the client connect anew, though other agents use it yet."""
        try:
            self.try_connection()
        except Exception:  # the kind depends on how the connection ended
            with contextlib.suppress(Exception):  # it says again that the connection is lost
                self._client.stop(None, None, None)
            for consumer_id in self._consumers:
                self._client.add_consumer(consumer_id)
        self.may_be_lost = False

    def try_connection(self) -> None:
        """Ask the server for something; raises whatever tells that it is gone. Blocks."""
        self._client.list_tools_sync()

    def lost(self, error: Exception) -> SandboxError:
        """Note that the server was lost; return what its call raises."""
        self.may_be_lost = True
        return SandboxError(f"the MCP server {self._name!r} was lost: {masked_text(str(error))}")


class _GuardedTool(WrappedTool):
    """A server's tool that raises when the server is gone."""

    def __init__(self, tool: AgentTool, client: GuardedMcpClient, name: str) -> None:
        super().__init__(tool, name)
        self._client = client

    async def stream(self, tool_use: ToolUse, invocation_state: dict[str, Any], **kwargs: object) -> ToolGenerator:
        """Yield the tool's events; raise a SandboxError where the server does not answer any more."""
        try:
            async for event in self._tool.stream(self._own_use(tool_use), invocation_state, **kwargs):
                if _is_clients_own(getattr(event, "tool_result", event)):
                    await asyncio.to_thread(self._client.try_connection)
                yield event
        except Exception as e:  # the kind depends on how the connection ended
            raise self._client.lost(e) from e


@contextlib.contextmanager
def _hidden_tracebacks() -> Iterator[None]:
    token = _HIDES_TRACEBACKS.set(True)
    try:
        yield
    finally:
        _HIDES_TRACEBACKS.reset(token)


def _hides_tracebacks(record: logging.LogRecord) -> bool:
    """Filter a record of Strands' of an error that the episode reports in one line: False, or without its traceback."""
    if record.name == "asyncio":  # of a loop that ended before Strands' client told it to
        return "MCPClient.stop" not in record.getMessage()
    error = record.exc_info[1] if record.exc_info else None
    # an older mcp logs by the root logger
    if record.name in _OF_CONNECTIONS or record.getMessage().startswith("Unhandled exception in receive loop"):
        record.exc_info = None
    return not (_HIDES_TRACEBACKS.get() or isinstance(error, SandboxError))


def _first_cause(error: BaseException) -> str:
    """Return the first cause, `[Errno 111] Connection refused`, below the groups and wrappers of three libraries."""
    text = str(error)
    while (below := getattr(error, "exceptions", (None,))[0] or error.__cause__ or error.__context__) is not None:
        error = below
        text = str(error) or text
    return f"connection refused: {text}" if isinstance(error, ConnectionRefusedError) else text


def end_connections() -> None:
    """End the connections to all servers, and those that are being opened. Blocks, for seconds at most."""
    clients = list(_CLIENTS)
    for client in clients:
        client.end()
    give_up_at = time.monotonic() + _END_S
    for client in clients:
        client.has_ended(max(0.0, give_up_at - time.monotonic()))


os.register_at_fork(after_in_child=_CLIENTS.clear)  # they are the parent's to end
atexit.register(end_connections)  # a server that is busy does not see that this process ends


def _is_clients_own(result: object) -> bool:
    if not isinstance(result, dict) or result.get("status") != "error":
        return False
    texts = [block.get("text", "") for block in result.get("content", ())]
    return any(text.startswith(_CLIENTS_OWN) for text in texts)
