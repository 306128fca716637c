"""Mistral's formats: `[TOOL_CALLS]` and an array of calls, or a name and its arguments; reasoning is `[THINK]`.

- Tokenizers up to v7: `[TOOL_CALLS] [{"name": "x", "arguments": {}}]`, each with an "id" or without.
- v11: `[TOOL_CALLS]x[CALL_ID]123456789[ARGS]{}`; v13: `[TOOL_CALLS]x[ARGS]{}`; once per call.

All are taken; they can't be confused. Sources: the models' chat templates (as in vllm-project/vllm,
examples/tool_chat_template_mistral_official.jinja; Mistral-Small-3.2's and Ministral-3's) and sgl-project/sglang,
function_call/mistral_detector.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from strands_rollout.tool_parsers.base import MalformedError, ParseFailure, Segment, ToolCall
from strands_rollout.tool_parsers.call_blocks import decode_arguments, got
from strands_rollout.tool_parsers.call_object import call_faults, leading_name, name_of
from strands_rollout.tool_parsers.strict_json import JSONSource, StrictJSONError, decode_object, skip_white_space
from strands_rollout.tool_parsers.tagged_parser import TaggedParser

OPEN: Final = "[TOOL_CALLS]"
_HEADER: Final = re.compile(r"([^\s\[\]{}\"]{1,200})(?:\[CALL_ID\]([A-Za-z0-9]{9}))?\[ARGS\]")
_ID: Final = re.compile(r"[A-Za-z0-9]{9}")
_NAME: Final = re.compile(r"[^\s\[\]{}\"]{1,200}")


class MistralParser(TaggedParser):
    """The formats' parser; see `ToolParser`.

    An array that is no valid JSON is one failure, up to the next `[TOOL_CALLS]` or the end; an element of a valid one
    that is no call is a failure of its own.
    """

    tags: ClassVar[re.Pattern[str]] = re.compile(r"\[TOOL_CALLS\]|\[/?THINK\]|\[ARGS\]|\[CALL_ID\]")
    open_reasoning: ClassVar[str] = "[THINK]"
    close_reasoning: ClassVar[str] = "[/THINK]"

    def _read_call(
        self,
        text: JSONSource,
        tag: re.Match[str],
        *,
        is_first: bool,  # noqa: ARG002 - calls may stand anywhere
    ) -> tuple[Sequence[Segment], int]:
        if tag[0] != OPEN:
            return [ParseFailure(tag[0], f"a {tag[0]} without {OPEN} before it")], tag.end()
        start = skip_white_space(text, tag.end())
        read = (
            self._read_array if text.startswith("[", start) and not text.startswith(OPEN, start) else self._read_named
        )
        try:
            return read(text, tag.start(), start)
        except MalformedError as e:
            end = text.find(OPEN, e.position or tag.end())
            end = len(text) if end < 0 else end
            return [ParseFailure(text[tag.start() : end], str(e), e.name)], end

    def _read_named(self, text: JSONSource, _opened: int, start: int) -> tuple[list[ToolCall | ParseFailure], int]:
        header = _HEADER.match(text, start)
        if header is None:
            meant = _NAME.match(text, start)
            expected = f"expected a JSON array of calls, or <tool>[ARGS]{{...}}, after {OPEN}"
            raise MalformedError(f"{expected}; got {got(text, start)}", meant[0] if meant else None)
        arguments, end = decode_arguments(text, header.end(), header[1])
        return [ToolCall(self._new_id(), header[1], arguments, header[2])], end

    def _read_array(self, text: JSONSource, opened: int, start: int) -> tuple[list[ToolCall | ParseFailure], int]:
        elements: list[tuple[dict[str, Any], int, int]] = []
        position, mark = start, "["
        while text.startswith(mark, position):
            begin = skip_white_space(text, position + 1)
            try:
                value, end = decode_object(text, begin, origin=start)
            except StrictJSONError as e:
                raise MalformedError(f"the array of calls: {e}", leading_name(text, begin)) from e
            elements.append((value, begin, end))
            position, mark = skip_white_space(text, end), ","
        if not text.startswith("]", position):
            expected = "expected , and another call, or ] after the last"
            raise MalformedError(f"{expected}; got {got(text, position)}", name_of(elements[-1][0]), position)
        # what is around the elements is shown by the first and the last, where they fail
        begins = [opened, *(begin for _, begin, _ in elements[1:])]
        ends = [*(end for _, _, end in elements[:-1]), position + 1]
        spans = zip(elements, begins, ends, strict=True)
        found = [self._element(value, text[begin:end]) for (value, _, _), begin, end in spans]
        return found, position + 1

    def _element(self, value: dict[str, Any], raw: str) -> ToolCall | ParseFailure:
        reasons = call_faults(value, also="id")
        if reasons:
            return ParseFailure(raw, "; ".join(reasons), name_of(value))
        written_id = value.get("id", "")
        return ToolCall(
            self._new_id(), value["name"], value["arguments"], written_id if _ID.fullmatch(written_id) else None
        )
