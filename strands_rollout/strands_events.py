"""A parsed turn -> the Strands message that it is, and the stream events that describe it, in the order of the text.

Knows Strands' message and event shapes (strands.types.content, strands.types.streaming) and the parser's segments;
nothing of tokens or HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from strands_rollout.tool_parsers import ParseFailure, Reasoning, Segment, Text, ToolCall

INVALID_TOOL_CALL: Final = "invalid_tool_call"

StreamEvent = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model call gives an agent's loop.

    Attributes:
        message: The assistant's message.
        stop_reason: Strands' stop reason.
        usage: inputTokens, outputTokens, totalTokens, and cacheReadInputTokens where known.
        metrics: latencyMs, and timeToFirstByteMs: an answer comes whole.
    """

    message: dict[str, Any]
    stop_reason: str
    usage: dict[str, int]
    metrics: dict[str, int]


def failure_message(failure: ParseFailure) -> str:
    """What the policy is told about a tool call that could not be parsed."""
    return f"Error: the tool call could not be parsed and was not run: {failure.reason}"


def turn_answer(
    segments: Iterable[Segment], call_prefix: str, *, stop_reason: str, usage: dict[str, int], latency_s: float
) -> Answer:
    """One assistant message, as Strands' loop takes it.

    Args:
        segments: The turn's segments; empty text is left out, and a `ParseFailure` becomes a call of the tool
            `invalid_tool_call`, which no agent has, so that Strands answers it with an error result and the loop goes
            on.
        call_prefix: Tool-use ids are this and the segment's index.
        stop_reason: Strands' stop reason.
        usage: inputTokens, outputTokens, totalTokens, and cacheReadInputTokens where known.
        latency_s: Seconds that the request took.
    """
    blocks = (_block(segment, f"{call_prefix}{index}") for index, segment in enumerate(segments))
    latency_ms = round(latency_s * 1000)
    return Answer(
        message={"role": "assistant", "content": [block for block in blocks if block]},
        stop_reason=stop_reason,
        usage=usage,
        metrics={"latencyMs": latency_ms, "timeToFirstByteMs": latency_ms},
    )


def answer_events(answer: Answer) -> Iterator[StreamEvent]:
    """An answer as a stream: messageStart, the content blocks, messageStop, metadata."""
    yield {"messageStart": {"role": "assistant"}}
    for index, block in enumerate(answer.message["content"]):
        start, delta = _start_and_delta(block)
        yield {"contentBlockStart": {"contentBlockIndex": index, "start": start}}
        yield {"contentBlockDelta": {"contentBlockIndex": index, "delta": delta}}
        yield {"contentBlockStop": {"contentBlockIndex": index}}
    yield {"messageStop": {"stopReason": answer.stop_reason}}
    yield {"metadata": {"usage": answer.usage, "metrics": {"latencyMs": answer.metrics["latencyMs"]}}}


def _block(segment: Segment, call_id: str) -> dict[str, Any]:
    """A segment as a content block; empty where Strands has none for it."""
    if isinstance(segment, Text):
        return {"text": segment.text} if segment.text else {}
    if isinstance(segment, Reasoning):
        return {"reasoningContent": {"reasoningText": {"text": segment.text}}} if segment.text else {}
    if isinstance(segment, ToolCall):
        return {"toolUse": {"toolUseId": call_id, "name": segment.name, "input": segment.arguments}}
    arguments = {"raw": segment.raw, "reason": segment.reason}
    return {"toolUse": {"toolUseId": call_id, "name": INVALID_TOOL_CALL, "input": arguments}}


def _start_and_delta(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if "text" in block:
        return {}, {"text": block["text"]}
    if "reasoningContent" in block:
        return {}, {"reasoningContent": {"text": block["reasoningContent"]["reasoningText"]["text"]}}
    use = block["toolUse"]
    start = {"toolUse": {"toolUseId": use["toolUseId"], "name": use["name"]}}
    return start, {"toolUse": {"input": json.dumps(use["input"], ensure_ascii=False)}}
