"""Agents, hooks and plugins that block the event loop: played off it, refused by name, or named in the log."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from harness import ANSWER, call_text, run
from strands import Agent, tool
from strands.agent.conversation_manager import SummarizingConversationManager
from strands.hooks import BeforeModelCallEvent, HookProvider, HookRegistry
from strands.models import Model
from strands.multiagent import Swarm
from strands.vended_plugins.steering import LLMSteeringHandler

from strands_rollout import SGLangModel, sub_agent_model, watchdog

let_go = threading.Event()
MESSAGES: Any = [{"role": role, "content": [{"text": "Hm."}]} for role in ("user", "assistant", "user", "assistant")]
threads: list[int] = []


class Judge(Model):
    """Decides in a thread that the test can see, by a call of the tool of its structured output."""

    get_config = update_config = structured_output = lambda *_given, **_more: {}

    async def stream(self, *_given: Any, **_more: Any) -> Any:
        await asyncio.to_thread(let_go.wait, 60)
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockStart": {"start": {"toolUse": {"name": "_LLMSteering", "toolUseId": "s"}}}}
        yield {"contentBlockDelta": {"delta": {"toolUse": {"input": '{"decision": "guide", "reason": "Not yet."}'}}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use"}}


class Refuses(Judge):
    async def stream(self, *_given: Any, **_more: Any) -> Any:
        raise ConnectionError("it was asked")
        yield


@tool
def add(code: str) -> str:
    """Adds.

    Args:
        code: Numbers.
    """
    return code


def steered(model: SGLangModel, _task: Any) -> Agent:
    return Agent(model=model, tools=[add], plugins=[LLMSteeringHandler("Be strict.", model=Judge())])


async def test_llm_steering_handler_does_not_block_other_episodes(shipped_tokenizer) -> None:
    let_go.clear()
    playing = asyncio.create_task(
        run(shipped_tokenizer, [call_text("1", name="add"), ANSWER], settings={"agent_factory": f"{__name__}.steered"})
    )
    other = await run(shipped_tokenizer, [ANSWER])  # while the judge waits
    assert not playing.done()
    let_go.set()
    played = await playing
    assert other.sample.status.value == played.sample.status.value == "completed"
    assert "Not yet." in played.context_after(0)


def _critic() -> Agent:
    return Agent(name="critic", model=sub_agent_model(), callback_handler=None)


@tool
async def asks_without_await(code: str) -> str:
    """Asks.

    Args:
        code: A question.
    """
    return str(_critic()(code))


@tool
async def asks_in_a_thread(code: str) -> str:
    """Asks.

    Args:
        code: A question.
    """
    return str(await asyncio.to_thread(_critic(), code))


@tool
def asks(code: str) -> str:
    """Asks.

    Args:
        code: A question.
    """
    return str(_critic()(code))


@tool
async def sums_up(code: str) -> str:
    """Sums up.

    Args:
        code: Anything.
    """
    critic = Agent(name="critic", model=sub_agent_model(), callback_handler=None, messages=[*MESSAGES])
    manager = SummarizingConversationManager(summary_ratio=0.5, preserve_recent_messages=1)
    manager.reduce_context(critic)
    return code


@tool
async def asks_a_swarm(code: str) -> str:
    """Asks.

    Args:
        code: A question.
    """
    return str(Swarm([_critic()])(code))


class AsksBeforeTurns(HookProvider):
    def register_hooks(self, registry: HookRegistry, **_more: object) -> None:
        registry.add_callback(BeforeModelCallEvent, self._before)

    async def _before(self, _event: BeforeModelCallEvent) -> None:
        _critic()("Now?")


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("tools", "asks_without_await", "agent 'critic' was called without await"),
        ("tools", "asks_a_swarm", "a Swarm was called without await"),
        ("tools", "sums_up", "a SummarizingConversationManager was called to summarize"),
        ("hooks", "AsksBeforeTurns", "agent 'critic' was called without await"),
    ],
)
async def test_call_without_await_on_the_loop_error_names_its_line(shipped_tokenizer, kind, name, words) -> None:
    turns = [call_text("?", name=name), ANSWER]
    given = {kind: [f"{__name__}.{name}"]}
    played = await run(shipped_tokenizer, lambda _body, number: turns[min(number, 1)], settings=given)
    assert (played.sample.status.value, played.facts["stop_reason"]) == ("failed", "setup_error")
    assert f"{words} ({__file__}, line " in played.facts["error"]


async def test_call_without_await_is_allowed_after_the_episode(shipped_tokenizer) -> None:
    await run(shipped_tokenizer, [ANSWER])
    let_go.set()
    with pytest.raises(ConnectionError, match="asked"):
        Agent(model=Refuses(), callback_handler=None)("?")


@pytest.mark.parametrize("name", ["asks_in_a_thread", "asks"])
async def test_call_without_await_in_a_thread_is_allowed(shipped_tokenizer, name) -> None:
    turns = [call_text("?", name=name), ANSWER, ANSWER]
    played = await run(shipped_tokenizer, turns, settings={"tools": [f"{__name__}.{name}"]})
    assert (played.sample.status.value, played.facts["error"]) == ("completed", None)


def _blocks() -> None:
    let_go.wait(60)  # the line that the log names


@tool
async def blocks(code: str) -> str:
    """Blocks.

    Args:
        code: Anything.
    """
    _blocks()
    return code


@pytest.fixture
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(watchdog, "_BLOCKED_S", 0.2)


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.usefixtures("quick_watch")
async def test_watchdog_logs_a_blocking_line_once(shipped_tokenizer, caplog) -> None:
    def told() -> list[str]:
        return [one.getMessage() for one in caplog.records if "event_loop_blocked" in one.getMessage()]

    def release() -> None:
        _until(lambda: bool(told()))
        let_go.set()

    for _ in range(2):
        let_go.clear()
        releasing = threading.Thread(target=release)
        releasing.start()
        turns = [call_text("x", name="blocks"), ANSWER]
        played = await run(shipped_tokenizer, turns, settings={"tools": [f"{__name__}.blocks"]})
        releasing.join()
        assert played.sample.status.value == "completed"
    [words] = told()
    number = _blocks.__code__.co_firstlineno + 1
    assert f"{__file__}, line {number}, in _blocks" in words


@pytest.mark.slow
@pytest.mark.usefixtures("quick_watch")
async def test_watchdog_ignores_a_busy_loop(shipped_tokenizer, caplog) -> None:
    """So many short steps that the loop is late all the time, and none of them for long."""
    caplog.set_level(logging.WARNING)

    async def step() -> None:
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass

    async def load() -> None:
        while not playing.done():
            await asyncio.gather(*(step() for _ in range(25)))

    turns = [*[call_text("1", name="add")] * 3, ANSWER]
    playing = asyncio.create_task(run(shipped_tokenizer, turns, settings={"tools": [f"{__name__}.add"]}))
    await load()
    assert (await playing).sample.status.value == "completed"
    assert not [one for one in caplog.records if "event_loop_blocked" in one.getMessage()]
