"""A turn as Strands' message, and as the stream from which Strands makes the same message."""

from typing import Any

import pytest
from strands.event_loop.streaming import process_stream

from strands_rollout.model.answers import ReadTurn, answer_events, turn_answer
from strands_rollout.record.tokens import Part, Turn
from strands_rollout.record.weight_versions import WeightSpan
from strands_rollout.tool_parsers import ParseFailure, Reasoning, Segment, Text, ToolCall

CALL = ToolCall("id", "look", {"of": ["é", 1.5, None, {"deep": []}], "empty": ""})
TURNS: dict[str, list[Segment]] = {
    "an answer": [Text("The answer is 4.")],
    "nothing": [Text("")],
    "reasoning and a call": [Reasoning("so…\n"), Text("\n\n"), CALL],
    "text between two calls": [CALL, Text(" and "), ToolCall("id2", "rest", {})],
    "a call that could not be parsed": [Text("x"), ParseFailure(raw="<tool_call>{", reason="no object", name=None)],
    "empty reasoning": [Reasoning(""), Text("4")],
}


@pytest.mark.parametrize("segments", TURNS.values(), ids=TURNS)
async def test_answer_message_equals_strands_own_from_its_events(segments: list[Segment]) -> None:
    part = Part(5, 7, "stop", "rid", 0.25, (WeightSpan(None, 5, 7),), cached_tokens=3)
    answer = turn_answer(ReadTurn("", segments, "tool_use"), "call_1_", Turn((part,)))
    assert answer.usage == {"inputTokens": 5, "outputTokens": 2, "totalTokens": 7, "cacheReadInputTokens": 3}

    async def chunks() -> Any:
        for event in answer_events(answer):
            yield event

    *_, made = [event async for event in process_stream(chunks())]
    stop_reason, message, made_usage, metrics = made["stop"]
    assert message == answer.message
    assert (stop_reason, made_usage) == (answer.stop_reason, answer.usage)
    assert metrics["latencyMs"] == answer.metrics["latencyMs"] == 250
