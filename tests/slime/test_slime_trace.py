"""slime's trace of a sample: a closed span for every request and tool call."""

import gc
from collections import Counter
from typing import Any

import pytest
from fake_sglang import Reply
from interruptible_policy import ANSWER, Change, PolicyRequest, abort_after, call, turn
from slime_install import observability
from slime_interruptions import PROGRAM, Begin

pytestmark = pytest.mark.slime

PLANS = {"slow": [turn("Two at once:", call("work", "a"), call("work", "b")), turn(call("fail")), ANSWER]}
OURS = ("sglang_generate", "tool:")


def spans_of(sample: Any) -> list[dict[str, Any]]:
    """Return the spans of requests and tools in the order of their starts; `end` is None if a span is open."""
    events = [event for event in sample.trace["events"] if event["name"].startswith(OURS)]
    ends = {event["span_id"]: event for event in events if event["type"] == "span_end"}
    starts = [event for event in events if event["type"] == "span_start"]
    return [{**start, "end": ends.get(start["span_id"])} for start in starts]


@pytest.fixture
def complaints(caplog: pytest.LogCaptureFixture) -> Any:
    """Collect complaints of slime's trace, Strands and asyncio about spans, generators and contexts that end late."""
    gc.collect()  # flush complaints about leftovers of other tests
    caplog.clear()
    caplog.set_level("DEBUG", logger=observability("trace_utils").__name__)

    def found() -> list[str]:
        # leftovers complain when they are collected
        gc.collect()
        words = ("trace ", "different Context", "never retrieved", "Failed to detach", "was destroyed")
        return [message for message in caplog.messages if any(word in message for word in words)]

    return found


@pytest.mark.parametrize("player", [{}, PROGRAM])  # a program has its own tools
async def test_trace_has_a_span_per_request_and_tool_call(begin: Begin, complaints: Any, player: Any) -> None:
    def disturb(asked: PolicyRequest) -> Reply | Change | None:
        if asked.attempt == 1 and asked.visit == 0:
            return Reply.status(503, "busy")
        return abort_after(4) if asked.turn == 1 and not asked.done else None

    scene = await begin(PLANS, ["slow"], disturb, **player)
    await scene.rollouts.train()
    for sample in scene.rollouts.samples:
        spans = spans_of(sample)
        assert all(span["end"] for span in spans)
        [parent] = {span["parent_span_id"] for span in spans}
        reward = next(event for event in sample.trace["events"] if event["name"] == "reward_model")
        assert parent == reward["parent_span_id"] is not None
        # a retry is part of its request
        tools = [] if player else ["tool:work", "tool:work", "tool:fail"]
        names = [*["sglang_generate"] * 4, *tools]
        assert Counter(span["name"] for span in spans) == Counter(names)
        requests = [span for span in spans if span["name"] == "sglang_generate"]
        assert [span["end"]["attrs"]["finish_reason"] for span in requests] == ["stop", "abort", "stop", "stop"]
        budgets = [span["attrs"]["max_new_tokens"] for span in requests]
        assert (budgets[0], budgets) == (512, sorted(set(budgets), reverse=True))
        sampled = [span["end"]["attrs"]["completion_tokens"] for span in requests]
        assert sum(sampled) == len(scene.planned_ids(sample))
        if "e2e_latency" in observability("trace_utils").SGLANG_TRACE_META_KEYS:  # missing before slime 0.3.1
            assert all(span["end"]["attrs"]["e2e_latency"] == 0.001 for span in requests)
    assert complaints() == []
