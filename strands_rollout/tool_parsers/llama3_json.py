"""Llama 3's JSON format: the whole answer is `{"name": "x", "parameters": {}}`, perhaps after `<|python_tag|>`.

Several calls are separated by semicolons, as SGLang and vLLM read them; the template itself can write one only.
Sources: the chat templates of Llama 3.1, 3.2 and 3.3 (as in vllm-project/vllm,
examples/tool_chat_template_llama3.1_json.jinja) and sgl-project/sglang, function_call/llama32_detector.py. Meta's
documentation shows calls that begin with `"type": "function"`, which may be there. Built-in tools and code after
`<|python_tag|>` are no JSON: a failure. These models don't reason: `<think>` counts where one made from them does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from strands_rollout.tool_parsers.base import ParseFailure, Segment, ToolCall
from strands_rollout.tool_parsers.call_blocks import got
from strands_rollout.tool_parsers.call_object import call_faults, leading_name, name_of
from strands_rollout.tool_parsers.strict_json import JSONSource, StrictJSONError, decode_object, skip_white_space
from strands_rollout.tool_parsers.tagged_parser import TaggedParser

_PYTHON_TAG: Final = "<|python_tag|>"
_LIKE_A_CALL: Final = re.compile(
    r'\{\s{0,20}"name"\s{0,20}:\s{0,20}"[^"\\\x00-\x1f]{1,200}"\s{0,20},\s{0,20}"parameters"'
)


class Llama3JSONParser(TaggedParser):
    """The format's parser; see `ToolParser`.

    An answer that is a JSON object without parameters, and with more than a name, is an answer and no call. What looks
    like a call after other text is a failure, since a call must be the whole answer; so all that follows a call is
    part of the attempt, and a `</think>` there closes nothing.
    """

    tags: ClassVar[re.Pattern[str]] = re.compile(
        r'</?think>|<\|python_tag\|>|(?<![^\s>])\{(?=\s{0,20}"(?:type|name|parameters)"\s{0,20}:)'
    )

    def _read_call(
        self, text: JSONSource, tag: re.Match[str], *, is_first: bool
    ) -> tuple[Sequence[Segment], int] | None:
        if tag[0] == _PYTHON_TAG:
            return self._read_calls(text, tag.start(), tag.end()), len(text)
        if is_first and not _is_answer(text, tag.start()):
            return self._read_calls(text, tag.start(), tag.start()), len(text)
        if not _LIKE_A_CALL.match(text, tag.start()):
            return None
        reason = f"a call must be the whole answer, or stand after {_PYTHON_TAG}"
        return [ParseFailure(text[tag.start() :], reason, leading_name(text, tag.start()))], len(text)

    def _read_calls(self, text: JSONSource, opened: int, start: int) -> list[ToolCall | ParseFailure]:
        """The calls from here to the end of the text."""
        found: list[ToolCall | ParseFailure] = []
        while True:
            begin = skip_white_space(text, start)
            try:
                value, end = decode_object(text, begin, origin=begin)
            except StrictJSONError as e:
                return [*found, ParseFailure(text[opened:], str(e), leading_name(text, begin))]
            after = skip_white_space(text, end)
            reasons = call_faults(value, arguments="parameters", also="type")
            if value.get("type", "function") != "function":
                reasons.append(f'the type is {value["type"]!r}; expected "function"')
            if after < len(text) and text[after] != ";":
                reasons.append(f"expected the end of the answer, or ; and another call; got {got(text, after)}")
                return [*found, ParseFailure(text[opened:], "; ".join(reasons), name_of(value))]
            found.append(self._call(value, text[opened:end], reasons))
            if after == len(text):
                return found
            opened, start = after, after + 1

    def _call(self, value: dict[str, Any], raw: str, reasons: list[str]) -> ToolCall | ParseFailure:
        if reasons:
            return ParseFailure(raw, "; ".join(reasons), name_of(value))
        return ToolCall(self._new_id(), value["name"], value["parameters"])


def _is_answer(text: JSONSource, start: int) -> bool:
    """Whether an object is one that no one would take for a call."""
    try:
        value, _ = decode_object(text, start, origin=start)
    except StrictJSONError:
        return False
    return not ({"parameters", "arguments"} & value.keys() or value.keys() <= {"type", "name"})
