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

# providers such as Strands' MCP client are shared by agents and start, stop and count these without a lock of their own
_PROVIDERS: Final = threading.Lock()


@asynccontextmanager
async def agent_with(tools: Sequence[Any], build: Callable[[], Agent]) -> AsyncIterator[Agent]:
    """Build an agent and release its tool providers when the block ends.

    Args:
        tools: The agent's; where a provider is among them, all that may wait for it happens in a thread.
        build: Makes the agent.
    """
    if not any(isinstance(tool, ToolProvider) for tool in tools):
        yield build()
        return
    agent = await asyncio.to_thread(_locked, build)
    try:
        yield agent
    finally:
        # a cancelled caller does not wait; the thread goes on
        await asyncio.to_thread(_locked, agent.cleanup)


def _locked(action: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever the action returns
    with _PROVIDERS:
        return action()
