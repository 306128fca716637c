"""slime's trace of a sample holds every request and every tool call, each with an end, whatever interrupted it."""

import gc
from collections import Counter
from typing import Any

import pytest
import slime_tools
from fake_sglang import Reply
from interruptible_policy import Asked, Change, abort_after, hold_after
from rough_weather import ANSWER, call, turn
from slime_install import observability
from slime_interruptions import Begin, Scene

pytestmark = pytest.mark.slime

PLANS = {
    "slow": [turn("Two at once:", call("work", "a"), call("hold", "b")), turn(call("fail")), ANSWER],
    "quick": [ANSWER],
}
OURS = ("sglang_generate", "tool:")


def spans_of(sample: Any) -> list[dict[str, Any]]:
    """Spans of requests and tools in the order of their beginning; `end` is None of one that is open."""
    events = [event for event in sample.trace["events"] if event["name"].startswith(OURS)]
    ends = {event["span_id"]: event for event in events if event["type"] == "span_end"}
    starts = [event for event in events if event["type"] == "span_start"]
    return [{**start, "end": ends.get(start["span_id"])} for start in starts]


def open_spans(samples: list[Any]) -> list[str]:
    return [span["name"] for sample in samples for span in spans_of(sample) if span["end"] is None]


@pytest.fixture
def complaints(caplog: pytest.LogCaptureFixture) -> Any:
    """What slime's trace, Strands and asyncio say of spans, generators and contexts that end where they should not."""
    caplog.set_level("DEBUG", logger=observability("trace_utils").__name__)

    def found() -> list[str]:
        # what was left open complains when it is collected
        gc.collect()
        words = ("trace ", "different Context", "never retrieved", "Failed to detach", "was destroyed")
        return [message for message in caplog.messages if any(word in message for word in words)]

    return found


async def started(begin: Begin, disturb: Any) -> Scene:
    def with_quick(asked: Asked) -> Reply | Change | None:
        return (lambda rest: rest.after(0.4)) if asked.name == "quick" else disturb(asked)

    sizes = {"partial_rollout": True, "rollout_batch_size": 1, "over_sampling_batch_size": 2}
    return await begin(PLANS, ["slow", "quick"], with_quick, settings={"abort_grace_s": 0.2}, **sizes)


async def test_each_request_and_each_tool_call_is_a_span(begin: Begin, complaints: Any) -> None:
    def disturb(asked: Asked) -> Reply | Change | None:
        if asked.attempt == 1 and asked.visit == 0:
            return Reply.status(503, "busy")
        return abort_after(4) if asked.turn == 1 and not asked.done else None

    scene = await begin(PLANS, ["slow"], disturb)
    await scene.rollouts.train()
    for sample in scene.rollouts.samples:
        spans = spans_of(sample)
        # a retry is part of its request
        names = ["sglang_generate", "tool:work", "tool:hold", *["sglang_generate"] * 2, "tool:fail", "sglang_generate"]
        assert Counter(span["name"] for span in spans) == Counter(names)
        requests = [span for span in spans if span["name"] == "sglang_generate"]
        assert [span["end"]["attrs"]["finish_reason"] for span in requests] == ["stop", "abort", "stop", "stop"]
        budgets = [span["attrs"]["max_new_tokens"] for span in requests]
        assert budgets[0] == 512
        assert budgets == sorted(set(budgets), reverse=True)
        sampled = [span["end"]["attrs"]["completion_tokens"] for span in requests]
        assert sum(sampled) == len(scene.planned_ids(sample))
        if "e2e_latency" in observability("trace_utils").SGLANG_TRACE_META_KEYS:  # not before 0.3.1
            assert all(span["end"]["attrs"]["e2e_latency"] == 0.001 for span in requests)
    assert complaints() == []


@pytest.mark.parametrize(
    ("trouble", "spans"),
    [
        (None, ["sglang_generate", "tool:work", "tool:hold"]),
        (hold_after(3), ["sglang_generate"]),
        (Reply.status(503, "busy"), ["sglang_generate"]),
    ],
    ids=["in a tool", "in a request", "between attempts"],
)
async def test_an_abort_leaves_nothing_open(begin: Begin, complaints: Any, trouble: Any, spans: list[str]) -> None:
    slime_tools.held.add("b")
    scene = await started(begin, lambda asked: trouble if asked.turn == 0 else None)
    await scene.rollouts.train()
    [group] = scene.buffer
    assert [sample.status.value for sample in group] == ["aborted"] * 2
    assert [sorted(span["name"] for span in spans_of(sample)) for sample in group] == [sorted(spans)] * 2
    assert complaints() == []
    assert open_spans(group) == []


async def test_what_a_sample_did_before_and_after_it_was_resumed_is_in_one_trace(begin: Begin, complaints: Any) -> None:
    cut = [True]
    scene = await started(begin, lambda asked: hold_after(2) if cut and asked.turn == 1 else None)
    await scene.rollouts.train()
    cut.clear()
    scene.rollouts.args.over_sampling_batch_size = 1
    await scene.rollouts.train(1)
    for sample in scene.rollouts.samples:
        names = [*["sglang_generate"] * 4, "tool:work", "tool:hold", "tool:fail"]
        assert Counter(span["name"] for span in spans_of(sample)) == Counter(names)
    assert open_spans(scene.rollouts.samples) == []
    assert scene.problems(scene.rollouts.samples) == []
    assert complaints() == []
