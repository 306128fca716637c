"""`ToolLimiter` on a plain Strands agent: which calls run, what the model reads, and how the loop ends."""

from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, call_text, ids_of
from strands import Agent, tool

from strands_rollout import SGLangModel, ToolLimiter
from strands_rollout.errors import ConfigError

ran: list[str] = []


@tool
async def execute_python_code(code: str) -> str:
    """Run code.

    Args:
        code: The code.
    """
    ran.append(code)
    return "ok"


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


async def run_with(tokenizer: Any, limiter: ToolLimiter, script: list[str]) -> tuple[Any, FakeSGLang]:
    async with FakeSGLang([Reply.tokens(ids_of(tokenizer, text)) for text in script]) as fake:
        model = SGLangModel(tokenizer=tokenizer, base_url=fake.base_url)
        agent = Agent(model=model, tools=[execute_python_code], hooks=[limiter], callback_handler=None)
        result = await agent.invoke_async("go")
    return result, fake


def parallel(*codes: str) -> str:
    return "\n".join(call_text(code).removesuffix("<|im_end|>") for code in codes) + "<|im_end|>"


async def test_tool_limiter_allows_an_answer_after_the_last_iteration(shipped_tokenizer: Any) -> None:
    limiter = ToolLimiter(max_iterations=2)
    result, fake = await run_with(shipped_tokenizer, limiter, [call_text("1"), call_text("2"), ANSWER])
    assert "34" in str(result)
    assert limiter.tripped is None
    assert (limiter.iterations, limiter.calls) == (2, 2)


async def test_tool_limiter_ends_the_loop_after_max_iterations(shipped_tokenizer: Any) -> None:
    limiter = ToolLimiter(max_iterations=2)
    result, fake = await run_with(shipped_tokenizer, limiter, [call_text("1"), call_text("2"), call_text("3"), ANSWER])
    assert ran == ["1", "2"]
    assert limiter.tripped == "max_iterations"
    assert len(fake.requests) == 3
    assert "max_iterations" in str(result)


async def test_tool_limiter_runs_no_call_of_a_turn_over_max_calls(shipped_tokenizer: Any) -> None:
    limiter = ToolLimiter(max_calls=3)
    await run_with(shipped_tokenizer, limiter, [parallel("1", "2"), parallel("3", "4"), ANSWER])
    assert sorted(ran) == ["1", "2"]
    assert limiter.tripped == "max_calls"


async def test_tool_limiter_answers_calls_over_max_parallel_calls(shipped_tokenizer: Any) -> None:
    limiter = ToolLimiter(max_parallel_calls=2)
    _, fake = await run_with(shipped_tokenizer, limiter, [parallel("1", "2", "3"), ANSWER])
    assert sorted(ran) == ["1", "2"]
    assert limiter.calls == 2
    assert limiter.tripped is None
    sent = shipped_tokenizer.decode(fake.requests[1].input_ids)
    assert "Not run: at most 2 tool calls are allowed in one turn." in sent
    assert sent.count("<tool_response>\nok\n") == 2


async def test_tool_limiter_counts_a_malformed_call_as_iteration_only(shipped_tokenizer: Any) -> None:
    limiter = ToolLimiter(max_iterations=1, max_calls=1)
    bad = "<tool_call>\n{nope}\n</tool_call><|im_end|>"
    await run_with(shipped_tokenizer, limiter, [bad, ANSWER])
    assert (limiter.iterations, limiter.calls, limiter.tripped) == (1, 0, None)


def test_tool_limiter_refuses_a_negative_limit() -> None:
    with pytest.raises(ConfigError, match="max_calls=-1; expected at least 0"):
        ToolLimiter(max_calls=-1)
