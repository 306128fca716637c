"""An agent's beginning and end, off the event loop where they may take long: tool providers start and stop servers.

Knows Strands' agents and tool providers; nothing of episodes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from strands import Agent
from strands.tools import ToolProvider
from strands.types.tools import AgentTool

# providers such as Strands' MCP client are shared by agents and start, stop and count these without a lock of their own
_PROVIDERS: Final = threading.Lock()


@asynccontextmanager
async def agent_with(tools: Sequence[Any], build: Callable[[Sequence[Any]], Agent]) -> AsyncIterator[Agent]:
    """Build an agent and release its tool providers when the block ends.

    Args:
        tools: The agent's; where a provider is among them, all that may wait for it happens in a thread.
        build: Makes the agent with the tools that it is given.
    """
    if not any(isinstance(tool, ToolProvider) for tool in tools):
        yield build(tools)
        return
    given = [_ReleasedOnce(tool) if isinstance(tool, ToolProvider) else tool for tool in tools]
    agent = await asyncio.to_thread(_locked, lambda: build(given))
    try:
        yield agent
    finally:
        # a cancelled caller does not wait; the thread goes on
        await asyncio.to_thread(_locked, agent.cleanup)


class _ReleasedOnce(ToolProvider):
    """A provider that one agent releases once.

    Strands' agents release their providers in their finalizers too, which run at any time and without the lock: another
    agent may be starting the provider just then.
    """

    def __init__(self, provider: ToolProvider) -> None:
        self._provider = provider
        self._consumers: set[Any] = set()

    async def load_tools(self, **kwargs: Any) -> Sequence[AgentTool]:  # noqa: ANN401 - as Strands declares it
        return await self._provider.load_tools(**kwargs)

    def add_consumer(self, consumer_id: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as above
        self._consumers.add(consumer_id)
        self._provider.add_consumer(consumer_id, **kwargs)

    def remove_consumer(self, consumer_id: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as above
        if consumer_id in self._consumers:
            self._consumers.remove(consumer_id)
            self._provider.remove_consumer(consumer_id, **kwargs)


def _locked(action: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever the action returns
    with _PROVIDERS:
        return action()
