"""The Hermes format, which Qwen uses: `<tool_call>{"name": "x", "arguments": {}}</tool_call>`, and `<think>`.

One scan from left to right. Whether a tag is a tag or content is settled by the JSON around it and by nothing else.
"""

from __future__ import annotations

import re
import uuid
from typing import Any, Final

from strands_rollout.tool_parsers.base import NewId, ParseFailure, Reasoning, Segment, Text, ToolCall
from strands_rollout.tool_parsers.strict_json import JSONSource, StrictJSONError, decode_object, skip_white_space

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
OPEN_REASONING: Final = "<think>"
CLOSE_REASONING: Final = "</think>"
_TAG: Final = re.compile(r"</?(?:think|tool_call)>")
_LEADING_NAME: Final = re.compile(r'\{\s{0,20}"name"\s{0,20}:\s{0,20}"([^"\\\x00-\x1f]{1,200})"')
_EXPECTED: Final = 'expected {"name": "<tool>", "arguments": {...}} and nothing else'


def random_id() -> str:
    """An id that no other call has, in any episode."""
    return f"call_{uuid.uuid4().hex}"


class HermesParser:
    """The format's parser; see `ToolParser`.

    Outside reasoning, `<think>` opens it and `<tool_call>` opens a call. Reasoning ends at the first `</think>`;
    without one all the rest is reasoning. A `</think>` that closes nothing says that everything before it was
    reasoning. A call's block holds one JSON object, white space around it, and `</tool_call>`; tags inside its strings
    are content. A block that does not follow this is a failure: it ends at the first `</tool_call>` after its JSON, or
    after its start if the JSON is broken, or else with the text.

    Args:
        new_id: Makes the ids of calls.
    """

    def __init__(self, new_id: NewId = random_id) -> None:
        self._new_id = new_id

    def parse(self, text: str, in_reasoning: bool = False) -> list[ToolCall | ParseFailure]:  # noqa: FBT001, FBT002
        """Return the calls and failures in the order of the text."""
        return [part for part in self.segments(text, in_reasoning) if isinstance(part, ToolCall | ParseFailure)]

    def segments(self, text: str, in_reasoning: bool = False) -> list[Segment]:  # noqa: FBT001, FBT002
        """Split the text into reasoning, text, calls and failures, in its order.

        The time is linear in the text: a broken block is read again from its first `</tool_call>` on, but of all blocks
        whose JSON seems to go on past a tag only one can do so at any one tag, since each quote that opens a string for
        one closes a string for the next.
        """
        source = JSONSource(text)
        found: list[Segment] = []
        reasoning_end, start = 0, 0
        if in_reasoning:
            reasoning_end, start = _end_of_reasoning(text, 0)
        while tag := _TAG.search(source, start):
            if tag[0] == CLOSE_REASONING:
                found.clear()
                reasoning_end, start = tag.span()
                continue
            _add(found, Text(text[start : tag.start()]))
            segment, start = self._read(source, tag)
            _add(found, segment)
        _add(found, Text(text[start:]))
        head: list[Segment] = []
        _add(head, Reasoning(text[:reasoning_end]))
        return head + found

    def _read(self, text: JSONSource, tag: re.Match[str]) -> tuple[Segment, int]:
        """What this tag begins, and the position after it."""
        if tag[0] == OPEN:
            return self._read_call(text, tag)
        if tag[0] == CLOSE:
            return ParseFailure(CLOSE, f"a {CLOSE} without its {OPEN} before it"), tag.end()
        end, after = _end_of_reasoning(text, tag.end())
        return Reasoning(text[tag.end() : end]), after

    def _read_call(self, text: JSONSource, tag: re.Match[str]) -> tuple[ToolCall | ParseFailure, int]:
        start = skip_white_space(text, tag.end())
        try:
            value, end = decode_object(text, start, origin=tag.end())
        except StrictJSONError as e:
            name = _LEADING_NAME.match(text, start)
            return _failure(text, tag.start(), tag.end(), [str(e)], name[1] if name else None)
        reasons = _faults(value)
        close = skip_white_space(text, end)
        if text.startswith(CLOSE, close):
            if not reasons:
                return ToolCall(self._new_id(), value["name"], value["arguments"]), close + len(CLOSE)
        elif close < len(text):
            got = text[close : close + 20]
            reasons.append(f"expected {CLOSE} after the JSON object, at offset {close - tag.end()}; got {got!r}")
        name = value.get("name")
        return _failure(text, tag.start(), end, reasons, name if isinstance(name, str) and name else None)


def _end_of_reasoning(text: str, start: int) -> tuple[int, int]:
    """Where reasoning that goes on at `start` ends, and where the text goes on after it."""
    end = text.find(CLOSE_REASONING, start)
    return (len(text), len(text)) if end < 0 else (end, end + len(CLOSE_REASONING))


def _add(found: list[Segment], segment: Segment) -> None:
    if not isinstance(segment, Text | Reasoning) or segment.text.strip():
        found.append(segment)


def _faults(value: dict[str, Any]) -> list[str]:
    """What is wrong with a call's object."""
    reasons = []
    if "name" not in value:
        reasons.append("the name is missing")
    elif not isinstance(value["name"], str) or not value["name"].strip():
        reasons.append(f"the name is {_kind(value['name'])}, not a string with characters in it")
    if "arguments" not in value:
        reasons.append("the arguments are missing")
    elif not isinstance(value["arguments"], dict):
        reasons.append(f"the arguments are {_kind(value['arguments'])}, not an object")
    others = [key for key in value if key not in ("name", "arguments")]
    if others:
        reasons.append(f"there are other keys than name and arguments: {', '.join(map(repr, others[:5]))}")
    return [*reasons, _EXPECTED] if reasons else []


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return "a string" if value else "an empty string"
    return "an array" if isinstance(value, list) else "an object" if isinstance(value, dict) else "a number"


def _failure(
    text: str, opened: int, search_from: int, reasons: list[str], name: str | None
) -> tuple[ParseFailure, int]:
    """The failure of the block that was opened there, and the position after the block."""
    close = text.find(CLOSE, search_from)
    end = len(text) if close < 0 else close + len(CLOSE)
    if close < 0:
        reasons = [*reasons, f"unterminated: there is no {CLOSE} after it"]
    return ParseFailure(text[opened:end], "; ".join(reasons), name), end
