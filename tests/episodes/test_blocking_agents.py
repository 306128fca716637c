"""Agents, hooks and plugins that block the event loop: moved to a thread, refused, or logged by the watchdog."""

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

released = threading.Event()
MESSAGES: Any = [{"role": role, "content": [{"text": "Hm."}]} for role in ("user", "assistant", "user", "assistant")]
threads: list[int] = []


class SteeringModel(Model):
    """Model of `LLMSteeringHandler`: waits for `released` in a thread, then guides the agent by structured output."""

    get_config = update_config = structured_output = lambda *_args, **_kwargs: {}

    async def stream(self, *_args: Any, **_kwargs: Any) -> Any:
        await asyncio.to_thread(released.wait, 60)
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockStart": {"start": {"toolUse": {"name": "_LLMSteering", "toolUseId": "s"}}}}
        yield {"contentBlockDelta": {"delta": {"toolUse": {"input": '{"decision": "guide", "reason": "Not yet."}'}}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use"}}


class UnreachableModel(SteeringModel):
    async def stream(self, *_args: Any, **_kwargs: Any) -> Any:
        raise ConnectionError("the model was called")
        yield


@tool
def add(code: str) -> str:
    """Return the numbers.

    Args:
        code: The numbers.
    """
    return code


def steered_agent(model: SGLangModel, _task: Any) -> Agent:
    return Agent(model=model, tools=[add], plugins=[LLMSteeringHandler("Be strict.", model=SteeringModel())])


async def test_llm_steering_handler_does_not_block_other_episodes(shipped_tokenizer) -> None:
    released.clear()
    playing = asyncio.create_task(
        run(
            shipped_tokenizer,
            [call_text("1", name="add"), ANSWER],
            settings={"agent_factory": f"{__name__}.steered_agent"},
        )
    )
    other = await run(shipped_tokenizer, [ANSWER])  # plays while the steering model waits
    assert not playing.done()
    released.set()
    played = await playing
    assert other.sample.status.value == played.sample.status.value == "completed"
    assert "Not yet." in played.context_after(0)


def _critic() -> Agent:
    return Agent(name="critic", model=sub_agent_model(), callback_handler=None)


@tool
async def ask_without_await(code: str) -> str:
    """Ask the critic.

    Args:
        code: The question.
    """
    return str(_critic()(code))


@tool
async def ask_in_a_thread(code: str) -> str:
    """Ask the critic.

    Args:
        code: The question.
    """
    return str(await asyncio.to_thread(_critic(), code))


@tool
def ask(code: str) -> str:
    """Ask the critic.

    Args:
        code: The question.
    """
    return str(_critic()(code))


@tool
async def summarize(code: str) -> str:
    """Summarize the critic's messages.

    Args:
        code: Anything.
    """
    critic = Agent(name="critic", model=sub_agent_model(), callback_handler=None, messages=[*MESSAGES])
    manager = SummarizingConversationManager(summary_ratio=0.5, preserve_recent_messages=1)
    manager.reduce_context(critic)
    return code


@tool
async def ask_a_swarm(code: str) -> str:
    """Ask the critic.

    Args:
        code: The question.
    """
    return str(Swarm([_critic()])(code))


class AskBeforeTurns(HookProvider):
    def register_hooks(self, registry: HookRegistry, **_more: object) -> None:
        registry.add_callback(BeforeModelCallEvent, self._before)

    async def _before(self, _event: BeforeModelCallEvent) -> None:
        _critic()("Now?")


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("tools", "ask_without_await", "agent 'critic' was called without await"),
        ("tools", "ask_a_swarm", "a Swarm was called without await"),
        ("tools", "summarize", "a SummarizingConversationManager was called to summarize"),
        ("hooks", "AskBeforeTurns", "agent 'critic' was called without await"),
    ],
)
async def test_call_without_await_on_the_loop_error_names_its_line(shipped_tokenizer, kind, name, message) -> None:
    turns = [call_text("?", name=name), ANSWER]
    settings = {kind: [f"{__name__}.{name}"]}
    played = await run(shipped_tokenizer, lambda _body, number: turns[min(number, 1)], settings=settings)
    assert (played.sample.status.value, played.facts["stop_reason"]) == ("failed", "setup_error")
    assert f"{message} ({__file__}, line " in played.facts["error"]


async def test_call_without_await_is_allowed_after_the_episode(shipped_tokenizer) -> None:
    await run(shipped_tokenizer, [ANSWER])
    released.set()
    with pytest.raises(ConnectionError, match="was called"):
        Agent(model=UnreachableModel(), callback_handler=None)("?")


@pytest.mark.parametrize("name", ["ask_in_a_thread", "ask"])
async def test_call_without_await_in_a_thread_is_allowed(shipped_tokenizer, name) -> None:
    turns = [call_text("?", name=name), ANSWER, ANSWER]
    played = await run(shipped_tokenizer, turns, settings={"tools": [f"{__name__}.{name}"]})
    assert (played.sample.status.value, played.facts["error"]) == ("completed", None)


def _block() -> None:
    released.wait(60)  # the log names this line


@tool
async def block(code: str) -> str:
    """Block the event loop.

    Args:
        code: Anything.
    """
    _block()
    return code


@pytest.fixture
def fast_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(watchdog, "_BLOCKED_S", 0.2)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.usefixtures("fast_watchdog")
async def test_watchdog_logs_a_blocking_line_once(shipped_tokenizer, caplog) -> None:
    def log_lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if "event_loop_blocked" in record.getMessage()]

    def release() -> None:
        _wait_until(lambda: bool(log_lines()))
        released.set()

    for _ in range(2):
        released.clear()
        releasing = threading.Thread(target=release)
        releasing.start()
        turns = [call_text("x", name="block"), ANSWER]
        played = await run(shipped_tokenizer, turns, settings={"tools": [f"{__name__}.block"]})
        releasing.join()
        assert played.sample.status.value == "completed"
    [line] = log_lines()
    number = _block.__code__.co_firstlineno + 1
    assert f"{__file__}, line {number}, in _block" in line


@pytest.mark.slow
@pytest.mark.usefixtures("fast_watchdog")
async def test_watchdog_ignores_a_busy_loop(shipped_tokenizer, caplog) -> None:
    """Many short steps: the loop is always late, but no step runs for long."""
    caplog.set_level(logging.WARNING)

    async def step() -> None:
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass

    async def run_steps() -> None:
        while not playing.done():
            await asyncio.gather(*(step() for _ in range(25)))

    turns = [*[call_text("1", name="add")] * 3, ANSWER]
    playing = asyncio.create_task(run(shipped_tokenizer, turns, settings={"tools": [f"{__name__}.add"]}))
    await run_steps()
    assert (await playing).sample.status.value == "completed"
    assert not [record for record in caplog.records if "event_loop_blocked" in record.getMessage()]
