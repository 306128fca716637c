"""Tool providers, such as an MCP client, start and stop servers without blocking other episodes."""

import asyncio
import gc
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from harness import ANSWER, TOOL_CALL, run
from strands import tool
from strands.tools import ToolProvider
from strands.types.tools import AgentTool

CALL = TOOL_CALL.format(name="greet", arguments="{}")
WAIT_S = 10.0


@tool
async def greet() -> str:
    """Say hello."""
    return "hello"


class SlowProvider(ToolProvider):
    """Tool provider that waits, when it loads and when it is released, until the event loop has run something else."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waited: list[bool] = []
        self.consumers: set[Any] = set()
        self.released: list[Any] = []

    async def load_tools(self, **kwargs: Any) -> Sequence[AgentTool]:
        self._wait_for_the_loop()
        return [greet]

    def add_consumer(self, consumer_id: Any, **kwargs: Any) -> None:
        self.consumers.add(consumer_id)

    def remove_consumer(self, consumer_id: Any, **kwargs: Any) -> None:
        self.released.append(consumer_id)
        if consumer_id in self.consumers:
            self._wait_for_the_loop()
        self.consumers.discard(consumer_id)

    def _wait_for_the_loop(self) -> None:
        assert self.loop is not None
        turned = threading.Event()
        self.loop.call_soon_threadsafe(turned.set)
        self.waited.append(turned.wait(WAIT_S))


provider = SlowProvider()


@pytest.fixture
async def settings() -> dict[str, Any]:
    provider.__init__()  # type: ignore[misc]
    provider.loop = asyncio.get_running_loop()
    return {"tools": [f"{__name__}.provider"]}


async def test_tool_provider_start_and_stop_do_not_block_the_loop(
    shipped_tokenizer: Any, settings: dict[str, Any]
) -> None:
    played = await run(shipped_tokenizer, [CALL, ANSWER], settings=settings)
    assert played.facts["stop_reason"] == "completed"
    assert "hello" in played.context_after(0)
    assert provider.waited == [True, True]
    assert provider.consumers == set()


async def test_tool_provider_start_counts_towards_the_episode_timeout(
    shipped_tokenizer: Any, settings: dict[str, Any]
) -> None:
    stuck = threading.Event()
    provider._wait_for_the_loop = lambda: provider.waited.append(stuck.wait(WAIT_S))  # type: ignore[method-assign]
    try:
        played = await run(shipped_tokenizer, [CALL, ANSWER], settings={**settings, "episode_timeout_s": 0.2})
        assert (played.sample.status.value, played.facts["stop_reason"]) == ("failed", "setup_error")
        assert not stuck.is_set()
    finally:
        stuck.set()


async def test_tool_provider_is_not_released_by_the_finalizer(shipped_tokenizer: Any, settings: dict[str, Any]) -> None:
    """The finalizer may run at any time, without the lock, while another episode starts the provider."""
    gc.collect()  # so that agents of other tests release nothing later
    provider.released.clear()
    await run(shipped_tokenizer, [CALL, ANSWER], settings=settings)
    gc.collect()
    assert len(provider.released) == 1
