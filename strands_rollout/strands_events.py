"""A parsed turn -> the Strands stream events that describe it completely, in the order of the text.

Knows Strands' event shapes (strands.types.streaming) and the parser's segments; nothing of tokens or HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

from strands_rollout.tool_parsers import ParseFailure, Reasoning, Segment, Text, ToolCall

INVALID_TOOL_CALL: Final = "invalid_tool_call"

StreamEvent = dict[str, Any]


def failure_message(failure: ParseFailure) -> str:
    """What the policy is told about a tool call that could not be parsed."""
    return f"Error: the tool call could not be parsed and was not run: {failure.reason}"


def turn_events(
    segments: Iterable[Segment], call_prefix: str, *, stop_reason: str, usage: dict[str, int], latency_s: float
) -> Iterator[StreamEvent]:
    """Events of one assistant message.

    Args:
        segments: The turn's segments; a `ParseFailure` becomes a call of the tool `invalid_tool_call`, which no agent
            has, so that Strands answers it with an error result and the loop goes on.
        call_prefix: Tool-use ids are this and the segment's index.
        stop_reason: Strands' stop reason.
        usage: inputTokens, outputTokens, totalTokens, and cacheReadInputTokens where known.
        latency_s: Seconds that the request took.

    Yields:
        messageStart, the content blocks, messageStop, metadata.
    """
    yield {"messageStart": {"role": "assistant"}}
    for index, segment in enumerate(segments):
        start, delta = _start_and_delta(segment, f"{call_prefix}{index}")
        yield {"contentBlockStart": {"contentBlockIndex": index, "start": start}}
        yield {"contentBlockDelta": {"contentBlockIndex": index, "delta": delta}}
        yield {"contentBlockStop": {"contentBlockIndex": index}}
    yield {"messageStop": {"stopReason": stop_reason}}
    yield {"metadata": {"usage": usage, "metrics": {"latencyMs": round(latency_s * 1000)}}}


def _start_and_delta(segment: Segment, call_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if isinstance(segment, Text):
        return {}, {"text": segment.text}
    if isinstance(segment, Reasoning):
        return {}, {"reasoningContent": {"text": segment.text}}
    if isinstance(segment, ToolCall):
        name, arguments = segment.name, segment.arguments
    else:
        name, arguments = INVALID_TOOL_CALL, {"raw": segment.raw, "reason": segment.reason}
    use = {"toolUseId": call_id, "name": name}
    return {"toolUse": use}, {"toolUse": {"input": json.dumps(arguments, ensure_ascii=False)}}
