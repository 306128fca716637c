"""Programs that block where they should await: the endpoint, deadlines and other episodes are not affected."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_sglang import Reply
from harness import ids_of, run
from programs import post
from strands import Agent
from strands.agent.conversation_manager import SummarizingConversationManager
from strands.models.openai import OpenAIModel
from strands.vended_plugins.steering import LLMSteeringHandler

from strands_rollout.agent import environment
from strands_rollout.agent.environment import current_task

DONE = "The answer is \\boxed{34}.<|im_end|>"
CHAT = [{"role": "user", "content": "17 * 2?"}]
let_go = threading.Event()


def _agent(endpoint: Any, **more: Any) -> Agent:
    client = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
    return Agent(model=OpenAIModel(client_args=client, model_id=endpoint.model), callback_handler=None, **more)


async def asks_without_await(task: Any, endpoint: Any) -> str:
    return str(_agent(endpoint)(task.text))


async def sums_up(task: Any, endpoint: Any) -> str:
    manager = SummarizingConversationManager(summary_ratio=0.5, preserve_recent_messages=1)
    agent = _agent(endpoint, conversation_manager=manager)
    await agent.invoke_async(task.text)
    manager.reduce_context(agent)
    return str(await agent.invoke_async("And now?"))


async def steers(task: Any, endpoint: Any) -> str:
    agent = _agent(endpoint)
    handler = LLMSteeringHandler("Let nothing pass.")
    call: Any = {"toolUseId": "a", "name": "add", "input": {}}
    try:
        await handler.steer_before_tool(agent=agent, tool_use=call)
    except Exception:
        return str(await agent.invoke_async(task.text))
    raise AssertionError("expected that the answer can't be read")


@pytest.mark.parametrize("program", ["asks_without_await", "sums_up", "steers"])
async def test_agent_in_async_program_may_be_called_without_await(shipped_tokenizer, program):
    async with asyncio.timeout(60):
        played = await run(
            shipped_tokenizer, lambda *_: DONE, settings={"agent_program": f"{__name__}.{program}", "fan_out": False}
        )
    assert (played.sample.status.value, played.facts["error"]) == ("completed", None)
    assert played.facts["final_text"].strip() == "The answer is \\boxed{34}."


async def blocks(_task: Any, endpoint: Any) -> None:
    await post(endpoint, {"messages": CHAT})
    let_go.wait(120)


async def answers(_task: Any, endpoint: Any) -> str:
    await post(endpoint, {"messages": CHAT})
    return "34"


@pytest.mark.parametrize("ended_by", ["episode_timeout", "aborted"])
async def test_blocking_program_is_ended_and_delays_no_other(shipped_tokenizer, ended_by):
    is_up = False
    limits = {"episode_timeout_s": 0.5} if ended_by == "episode_timeout" else {"should_abort": lambda: is_up}
    try:
        settings = {"agent_program": f"{__name__}.blocks", **limits}
        blocked = asyncio.create_task(run(shipped_tokenizer, [DONE], settings=settings, args={"partial_rollout": True}))
        other = await run(shipped_tokenizer, [DONE], settings={"agent_program": f"{__name__}.answers"})
        is_up = True
        played = await blocked
        assert not let_go.is_set()
    finally:
        let_go.set()
    let_go.clear()
    assert other.sample.status.value == "completed"
    assert played.facts["stop_reason"] == ended_by


class Pool:
    """A resource that must be used on the loop that opened it, and closed in the task that opened it."""

    def __init__(self) -> None:
        self.loop, self.task = asyncio.get_running_loop(), asyncio.current_task()
        self.left_by: object = None

    async def row(self) -> str:
        assert asyncio.get_running_loop() is self.loop
        return "34"


pools: list[Pool] = []


@asynccontextmanager
async def pool(_task: Any) -> AsyncIterator[Pool]:
    pools.append(opened := Pool())
    try:
        yield opened
    finally:
        opened.left_by = asyncio.current_task()


class World:
    """An environment that gets its score from a resource."""

    def __init__(self, task: Any) -> None:
        self._pool = task.resources["pool"]

    async def score(self) -> float:
        return float(await self._pool.row())


async def uses_a_resource(task: Any, endpoint: Any) -> str:
    assert current_task().resources == task.resources
    await post(endpoint, {"messages": CHAT})
    return await task.resources["pool"].row()


async def test_program_resources_and_environment_share_its_loop(shipped_tokenizer):
    pools.clear()
    settings = {
        "agent_program": f"{__name__}.uses_a_resource",
        "resources": {"pool": f"{__name__}.pool"},
        "environment": f"{__name__}.World",
    }
    played = await run(shipped_tokenizer, [DONE], settings=settings)
    assert (played.sample.status.value, played.facts["error"]) == ("completed", None)
    assert played.facts["environment_score"]["score"] == 34.0
    assert pools[0].left_by is pools[0].task is not None


async def stops_its_loop(_task: Any, endpoint: Any) -> None:
    await post(endpoint, {"messages": CHAT})
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)


async def has_a_task_that_exits(_task: Any, endpoint: Any) -> str:
    async def exits() -> None:
        raise SystemExit(1)

    await post(endpoint, {"messages": CHAT})
    leaked = asyncio.create_task(exits())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert isinstance(leaked.exception(), SystemExit)
    return "34"


async def cancels_itself_at_its_end(_task: Any, endpoint: Any) -> str:
    await post(endpoint, {"messages": CHAT})
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    return "34"


async def is_cancelled_after_its_end(_task: Any, endpoint: Any) -> str:
    await post(endpoint, {"messages": CHAT})
    current = asyncio.current_task()
    assert current is not None
    asyncio.get_running_loop().call_soon(current.cancel)
    return "34"


class Scored:
    """An environment whose score needs another pass of the loop."""

    def __init__(self, _task: Any) -> None:
        pass

    async def score(self) -> float:
        await asyncio.sleep(0)
        return 0.5


@pytest.mark.parametrize(
    "program", [stops_its_loop, has_a_task_that_exits, cancels_itself_at_its_end, is_cancelled_after_its_end]
)
async def test_program_cannot_end_its_loop_before_its_environment(shipped_tokenizer, program):
    settings = {"agent_program": f"{__name__}.{program.__name__}", "environment": f"{__name__}.Scored"}
    async with asyncio.timeout(60):
        played = await run(shipped_tokenizer, [DONE], settings=settings)
    assert (played.sample.status.value, played.facts["error"]) == ("completed", None)
    assert played.facts["environment_score"]["score"] == 0.5


async def test_program_cancelled_by_an_abort_logs_no_error(shipped_tokenizer, caplog):
    is_up = False

    def script(_body: Any, _number: int) -> Any:
        nonlocal is_up
        is_up = True
        return Reply.abort(ids_of(shipped_tokenizer, DONE)[:3])

    settings = {"agent_program": f"{__name__}.answers", "should_abort": lambda: is_up}
    played = await run(shipped_tokenizer, script, settings=settings, args={"partial_rollout": True})
    gc.collect()
    assert played.facts["stop_reason"] == "aborted"
    assert [record for record in caplog.records if record.name == "asyncio"] == []


async def test_blocking_program_resources_are_awaited_once(shipped_tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(environment, "CLOSE_TIMEOUT_S", 0.5)
    pools.clear()
    resources = dict.fromkeys(("first", "second", "third"), f"{__name__}.pool")
    settings = {"agent_program": f"{__name__}.blocks", "episode_timeout_s": 0.5, "resources": resources}
    try:
        played = await run(shipped_tokenizer, [DONE], settings=settings)
        messages = [record.getMessage() for record in caplog.records if "not_closed" in record.getMessage()]
    finally:
        let_go.set()
    assert played.facts["stop_reason"] == "episode_timeout"
    assert ["TimeoutError" in message for message in messages] == [True, False, False]
    assert all("still blocks the agent program" in message for message in messages[1:])
    async with asyncio.timeout(60):
        while any(one.left_by is None for one in pools[:2]):  # noqa: ASYNC110 - in another thread
            await asyncio.sleep(0.01)
    let_go.clear()
