"""Clients of MCP servers: a shared client for each server in the settings, or one per episode if `per_episode` is set.

A user's own clients, which are loaded as tools, are wrapped in the same way.

A lost server is an infrastructure fault. An episode that ends because of this fault is never trained.
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
from strands_rollout.secret_mask import mask_text
from strands_rollout.settings import McpServer
from strands_rollout.user_code import find_file

# beginning of an error result that Strands' client makes itself (strands/tools/mcp/mcp_client.py)
_CLIENT_ERROR_PREFIX: Final = "Tool execution failed"
_LOGGER: Final = logging.getLogger(__name__)
# these loggers write hundreds of lines for each agent whose server is down, and for each call of a broken server
_CONNECTION_LOGGERS: Final = frozenset(
    {"strands.tools.mcp.mcp_client", "mcp.client.session", "mcp.client.stdio", "client"}
)
_TRACEBACK_LOGGERS: Final = (
    *_CONNECTION_LOGGERS,
    "strands.tools.registry",
    "strands.tools.executors._executor",
    "asyncio",
    "root",
)
_HIDES_TRACEBACKS: Final = ContextVar("_HIDES_TRACEBACKS", default=False)


# for this long after a failed start, starts fail at once, so that hundreds of episodes don't wait in turn
_RESTART_DELAY_S: Final = 5.0
# one slot for each starting server: if hundreds started at once, none would be ready before its timeout
_START_SLOTS: Final = threading.BoundedSemaphore(max(4, os.cpu_count() or 1))
_END_TIMEOUT_S: Final = 5.0  # the MCP library kills a server 2 s after asking it to end
_CLIENTS: "Final[weakref.WeakSet[GuardedMcpClient]]" = weakref.WeakSet()


def mcp_tools(server: McpServer) -> ToolProvider:
    """Return the tool provider of a server; the connection opens with the first agent that uses it.

    Raises:
        ToolError: The server's settings are invalid.
    """
    if server.cwd is not None:
        server = server.model_copy(update={"cwd": str(find_file(server.cwd))})
    return _client(server) if server.per_episode else _shared_client(server.model_dump_json())


@functools.lru_cache(maxsize=64)
def _shared_client(server: str) -> ToolProvider:
    return _client(McpServer.model_validate_json(server))


@functools.lru_cache(maxsize=64)
def guard_client(client: MCPClient, name: str) -> ToolProvider:
    """Return a `GuardedMcpClient` around a user's client; all episodes share it."""
    return GuardedMcpClient(client, name)


def _client(server: McpServer) -> ToolProvider:
    name = server.shown_name
    try:
        [client] = MCPClient.load_servers({name: server.as_strands_config()})
    except ValueError as e:
        raise ToolError(f"the MCP server {name!r} can't be used: {mask_text(str(e))}") from e
    return GuardedMcpClient(client, name, is_shared=not server.per_episode)


class GuardedMcpClient(ToolProvider):
    """Wrapper of Strands' MCP client: tools raise SandboxError if the server is lost, but return the server's errors.

    Args:
        client: Strands' client.
        name: The server's name, for messages.
        is_shared: True if several episodes use the client.

    Attributes:
        may_be_lost: True after a call raised an exception, or after `end` ended the connection; `load_tools` checks
            the connection before another agent uses it.
    """

    def __init__(self, client: MCPClient, name: str, *, is_shared: bool = True) -> None:
        self.is_shared = is_shared
        self._client = client
        self._name = name
        self._consumers: set[Any] = set()
        self.may_be_lost = False
        self._lock = threading.Lock()  # Strands' client has no lock
        self._failure = ""  # error message of the last failed start
        self._failed_at = -_RESTART_DELAY_S
        self._startup_s = client._startup_timeout
        # the event loop and the timeout of the open connection
        self._limit: tuple[asyncio.AbstractEventLoop, asyncio.Timeout] | None = None
        self._is_late = False  # True if the timeout or `end` ended the last connection
        self._closed = threading.Event()
        self._closed.set()
        client._transport_callable = self._with_start_timeout(client._transport_callable)
        _CLIENTS.add(self)
        for logger in map(logging.getLogger, _TRACEBACK_LOGGERS):
            logger.addFilter(_filter_record)
        # Strands' client causes this warning when its thread has ended
        warnings.filterwarnings("ignore", "coroutine 'MCPClient.stop", RuntimeWarning)

    async def load_tools(self, **kwargs: object) -> Sequence[AgentTool]:
        """Connect if the client isn't connected, and return the server's tools.

        Raises:
            SandboxError: The server can't be reached, or failed to start less than `_RESTART_DELAY_S` ago.
            ToolError: A tool's name can't be made callable.
        """
        with self._lock:
            if time.monotonic() < self._failed_at + _RESTART_DELAY_S:
                raise SandboxError(self._failure)
            began_at = time.monotonic()
            try:
                with _START_SLOTS, _hide_tracebacks():
                    if self.may_be_lost:
                        self._drop_lost_connection()
                    tools = await self._client.load_tools(**kwargs)
                    self._reschedule(None)
            except Exception as e:  # Strands wraps the exception of the connection
                is_late = self._is_late or time.monotonic() >= began_at + self._startup_s
                late = f"it did not answer within startup_timeout={self._startup_s:g} s, or was stopped"
                reason = late if is_late else mask_text(_first_cause(e))
                self._failure = f"the MCP server {self._name!r} did not start: {reason}"
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
        """See `ToolProvider`; return without waiting.

        Agents call this in their finalizers, on whatever thread collects garbage. That may be the client's own thread.
        Waiting for the lock there could cause a deadlock, since the holder of the lock may be waiting for that thread.
        """
        if sys.is_finalizing():  # a new thread would not start any more, and Python 3.11 would wait for its start
            return
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down, which ends the connection
            threading.Thread(target=self._remove, args=(consumer_id,), kwargs=kwargs, daemon=True).start()

    def _remove(self, consumer_id: object, **kwargs: object) -> None:
        try:
            with self._lock, _hide_tracebacks():
                self._consumers.discard(consumer_id)
                self._client.remove_consumer(consumer_id, **kwargs)
        except Exception as e:  # the kind depends on how the connection ended
            _LOGGER.warning("the MCP server %r could not be stopped: %s", self._name, mask_text(_first_cause(e)))

    def _with_start_timeout(
        self, transport: Callable[[], AbstractAsyncContextManager[Any]]
    ) -> Callable[[], AbstractAsyncContextManager[Any]]:
        """Return the client's transport with a timeout that `end` can also trigger.

        Strands' client has a timeout of its own, but then waits for its thread to end, while the thread still waits for
        the server's answer.
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
                    finally:  # the timeout must not interrupt the ending of the server's process
                        self._limit = None
                        if not limit.expired():
                            limit.reschedule(None)
            finally:
                self._is_late = limit.expired()
                self._closed.set()

        return opened

    def _reschedule(self, when: float | None) -> None:
        """Set the connection's end time, by the clock of the connection's event loop; None for no end."""

        def reschedule(limit: asyncio.Timeout) -> None:
            with contextlib.suppress(RuntimeError):  # the connection has ended
                limit.reschedule(when)

        if self._limit is not None:
            loop, limit = self._limit
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(reschedule, limit)

    def end(self) -> None:
        """End the connection, or the attempt to open it, without waiting; another agent may open it again."""
        if not self._closed.is_set():
            self.may_be_lost = True
            self._reschedule(0.0)

    def wait_until_ended(self, timeout_s: float) -> bool:
        """Block until the connection has ended, and also the server if the client started it.

        Return False if this takes more than `timeout_s`.
        """
        return self._closed.wait(timeout_s)

    def _drop_lost_connection(self) -> None:
        """Stop the client if its connection is lost; the client can then connect again.

        This happens even if other agents use the client.
        """
        try:
            self.check_connection()
        except Exception:  # the kind depends on how the connection ended
            with contextlib.suppress(Exception):  # stopping raises the error of the lost connection again
                self._client.stop(None, None, None)
            for consumer_id in self._consumers:
                self._client.add_consumer(consumer_id)
        self.may_be_lost = False

    def check_connection(self) -> None:
        """Send a request to the server and block until it answers; raise an exception if the connection is lost."""
        self._client.list_tools_sync()

    def on_connection_lost(self, error: Exception) -> SandboxError:
        """Mark the connection as possibly lost, and return the error for the call to raise."""
        self.may_be_lost = True
        return SandboxError(f"the MCP server {self._name!r} was lost: {mask_text(str(error))}")


class _GuardedTool(WrappedTool):
    def __init__(self, tool: AgentTool, client: GuardedMcpClient, name: str) -> None:
        super().__init__(tool, name)
        self._client = client

    async def stream(self, tool_use: ToolUse, invocation_state: dict[str, Any], **kwargs: object) -> ToolGenerator:
        try:
            async for event in self._tool.stream(self._inner_use(tool_use), invocation_state, **kwargs):
                if _is_client_error(getattr(event, "tool_result", event)):
                    await asyncio.to_thread(self._client.check_connection)
                yield event
        except Exception as e:  # the kind depends on how the connection ended
            raise self._client.on_connection_lost(e) from e


@contextlib.contextmanager
def _hide_tracebacks() -> Iterator[None]:
    token = _HIDES_TRACEBACKS.set(True)
    try:
        yield
    finally:
        _HIDES_TRACEBACKS.reset(token)


def _filter_record(record: logging.LogRecord) -> bool:
    """Drop records of errors that the episode reports; drop the tracebacks of other connection errors."""
    if record.name == "asyncio":  # the connection's loop ended before Strands' client stopped it
        return "MCPClient.stop" not in record.getMessage()
    error = record.exc_info[1] if record.exc_info else None
    # older versions of mcp use the root logger
    if record.name in _CONNECTION_LOGGERS or record.getMessage().startswith("Unhandled exception in receive loop"):
        record.exc_info = None
    return not (_HIDES_TRACEBACKS.get() or isinstance(error, SandboxError))


def _first_cause(error: BaseException) -> str:
    """Return the message of an error's innermost cause, looking into wrappers and the first exception of each group."""
    text = str(error)
    while (below := getattr(error, "exceptions", (None,))[0] or error.__cause__ or error.__context__) is not None:
        error = below
        text = str(error) or text
    return f"connection refused: {text}" if isinstance(error, ConnectionRefusedError) else text


def end_connections() -> None:
    """End all connections to servers, open or opening; block up to `_END_TIMEOUT_S`."""
    clients = list(_CLIENTS)
    for client in clients:
        client.end()
    give_up_at = time.monotonic() + _END_TIMEOUT_S
    for client in clients:
        client.wait_until_ended(max(0.0, give_up_at - time.monotonic()))


os.register_at_fork(after_in_child=_CLIENTS.clear)  # the parent process ends its own connections
atexit.register(end_connections)  # a busy server would not notice the end of this process


def _is_client_error(result: object) -> bool:
    if not isinstance(result, dict) or result.get("status") != "error":
        return False
    texts = [block.get("text", "") for block in result.get("content", ())]
    return any(text.startswith(_CLIENT_ERROR_PREFIX) for text in texts)
