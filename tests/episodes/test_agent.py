"""`run_episode`: the stop reason of each limit, and tools that change values they received or returned."""

from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, TOOL_CALL, call_text, ids_of
from strands import tool

from strands_rollout import EpisodeLimits, SGLangModel, StopReason, TokenLimits
from strands_rollout.agent.episode import EpisodeSetup, run_episode
from strands_rollout.agent.loop import IMPORT_FAULT
from strands_rollout.control import Control

executed: list[str] = []


@tool
async def execute_python_code(code: str) -> str:
    """Run code."""
    executed.append(code)
    return "ok"


@pytest.fixture(autouse=True)
def _clear_executed() -> None:
    executed.clear()


async def episode(tokenizer, script, limits=None, tokens=None, tools=(execute_python_code,), **more):
    replies = [Reply.tokens(ids_of(tokenizer, item)) if isinstance(item, str) else item for item in script]
    async with FakeSGLang(replies, context_length=4096) as fake:
        model = SGLangModel(tokenizer=tokenizer, base_url=fake.base_url, limits=tokens)
        done = await run_episode(
            model,
            [{"role": "user", "content": [{"text": "go"}]}],
            EpisodeSetup(system_prompt="Be brief.", tools=tools, limits=limits or EpisodeLimits(), **more),
        )
    assert fake.violations == []
    return done, model, fake


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (EpisodeLimits(max_tool_iterations=1), StopReason.MAX_TOOL_ITERATIONS),
        (EpisodeLimits(max_tool_calls=1), StopReason.MAX_TOOL_CALLS),
    ],
    ids=["iterations", "calls"],
)
async def test_run_episode_ends_at_tool_limits(
    shipped_tokenizer: Any, limits: EpisodeLimits, reason: StopReason
) -> None:
    done, _, fake = await episode(shipped_tokenizer, [call_text("1"), call_text("2"), ANSWER], limits)
    assert done.stop_reason is reason
    assert (executed, len(fake.requests)) == (["1"], 2)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (TokenLimits(max_turn_tokens=3), StopReason.TURN_LENGTH),
        (TokenLimits(max_response_tokens=3), StopReason.RESPONSE_LENGTH),
        (TokenLimits(max_turn_tokens=4, max_response_tokens=3), StopReason.RESPONSE_LENGTH),
    ],
)
async def test_run_episode_length_stop_names_the_limit(shipped_tokenizer, tokens, reason) -> None:
    done, _, fake = await episode(
        shipped_tokenizer, [Reply.tokens(ids_of(shipped_tokenizer, "1 2"), "length")], tokens=tokens
    )
    assert done.stop_reason is reason
    assert fake.requests[0].body["sampling_params"]["max_new_tokens"] == 3


async def test_run_episode_ends_at_a_full_context(shipped_tokenizer: Any) -> None:
    async with FakeSGLang([Reply.tokens(ids_of(shipped_tokenizer, ANSWER))]) as fake:
        probe = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url)
        prompt = await probe.count_tokens([{"role": "user", "content": [{"text": "go"}]}], None, "Be brief.")
    tokens = TokenLimits(max_context_tokens=prompt + 3)
    done, _, _ = await episode(
        shipped_tokenizer, [Reply.tokens(ids_of(shipped_tokenizer, "1 2"), "length")], tokens=tokens, tools=()
    )
    assert done.stop_reason is StopReason.CONTEXT_LENGTH


async def test_run_episode_timeout_cancels_generation_at_the_engine(shipped_tokenizer: Any) -> None:
    done, model, fake = await episode(shipped_tokenizer, [Reply.hang()], EpisodeLimits(episode_timeout_s=2.0))
    assert done.stop_reason is StopReason.EPISODE_TIMEOUT
    assert model.trajectory.turns == []
    assert fake.aborts or fake.disconnects


async def test_run_episode_checks_abort_before_the_first_request(shipped_tokenizer: Any) -> None:
    done, _, fake = await episode(shipped_tokenizer, [ANSWER], control=Control(lambda: True))
    assert done.stop_reason is StopReason.ABORTED
    assert fake.requests == []


@pytest.mark.skipif(bool(IMPORT_FAULT), reason="Strands' own loop runs, in which a tool can change the history")
async def test_run_episode_ignores_tools_that_mutate_values(
    shipped_tokenizer: Any,
) -> None:
    counted: dict[str, list[int]] = {"seen": []}

    @tool
    async def count(options: dict[str, Any]) -> dict[str, Any]:
        """Count."""
        options["inner"].clear()
        counted["seen"].append(1)
        return {"status": "success", "content": [{"json": counted}]}

    call = TOOL_CALL.format(name="count", arguments='{"options": {"inner": {"a": 1}}}')
    done, model, fake = await episode(shipped_tokenizer, [call, call, ANSWER], tools=(count,))
    assert (done.stop_reason, len(fake.requests)) == (StopReason.COMPLETED, 3)
    text = model.template.encoder.decode(model.trajectory.token_ids)
    assert ('"seen": [1]}' in text, '"seen": [1, 1]}' in text) == (True, True)
