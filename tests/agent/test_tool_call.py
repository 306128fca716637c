"""`BoundedTool` and `ToolStats`: time limits, a thread per call, and counts; `callable_names`, `wrap_tools`."""

import asyncio
import sys
import threading
from typing import Any

import pytest
from harness import ANSWER, TOOL_CALL, run
from strands import Agent, tool
from strands.tools.tools import PythonAgentTool
from strands.types.tools import AgentTool

from strands_rollout.agent.limits import wrap_tools
from strands_rollout.agent.tool_call import BoundedTool, ToolStats, callable_names
from strands_rollout.errors import SandboxError, ToolError

release = threading.Event()


@tool
def hang() -> str:
    """Hang."""
    release.wait(30)
    return "late"


@tool
async def sleep_long() -> str:
    """Sleep."""
    await asyncio.sleep(30)
    return "late"


@tool
def thread_name() -> str:
    """Name the thread."""
    return threading.current_thread().name


@tool
def leave() -> str:
    """Leave the process."""
    sys.exit(3)


@tool
def stop_iterating() -> str:
    """Raise StopIteration."""
    raise StopIteration


@tool
async def broken_sandbox() -> str:
    """Raise SandboxError."""
    raise SandboxError("no zygote")


@tool
async def wrapped_fault() -> str:
    """Raise a RuntimeError that a SandboxError caused."""
    raise RuntimeError("the tool failed") from SandboxError("no zygote")


async def call(inner: Any, timeout_s: float | None = None, **arguments: Any) -> tuple[Any, ToolStats]:
    stats = ToolStats()
    bounded = BoundedTool(inner, timeout_s=timeout_s, stats=stats)
    use = {"toolUseId": "c", "name": bounded.tool_name, "input": arguments}
    events = [event async for event in bounded.stream(use, {})]
    assert len(events) == 1
    return getattr(events[0], "tool_result", events[0]), stats


@pytest.mark.parametrize("inner", [hang, sleep_long], ids=["sync", "async"])
async def test_bounded_tool_timeout_is_an_error_result(inner: Any) -> None:
    release.clear()
    result, stats = await call(inner, timeout_s=0.1)
    release.set()
    assert result["status"] == "error"
    assert result["content"] == [{"text": "Error: the tool did not finish within 0.1 seconds."}]
    assert (stats.timeouts, stats.errors) == (1, 1)
    assert stats.seconds >= 0.1


async def test_bounded_tool_hanging_sync_calls_block_nothing() -> None:
    release.clear()
    hanging = [asyncio.create_task(call(hang, timeout_s=20)) for _ in range(64)]
    await asyncio.sleep(0)
    result, _ = await call(thread_name)
    assert result["content"] == [{"text": "tool:thread_name"}]
    assert not any(task.done() for task in hanging)
    release.set()
    assert all(result["content"] == [{"text": "late"}] for result, _ in await asyncio.gather(*hanging))


@pytest.mark.parametrize("inner", [leave, stop_iterating])
async def test_bounded_tool_exit_ends_only_the_call(inner: Any) -> None:
    result, stats = await call(inner)
    assert result["status"] == "error"
    assert "the tool raised" in result["content"][0]["text"]
    assert stats.errors == 1


async def test_bounded_tool_runs_module_tools_in_a_thread() -> None:
    def module_tool(use: Any, **kwargs: Any) -> Any:
        name = threading.current_thread().name
        return {"toolUseId": use["toolUseId"], "status": "success", "content": [{"text": name}]}

    spec = {"name": "module_tool", "description": "x", "inputSchema": {"json": {"type": "object", "properties": {}}}}
    result, _ = await call(PythonAgentTool("module_tool", spec, module_tool))
    assert result["content"] == [{"text": "tool:module_tool"}]


class Raising(AgentTool):
    """An `AgentTool` subclass that raises."""

    tool_name, tool_type, calls = "raising", "own", 0
    tool_spec = {"name": "raising", "description": "Raise.", "inputSchema": {"json": {"type": "object"}}}  # noqa: RUF012

    async def stream(self, tool_use: Any, invocation_state: Any, **_more: Any) -> Any:
        type(self).calls += 1
        raise ValueError("bad luck")
        yield


async def test_bounded_tool_does_not_repeat_a_call_that_raised() -> None:
    stats = ToolStats()
    bounded = BoundedTool(Raising(), timeout_s=None, stats=stats)
    use: Any = {"toolUseId": "c", "name": "raising", "input": {}}
    with pytest.raises(ValueError, match="bad luck"):
        [event async for event in bounded.stream(use, {})]
    assert stats.errors == 1
    later = ToolStats(finished=dict(stats.finished), unread=set(stats.finished))
    [again] = [event async for event in BoundedTool(Raising(), timeout_s=None, stats=later).stream(use, {})]
    assert again["content"] == [{"text": "Error: bad luck"}]
    assert Raising.calls == 1


@pytest.mark.parametrize("inner", [broken_sandbox, wrapped_fault], ids=["plain", "wrapped"])
async def test_bounded_tool_records_sandbox_errors_separately(
    inner: Any,
) -> None:
    _, stats = await call(inner)
    assert isinstance(stats.infrastructure_error, SandboxError)
    assert stats.finished == {}


def test_callable_names_are_unique_and_valid() -> None:
    given = ["a.b", "a_b", "a-b.c", "a_b-c", "d e", "plain"]
    assert callable_names(given) == {
        "a.b": "a_b_2",
        "a_b": "a_b",
        "a-b.c": "a-b_c_2",
        "a_b-c": "a_b-c",
        "d e": "d_e",
        "plain": "plain",
    }
    long = callable_names([f"{'x' * 70}a", f"{'x' * 70}b"])
    assert {*map(len, long.values())} == {64}
    assert len({*long.values()}) == 2
    with pytest.raises(ToolError, match="no ASCII letter or digit"):
        callable_names(["\u67e5\u8be2"])


@tool(name="shop.order")
def order(number: int) -> str:
    """Order.

    Args:
        number: How many.
    """
    return f"ordered {number}"


async def test_tool_name_with_a_dot_is_called_by_its_new_name(shipped_tokenizer) -> None:
    turns = [TOOL_CALL.format(name="shop_order", arguments='{"number": 2}'), ANSWER]
    played = await run(shipped_tokenizer, turns, settings={"tools": [f"{__name__}.order"]})
    assert "ordered 2" in played.context_after(0)
    assert "shop.order" not in played.decode(played.fake.requests[0].input_ids)


def test_tool_stats_count_overlapping_calls_once() -> None:
    """Two calls overlap (0 to 10, 2 to 5), then one runs alone (20 to 21)."""
    stats = ToolStats()
    stats.begin_call(0.0)
    stats.begin_call(2.0)
    stats.end_call(2.0, 5.0)
    stats.end_call(0.0, 10.0)
    stats.begin_call(20.0)
    stats.end_call(20.0, 21.0)
    assert (stats.seconds, stats.waited_s) == (10.0 + 3.0 + 1.0, 10.0 + 1.0)


OLD_STYLE = PythonAgentTool("old", {"name": "old", "description": "", "inputSchema": {}}, lambda *_, **__: {})


@pytest.mark.parametrize("inner", [thread_name, sleep_long, OLD_STYLE], ids=["sync", "async", "module"])
async def test_wrap_tools_replaces_the_wrapper_of_an_earlier_episode(inner: Any) -> None:
    agent = Agent(tools=[inner], callback_handler=None)
    stats = [ToolStats() for _ in range(1200)]  # an agent that many episodes use as a tool
    for timeout_s, one in enumerate(stats, 1):
        wrap_tools(agent, timeout_s / len(stats) / 10, (), one)
    [bounded] = agent.tool_registry.registry.values()
    use: Any = {"toolUseId": "c", "name": bounded.tool_name, "input": {}}
    events = [event async for event in bounded.stream(use, {})]
    assert [bool(one.calls) for one in stats] == [False] * 1199 + [True]
    assert len(events) == 1
