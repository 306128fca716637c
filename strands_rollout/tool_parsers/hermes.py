"""The Hermes format, which Qwen uses: `<tool_call>{"name": "x", "arguments": {}}</tool_call>`, and `<think>`.

Whether a tag is a tag or content is settled by the JSON around it and by nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Final

from strands_rollout.tool_parsers.base import ParseFailure, Segment, ToolCall
from strands_rollout.tool_parsers.call_object import call_faults, leading_name, name_of
from strands_rollout.tool_parsers.strict_json import JSONSource, StrictJSONError, decode_object, skip_white_space
from strands_rollout.tool_parsers.tagged_parser import TaggedParser

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"


class HermesParser(TaggedParser):
    """The format's parser; see `ToolParser`.

    A call's block holds one JSON object, white space around it, and `</tool_call>`; tags inside its strings are
    content. A block that does not follow this is a failure: it ends at the first `</tool_call>` after its JSON, or
    after its start if the JSON is broken, or else with the text.

    The time is linear in the text: a broken block is read again from its first `</tool_call>` on, but of all blocks
    whose JSON seems to go on past a tag only one can do so at any one tag, since each quote that opens a string for
    one closes a string for the next.
    """

    tags: ClassVar[re.Pattern[str]] = re.compile(r"</?(?:think|tool_call)>")

    def _read_call(
        self,
        text: JSONSource,
        tag: re.Match[str],
        *,
        is_first: bool,  # noqa: ARG002 - calls may stand anywhere
    ) -> tuple[Sequence[Segment], int]:
        if tag[0] == CLOSE:
            return [ParseFailure(CLOSE, f"a {CLOSE} without its {OPEN} before it")], tag.end()
        segment, end = self._read_block(text, tag)
        return [segment], end

    def _read_block(self, text: JSONSource, tag: re.Match[str]) -> tuple[ToolCall | ParseFailure, int]:
        start = skip_white_space(text, tag.end())
        try:
            value, end = decode_object(text, start, origin=tag.end())
        except StrictJSONError as e:
            return _failure(text, tag.start(), tag.end(), [str(e)], leading_name(text, start))
        reasons = call_faults(value)
        close = skip_white_space(text, end)
        if text.startswith(CLOSE, close):
            if not reasons:
                return ToolCall(self._new_id(), value["name"], value["arguments"]), close + len(CLOSE)
        elif close < len(text):
            got = text[close : close + 20]
            reasons.append(f"expected {CLOSE} after the JSON object, at offset {close - tag.end()}; got {got!r}")
        return _failure(text, tag.start(), end, reasons, name_of(value))


def _failure(
    text: str, opened: int, search_from: int, reasons: list[str], name: str | None
) -> tuple[ParseFailure, int]:
    """The failure of the block that was opened there, and the position after the block."""
    close = text.find(CLOSE, search_from)
    end = len(text) if close < 0 else close + len(CLOSE)
    if close < 0:
        reasons = [*reasons, f"unterminated: there is no {CLOSE} after it"]
    return ParseFailure(text[opened:end], "; ".join(reasons), name), end
