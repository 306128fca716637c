"""Read sampled turns: decode a turn's tokens, parse its tool calls, and make the turn's message and events for Strands.

`validated_output` reads an answer that must be an instance of a pydantic model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from strands.types.exceptions import StructuredOutputException

from strands_rollout.log_once import log_once
from strands_rollout.record.record import UNPARSED, Answer, Branch
from strands_rollout.record.tokens import Trajectory, Turn
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.tool_parsers import CutTurnParser, ParseFailure, Reasoning, Segment, Text, ToolCall, ToolParser
from strands_rollout.validation import explain_errors

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=BaseModel)

INVALID_TOOL_CALL: Final = "invalid_tool_call"

StreamEvent = dict[str, Any]

# The template shows a call's id as a letter (for the conversation) and eight digits (for the turn and the segment).
# Some templates require ids of nine letters and digits.
_LETTERS: Final = "cdefghijklmnopqrstuvwxyzab"


@dataclass(slots=True)
class ReadTurn:
    """A turn as text.

    Attributes:
        text: The sampled text, with its control tokens but without the token that ended the turn.
        segments: The parsed text: at least one segment, and no calls if the turn was cut.
        stop_reason: Strands' stop reason.
    """

    text: str
    segments: list[Segment]
    stop_reason: str


def read_turn(trajectory: Trajectory, turn: Turn, template: ChatTemplate, parser: ToolParser) -> ReadTurn:
    """Decode and parse a turn of a trajectory. A turn cut off by a token limit or an abort has no calls."""
    last = turn.parts[-1]
    ids = trajectory.token_ids[turn.parts[0].start : last.end]
    ended = last.finish_reason == "stop" and ids[-1] in (*template.end_ids, last.matched)
    text = template.encoder.decode(ids[:-1] if ended else ids)
    if last.finish_reason != "stop":
        cut: list[Segment] = []
        if isinstance(parser, CutTurnParser):
            cut = _split_turn(parser, parser.cut_segments, text, in_reasoning=template.opens_reasoning)
        is_usable = cut and not any(isinstance(segment, ToolCall | ParseFailure) for segment in cut)
        return ReadTurn(text, cut if is_usable else [Text(text)], "max_tokens")
    segments = _split_turn(parser, parser.segments, text, in_reasoning=template.opens_reasoning) or [Text("")]
    if any(isinstance(segment, ToolCall | ParseFailure) for segment in segments):
        return ReadTurn(text, segments, "tool_use")
    return ReadTurn(text, segments, "stop_sequence" if isinstance(last.matched, str) else "end_turn")


def _split_turn(
    parser: ToolParser, split: Callable[..., list[Segment]], text: str, *, in_reasoning: bool
) -> list[Segment]:
    try:
        return split(text, in_reasoning=in_reasoning)
    except MemoryError:
        raise
    except Exception as e:  # a user's parser may raise anything
        # if the error ended the episode, the policy could write such text to keep a sample out of training
        kind = (type(parser), type(e))  # one traceback per parser and error type: a policy may often write such text
        message = "bug in a tool parser parser=%s: it raised an exception on sampled text"
        log_once(logger, logging.ERROR, message, kind[0].__name__, key=kind, exc_info=e)
        return [ParseFailure(text, f"the turn can't be read: {type(e).__name__}")]


@dataclass(slots=True)
class AnswerReader:
    """Reader of one conversation's turns: text, reasoning, calls, and calls that can't be parsed.

    Attributes:
        template: The policy's chat template.
        parser: The parser of tool calls.
        conversation: The conversation's number. If it is not 0, tool-use ids contain it, since a history may have calls
            of several conversations.
    """

    template: ChatTemplate
    parser: ToolParser
    conversation: int

    def read(self, branch: Branch, index: int, number: int) -> Answer:
        """Parse a turn, store its text and its calls (parsed or not) on the branch, and return the answer.

        Args:
            branch: The turn's branch.
            index: Index of the turn in the branch's trajectory.
            number: Number of the turn in the conversation, from 1.
        """
        turn = branch.trajectory.turns[index]
        read = read_turn(branch.trajectory, turn, self.template, self.parser)
        branch.final_text, branch.stop_reason = read.text, read.stop_reason
        call_prefix = f"agent{self.conversation}_call_{number}_" if self.conversation else f"call_{number}_"
        for at, segment in enumerate(read.segments):
            if isinstance(segment, Text | Reasoning):
                continue
            use_id = call_id(call_prefix, at, segment)
            letter = _LETTERS[self.conversation % len(_LETTERS)]
            branch.calls.shown_ids[use_id] = segment.written_id or f"{letter}{number:05d}{at:03d}"
            if isinstance(segment, ToolCall):
                branch.calls.tools[use_id] = segment.name
            else:
                branch.calls.tools[use_id] = segment.name or INVALID_TOOL_CALL
                branch.calls.failure_texts[use_id] = failure_message(segment.reason)
                branch.parse_failures.append(segment)
        return turn_answer(read, call_prefix, turn)

    def read_all(self, branch: Branch) -> None:
        """Read the turns of a resumed branch, except an open turn."""
        branch.parse_failures.clear()
        for node in branch.nodes:
            if branch.trajectory.turns[node.turn].finish_reason != "abort":
                node.answer = self.read(branch, node.turn, node.turn + 1)


def call_id(call_prefix: str, index: int, segment: Segment) -> str:
    """Return the tool-use id of a turn's segment; the id of a call that can't be parsed ends with `UNPARSED`."""
    return f"{call_prefix}{index}{UNPARSED if isinstance(segment, ParseFailure) else ''}"


def failure_message(reason: str) -> str:
    """Return the tool result for a call that could not be parsed, given the reason of its `ParseFailure`."""
    return f"Error: the tool call could not be parsed and was not run: {reason}"


def turn_answer(read: ReadTurn, call_prefix: str, turn: Turn) -> Answer:
    """Return a turn as an answer for Strands' loop: one assistant message, with stop reason, usage and latency.

    Empty text and reasoning are omitted. A `ParseFailure` becomes a call of the tool `invalid_tool_call`, so that
    Strands answers it with an error result and the loop continues. The policy, too, may call a tool of that name; only
    the tool-use id distinguishes the two (see `call_id`).

    Args:
        read: The turn as text.
        call_prefix: Prefix of the turn's tool-use ids.
        turn: The turn's tokens and times.
    """
    blocks = [_content_block(segment, call_prefix, at) for at, segment in enumerate(read.segments)]
    first, end = turn.parts[0], turn.end
    usage = {"inputTokens": first.start, "outputTokens": end - first.start, "totalTokens": end}
    latency_ms = round(turn.latency_s * 1000)
    if first.cached_tokens is not None:
        usage["cacheReadInputTokens"] = first.cached_tokens
    return Answer(
        message={"role": "assistant", "content": [block for block in blocks if block]},
        stop_reason=read.stop_reason,
        usage=usage,
        metrics={"latencyMs": latency_ms, "timeToFirstByteMs": latency_ms},
    )


def answer_events(answer: Answer) -> Iterator[StreamEvent]:
    """Yield an answer as Strands' stream events: messageStart, the content blocks, messageStop, metadata."""
    yield {"messageStart": {"role": "assistant"}}
    for index, block in enumerate(answer.message["content"]):
        start, delta = _start_and_delta(block)
        yield {"contentBlockStart": {"contentBlockIndex": index, "start": start}}
        yield {"contentBlockDelta": {"contentBlockIndex": index, "delta": delta}}
        yield {"contentBlockStop": {"contentBlockIndex": index}}
    yield {"messageStop": {"stopReason": answer.stop_reason}}
    yield {"metadata": {"usage": answer.usage, "metrics": {"latencyMs": answer.metrics["latencyMs"]}}}


def _content_block(segment: Segment, call_prefix: str, index: int) -> dict[str, Any]:
    if isinstance(segment, Text):
        return {"text": segment.text} if segment.text else {}
    if isinstance(segment, Reasoning):
        return {"reasoningContent": {"reasoningText": {"text": segment.text}}} if segment.text else {}
    use_id = call_id(call_prefix, index, segment)
    if isinstance(segment, ToolCall):
        return {"toolUse": {"toolUseId": use_id, "name": segment.name, "input": segment.arguments}}
    arguments = {"raw": segment.raw, "reason": segment.reason}
    return {"toolUse": {"toolUseId": use_id, "name": INVALID_TOOL_CALL, "input": arguments}}


def _start_and_delta(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if "text" in block:
        return {}, {"text": block["text"]}
    if "reasoningContent" in block:
        return {}, {"reasoningContent": {"text": block["reasoningContent"]["reasoningText"]["text"]}}
    use = block["toolUse"]
    start = {"toolUse": {"toolUseId": use["toolUseId"], "name": use["name"]}}
    return start, {"toolUse": {"input": json.dumps(use["input"], ensure_ascii=False)}}


def validated_output(output_model: type[T], message: dict[str, Any], tool_name: str) -> T:
    """Read an answer as an instance of `output_model`: its first call of `tool_name` or, if there is none, its text.

    Raises:
        StructuredOutputException: The answer has no valid instance.
    """
    calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
    text = "".join(block.get("text", "") for block in message["content"]).strip()
    arguments = next((call["input"] for call in calls if call["name"] == tool_name), None)
    try:
        return output_model.model_validate(json.loads(text) if arguments is None else arguments)
    except (ValidationError, ValueError, RecursionError) as e:
        got = f"a call with {arguments!r}" if arguments is not None else f"the text {text[:200]!r}"
        reason = explain_errors(e, output_model) if isinstance(e, ValidationError) else e
        raise StructuredOutputException(
            f"got {got}; expected a call of the tool {tool_name!r} with valid arguments, or their JSON alone: {reason}"
        ) from e
