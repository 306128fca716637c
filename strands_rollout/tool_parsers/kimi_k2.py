"""Kimi K2's format: a section of calls, each named `functions.x:0`, with JSON arguments between special tokens.

Source: docs/tool_call_guidance.md of moonshotai/Kimi-K2-Instruct, and the chat templates of Kimi-K2-Instruct and
Kimi-K2-Thinking (as in ggml-org/llama.cpp, models/templates). Reasoning, where there is some, is `<think>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Final

from strands_rollout.tool_parsers.base import MalformedError, Segment
from strands_rollout.tool_parsers.call_blocks import (
    Call,
    SectionTags,
    decode_arguments,
    got,
    read_section,
    read_stray,
)
from strands_rollout.tool_parsers.strict_json import JSONSource
from strands_rollout.tool_parsers.tagged_parser import TaggedParser

_TAGS: Final = SectionTags(
    open="<|tool_calls_section_begin|>",
    close="<|tool_calls_section_end|>",
    open_call="<|tool_call_begin|>",
    close_call="<|tool_call_end|>",
)
_HEADER: Final = re.compile(r"\s*(functions\.([^\s<>:]{1,200}):\d{1,9})\s*<\|tool_call_argument_begin\|>")
_NAME: Final = re.compile(r"\s*(?:functions\.)?([^\s<>:{}\"]{1,200})")


class KimiK2Parser(TaggedParser):
    """The format's parser; see `ToolParser`.

    The id that the model writes gives the tool's name, and its result is shown under it; the call's own id comes from
    the id source, as in all formats, since a model may write one id twice. Calls outside of a section are failures.
    """

    tags: ClassVar[re.Pattern[str]] = re.compile(
        r"</?think>|<\|tool_calls_section_(?:begin|end)\|>|<\|tool_call_(?:begin|argument_begin|end)\|>"
    )

    def _read_call(
        self,
        text: JSONSource,
        tag: re.Match[str],
        *,
        is_first: bool,  # noqa: ARG002 - calls may stand anywhere
    ) -> tuple[Sequence[Segment], int]:
        if tag[0] == _TAGS.open:
            return read_section(text, tag, _TAGS, _read_inside, self._new_id)
        return read_stray(text, tag, _TAGS)


def _read_inside(text: JSONSource, start: int) -> tuple[Call, int]:
    header = _HEADER.match(text, start)
    if header is None:
        meant = _NAME.match(text, start)
        expected = "expected functions.<tool>:<index><|tool_call_argument_begin|>{...}"
        raise MalformedError(f"{expected}; got {got(text, start)}", meant[1] if meant else None)
    try:
        arguments, end = decode_arguments(text, header.end(), header[2])
    except MalformedError as e:
        e.written_id = header[1]
        raise
    return Call(header[2], arguments, header[1]), end
