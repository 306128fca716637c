"""Aborts and time limits end an episode during any wait; a tool that cancels itself ends only its call."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, call_text, ids_of
from strands import tool

from strands_rollout import EpisodeLimits, SGLangModel, StopReason
from strands_rollout.agent.episode import EpisodeSetup, run_episode
from strands_rollout.agent.run import Episode
from strands_rollout.control import Control
from strands_rollout.errors import EngineAbortedError

started, released = threading.Event(), threading.Event()


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    """Release hanging tools at the end of the test."""
    started.clear()
    released.clear()
    yield
    released.set()


@tool(name="execute_python_code")
async def wait(code: str) -> str:
    """Wait."""
    started.set()
    await asyncio.sleep(600)
    return code


@tool(name="execute_python_code")
def block(code: str) -> str:
    """Block a thread."""
    started.set()
    released.wait(60)
    return code


@tool(name="execute_python_code")
async def cancel_itself(code: str) -> str:
    """Cancel the tool's own task."""
    raise asyncio.CancelledError


async def episode(tokenizer: Any, script: Any, inner_tool: Any, **more: Any) -> tuple[Episode, SGLangModel, FakeSGLang]:
    async with FakeSGLang(script, context_length=4096) as fake:
        model = SGLangModel(tokenizer=tokenizer, base_url=fake.base_url)
        question = [{"role": "user", "content": [{"text": "go"}]}]
        setup = EpisodeSetup(system_prompt=None, tools=[inner_tool], limits=EpisodeLimits(), **more)
        done = await run_episode(model, question, setup)
    return done, model, fake


@pytest.mark.parametrize("waits_in", ["async tool", "sync tool", "retry", "generation"])
async def test_run_episode_abort_ends_any_wait(shipped_tokenizer: Any, waits_in: str) -> None:
    call_turn = Reply.tokens(ids_of(shipped_tokenizer, call_text()))
    second_reply = {"retry": Reply.status(503, "busy"), "generation": Reply.hang()}.get(waits_in)

    def script(_request: dict[str, Any], number: int) -> Reply:
        if number == 0 or second_reply is None:
            return call_turn
        started.set()
        return second_reply

    inner_tool = {"async tool": wait, "sync tool": block}.get(waits_in, return_immediately)
    done, model, _ = await episode(shipped_tokenizer, script, inner_tool, control=Control(started.is_set))
    assert done.stop_reason is StopReason.ABORTED
    assert model.trajectory.token_ids[-len(call_turn.ids) :] == list(call_turn.ids)


@tool(name="execute_python_code")
async def return_immediately(code: str) -> str:
    """Return immediately."""
    return code


async def test_run_episode_tool_that_cancels_itself_is_an_error(shipped_tokenizer: Any) -> None:
    script = [Reply.tokens(ids_of(shipped_tokenizer, text)) for text in (call_text(), ANSWER)]
    done, _, fake = await episode(shipped_tokenizer, script, cancel_itself)
    assert done.stop_reason is StopReason.COMPLETED
    assert done.tools.errors == 1
    assert "the tool was cancelled by its own code" in shipped_tokenizer.decode(fake.requests[1].input_ids)


async def test_run_episode_empty_turn_is_an_engine_error(shipped_tokenizer: Any) -> None:
    done, model, _ = await episode(shipped_tokenizer, [Reply.tokens([])], return_immediately)
    assert done.stop_reason is StopReason.ENGINE_ERROR
    assert "returned no tokens, with the finish reason 'stop'" in str(done.error)
    assert model.trajectory.turns == []


async def test_control_deadline_with_a_broken_abort_of_another() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context.get("exception")))

    def broken() -> bool:
        raise OSError("the flag is gone")

    with pytest.raises(EngineAbortedError):
        async with Control(broken).deadline(30), Control(lambda: bool(reported)).deadline(30):
            await asyncio.sleep(600)
    assert [str(error) for error in reported] == ["the flag is gone"]


class _SilentModel:
    """Model whose request waits for an engine that does not answer."""

    def __init__(self) -> None:
        self.sent_at, self.stopped = time.monotonic(), 0

    async def stop_generating(self) -> bool:
        self.stopped += 1
        return True


@pytest.mark.parametrize(("limit_s", "grace_s"), [(0.2, 600.0), (600.0, 0.2), (None, 0.2)])
async def test_control_deadline_ends_at_grace_or_limit(limit_s, grace_s) -> None:
    model = _SilentModel()
    deadline = Control(lambda: True, engine_grace_s=lambda _sent_at: grace_s).deadline(limit_s, model=model)
    async with asyncio.timeout(60):
        with pytest.raises(EngineAbortedError):
            async with deadline:
                await asyncio.sleep(600)
    assert (deadline.expired(), deadline.was_aborted, model.stopped) == (True, True, 1)


@tool(name="execute_python_code")
async def ignore_cancellation(code: str) -> str:
    """Wait and ignore cancellation."""
    started.set()
    while not released.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)
    return code


@pytest.mark.parametrize("end", ["abort", "tool time-out", "episode time-out"])
async def test_run_episode_does_not_wait_for_a_hanging_tool(shipped_tokenizer: Any, end: str) -> None:
    script = [Reply.tokens(ids_of(shipped_tokenizer, text)) for text in (call_text(), ANSWER)]
    limits = EpisodeLimits(
        tool_timeout_s=0.2 if end == "tool time-out" else None,
        episode_timeout_s=0.2 if end == "episode time-out" else None,
    )
    async with FakeSGLang(script, context_length=4096) as fake:
        done = await run_episode(
            SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url),
            [{"role": "user", "content": [{"text": "go"}]}],
            EpisodeSetup(
                system_prompt=None,
                tools=[ignore_cancellation],
                limits=limits,
                control=Control(started.is_set if end == "abort" else lambda: False),
            ),
        )
    released.set()  # the episode ended before this line, so it did not wait for the tool
    reasons = {"abort": StopReason.ABORTED, "episode time-out": StopReason.EPISODE_TIMEOUT}
    assert done.stop_reason is reasons.get(end, StopReason.COMPLETED)
