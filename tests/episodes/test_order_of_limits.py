"""Several limits reached in one turn: the first in the documented order is the stop reason, with and without hooks."""

from typing import Any

import pytest
from fake_sglang import Reply
from harness import ANSWER, call_text, ids_of, run
from strands.hooks import AfterToolsEvent, HookProvider, HookRegistry

TWO_CALLS = "\n".join(call_text(code).removesuffix("<|im_end|>") for code in ("1", "2")) + "<|im_end|>"


class NoOpHook(HookProvider):
    """Do nothing; with a hook, Strands sends all events."""

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(AfterToolsEvent, lambda _event: None)


LOOPS: dict[str, dict[str, Any]] = {"without hooks": {}, "with hooks": {"hooks": [f"{__name__}.NoOpHook"]}}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("limits", "turns", "reason"),
    [
        ({"max_tool_iterations": 0, "max_tool_calls": 0}, [TWO_CALLS], "max_tool_iterations"),
        ({"max_tool_calls": 1, "max_parallel_tool_calls": 2}, [TWO_CALLS], "max_tool_calls"),
        ({"max_tool_calls": 1, "max_parallel_tool_calls": 1}, [TWO_CALLS, ANSWER], "completed"),
        ({"max_turn_tokens": 30, "max_tool_iterations": 0}, ["cut"], "turn_length"),
    ],
    ids=["iterations before calls", "calls before parallel calls", "only calls that run count", "length before calls"],
)
async def test_generate_ends_at_the_first_of_several_limits(shipped_tokenizer, loop, limits, turns, reason):
    cut = Reply.tokens(ids_of(shipped_tokenizer, TWO_CALLS)[:30], "length")
    script = [cut if turn == "cut" else turn for turn in turns]
    done = await run(shipped_tokenizer, script, settings={**limits, **LOOPS[loop]})
    assert done.facts["stop_reason"] == reason
    assert len(done.fake.requests) == len(turns)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("turn_end", ["length", "iterations", "calls", "budget", "answer"])
async def test_generate_abort_precedes_tool_limits_and_budgets(shipped_tokenizer, loop, turn_end):
    """The abort flag is set while the turn is sampled."""
    started_turns: list[int] = []
    ids = ids_of(shipped_tokenizer, ANSWER if turn_end == "answer" else call_text())

    def script(_body: dict[str, Any], number: int) -> Reply:
        started_turns.append(number)
        return Reply.tokens(ids[:20], "length") if turn_end == "length" else Reply.tokens(ids)

    names = {
        "length": ("max_turn_tokens", 20),
        "iterations": ("max_tool_iterations", 0),
        "calls": ("max_tool_calls", 0),
    }
    params = {"max_new_tokens": len(ids) + 1} if turn_end == "budget" else {}
    settings = {
        **dict([names[turn_end]] if turn_end in names else []),
        **LOOPS[loop],
        "should_abort": lambda: bool(started_turns),
    }
    done = await run(shipped_tokenizer, script, settings=settings, params=params)
    # an episode that has ended keeps its stop reason
    assert done.facts["stop_reason"] == {"answer": "completed", "length": "turn_length"}.get(turn_end, "aborted")
