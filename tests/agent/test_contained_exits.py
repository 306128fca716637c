"""`contain_exits`: methods that users have replaced, and objects that several episodes share."""

import gc
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from strands.hooks import BeforeInvocationEvent, HookRegistry
from strands.multiagent.base import MultiAgentBase

from strands_rollout.agent.multi_agent import contain_exits


class Counter:
    """A user's wrapper of `invoke_callbacks_async`, which only the registry refers to."""

    def __init__(self, invoke: Callable[..., Any]) -> None:
        self._invoke, self.calls = invoke, 0

    async def invoke(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        return await self._invoke(*args, **kwargs)


def contain(registry: HookRegistry) -> None:
    team: Any = SimpleNamespace(runner=None, agents=[SimpleNamespace(hooks=registry)], tool_agents=[])
    contain_exits(team)


async def fire(registry: HookRegistry) -> None:
    agent: Any = None
    await registry.invoke_callbacks_async(BeforeInvocationEvent(agent=agent))


def leave(event: BeforeInvocationEvent) -> None:
    raise SystemExit(f"left {type(event).__name__}")


async def test_contain_exits_keeps_a_users_wrapper() -> None:
    registry = HookRegistry()
    counter = weakref.ref(wrapper := Counter(registry.invoke_callbacks_async))
    registry.invoke_callbacks_async = wrapper.invoke  # type: ignore[method-assign]
    del wrapper
    contain(registry)
    await fire(registry)
    kept = counter()
    assert kept is not None
    assert kept.calls == 1


async def test_contain_exits_wraps_a_shared_registry_once() -> None:
    registry = HookRegistry()
    registry.add_callback(BeforeInvocationEvent, leave)
    for _ in range(1200):
        contain(registry)
    with pytest.raises(RuntimeError, match="left BeforeInvocationEvent"):
        await fire(registry)


async def test_contain_exits_wraps_equal_and_unhashable_nodes() -> None:
    @dataclass
    class Node:
        name: str

        async def stream_async(self) -> AsyncIterator[str]:
            yield self.name
            raise SystemExit(self.name)

    class Graph(MultiAgentBase):
        def __init__(self, *executors: Any) -> None:
            self.nodes = {str(n): SimpleNamespace(executor=executor) for n, executor in enumerate(executors)}

        async def invoke_async(self, *_: Any, **__: Any) -> Any:
            """Not called here."""

    nodes = [Node("one"), Node("one")]
    graph: Any = Graph(*nodes)
    team: Any = SimpleNamespace(runner=graph, agents=[], tool_agents=[])
    contain_exits(team)
    for node in nodes:
        with pytest.raises(RuntimeError, match=r"SystemExit\('one'\)"):
            assert [event async for event in node.stream_async()] == ["one"]


async def test_contain_exits_makes_no_cycle() -> None:
    registry = HookRegistry()
    gc.disable()
    try:
        contain(registry)
        await fire(registry)
        alive = weakref.ref(registry)
        del registry
        assert alive() is None
    finally:
        gc.enable()
