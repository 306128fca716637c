"""Clients of the MCP servers that the settings name: one for all episodes, or one for each.

A server that is lost is an outage, never an answer that the policy is to learn from.
"""

import asyncio
import functools
import os
import threading
from collections.abc import Sequence
from typing import Any, Final

from strands.tools import ToolProvider
from strands.tools.mcp import MCPClient
from strands.types.tools import AgentTool, ToolGenerator, ToolSpec, ToolUse

from strands_rollout.errors import SandboxError, ToolError, foreign_code
from strands_rollout.secret_mask import masked_text
from strands_rollout.settings import McpServer

# how Strands' client begins an error result that is its own, not the server's (strands/tools/mcp/mcp_client.py)
_CLIENTS_OWN: Final = "Tool execution failed"


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
        self._lock = threading.RLock()  # Strands' client has none, and agents' finalizers may come in between

    async def load_tools(self, **kwargs: object) -> Sequence[AgentTool]:
        """Connect if need be; the server's tools.

        Raises:
            SandboxError: The server can't be reached.
        """
        with foreign_code("Strands wraps what the connection raised") as outcome, self._lock, _STARTING:
            if self.may_be_lost:
                self._drop_lost_connection()
            tools = await self._client.load_tools(**kwargs)
        if (error := outcome.error) is not None:
            why = masked_text(str(error.__cause__ or error))
            raise SandboxError(f"the MCP server {self._name!r} did not start: {why}") from error
        return [_GuardedTool(tool, self) for tool in tools]

    def add_consumer(self, consumer_id: object, **kwargs: object) -> None:
        """See `ToolProvider`."""
        with self._lock:
            self._consumers.add(consumer_id)
            self._client.add_consumer(consumer_id, **kwargs)

    def remove_consumer(self, consumer_id: object, **kwargs: object) -> None:
        """See `ToolProvider`."""
        with self._lock:
            self._consumers.discard(consumer_id)
            self._client.remove_consumer(consumer_id, **kwargs)

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


def _is_clients_own(result: object) -> bool:
    if not isinstance(result, dict) or result.get("status") != "error":
        return False
    texts = [block.get("text", "") for block in result.get("content", ())]
    return any(text.startswith(_CLIENTS_OWN) for text in texts)
