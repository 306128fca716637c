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

from strands_rollout.tool_thread import in_own_thread

# providers such as Strands' MCP client are shared by agents and start, stop and count these without a lock of their own
_PROVIDERS: Final = threading.Lock()
# a user's function that never ends must not stop all others
_PATIENCE_S: Final = 5.0


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
    given = released_once(tools)
    in_turn = _locked if any(_is_shared(tool) for tool in tools) else _at_once
    agent = await asyncio.to_thread(in_turn, lambda: build(given))
    try:
        yield agent
    finally:
        # a cancelled caller does not wait; the thread goes on
        await asyncio.to_thread(in_turn, agent.cleanup)


def released_once(tools: Sequence[Any]) -> list[Any]:
    """The tools, for agents that a user's function builds: each provider among them is released once by each agent."""
    return [_ReleasedOnce(tool) if isinstance(tool, ToolProvider) else tool for tool in tools]


async def built_in_thread(build: Callable[[], Any]) -> Any:  # noqa: ANN401 - the user's
    """What a function makes that may start tool providers, or block otherwise."""
    return await in_own_thread(_locked, has_last_moment=False)(build, _PATIENCE_S)


async def released(agents: Sequence[Agent]) -> None:
    """Release the tool providers of agents, in a thread: a server may take its time to stop."""
    await in_own_thread(_locked, has_last_moment=False)(lambda: _release(agents), _PATIENCE_S)


def _release(agents: Sequence[Agent]) -> None:
    for agent in agents:
        agent.cleanup()


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


def _is_shared(tool: object) -> bool:
    """Whether a tool is a provider that other episodes may use: all but those that say that they are one episode's."""
    return isinstance(tool, ToolProvider) and getattr(tool, "is_shared", True)


def _at_once(action: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever the action returns
    return action()


def _locked(action: Callable[[], Any], patience_s: float = -1) -> Any:  # noqa: ANN401 - whatever the action returns
    has_turn = _PROVIDERS.acquire(timeout=patience_s)
    try:
        return action()
    finally:
        if has_turn:
            _PROVIDERS.release()
