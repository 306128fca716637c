# ruff: noqa: RUF001, RUF002 - the formats' own characters
"""Formats with a section of calls between two tags, each call between two more: Kimi K2 and DeepSeek V3.

Kimi K2: each call is named `functions.x:0`, with JSON arguments between special tokens. Source:
docs/tool_call_guidance.md of moonshotai/Kimi-K2-Instruct, and the chat templates of Kimi-K2-Instruct and
Kimi-K2-Thinking (as in ggml-org/llama.cpp, models/templates). Reasoning, where there is some, is `<think>`.

DeepSeek V3, in the three forms that were published; all are taken, they can't be confused:
- V3, R1 and V3-0324: `function<｜tool▁sep｜>x`, then the arguments as JSON in a fenced block.
- V3.1 and V3.2-Exp: `x<｜tool▁sep｜>{...}`.
- V3.2: an XML-like section of `｜DSML｜` tags, each parameter with its own word on whether it is a string.

V4's tags are others (`｜DSML｜tool_calls`) and are not taken. Sources: the models' chat templates (as in
sgl-project/sglang, examples/chat_template/tool_chat_template_deepseekv3.jinja, and ggml-org/llama.cpp,
models/templates/deepseek-ai-DeepSeek-V3.1.jinja and DeepSeek-V3.2.jinja) and V3.2's encoding/encoding_dsv32.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar, Final, NamedTuple

from strands_rollout.tool_parsers.base import (
    JSONSource,
    MalformedError,
    NewId,
    ParseFailure,
    Read,
    StrictJSONError,
    TaggedParser,
    ToolCall,
    decode_arguments,
    end_of_tag,
    got,
    skip_white_space,
    whole_value,
)


class Call(NamedTuple):
    """A tool's name and arguments, and the id that stands beside them, if any."""

    name: str
    arguments: dict[str, Any]
    written_id: str | None = None


class SectionTags(NamedTuple):
    """The tags of a section with one call or more."""

    open: str
    close: str
    open_call: str
    close_call: str


ReadInside = Callable[[JSONSource, int], tuple[Call, int]]


def read_section(text: JSONSource, tag: re.Match[str], tags: SectionTags, read: ReadInside, new_id: NewId) -> Read:
    """The calls of a section, and the position after it.

    A call that is malformed is a failure, and the next one counts. A section that is never closed is one failure:
    where it would have ended is not known.
    """
    found: list[ToolCall | ParseFailure] = []
    position = skip_white_space(text, tag.end())
    while not text.startswith(tags.close, position):
        if position == len(text):
            reason = f"unterminated: there is no {tags.close} after it"
            reasons = [part.reason for part in found if isinstance(part, ParseFailure)]
            named = next((part.name for part in found if part.name), None)
            return [ParseFailure(text[tag.start() :], "; ".join([*reasons, reason]), named)], position
        segment, position = _read_one(text, position, tags, read, new_id)
        found.append(segment)
        position = skip_white_space(text, position)
    end = position + len(tags.close)
    return found or [ParseFailure(text[tag.start() : end], "there is no call between the tags")], end


def read_stray(text: str, tag: re.Match[str], tags: SectionTags) -> Read:
    """The failure that a tag outside of a section is: with its call, where it opens one."""
    is_call = tag[0] == tags.open_call
    end = _end_of_failure(text, tag.end(), tags.close_call, tags.open, tags.close) if is_call else tag.end()
    return [ParseFailure(text[tag.start() : end], f"{tag[0]} stands outside of {tags.open} ... {tags.close}")], end


def _read_one(
    text: JSONSource, start: int, tags: SectionTags, read: ReadInside, new_id: NewId
) -> tuple[ToolCall | ParseFailure, int]:
    """What begins there in a section: a call, or an attempt at one up to where the next thing begins."""
    if not text.startswith(tags.open_call, start):
        end = _end_of_failure(text, start, tags.close_call, tags.close, tags.open_call)
        return ParseFailure(text[start:end], f"expected {tags.open_call} or {tags.close}; got {got(text, start)}"), end
    inside = start + len(tags.open_call)
    try:
        call, end = read(text, inside)
        after = end_of_tag(text, end, tags.close_call, call.name)
    except MalformedError as e:
        end = _end_of_failure(text, e.position or inside, tags.close_call, tags.close, tags.open_call)
        return ParseFailure(text[start:end], str(e), e.name, e.written_id), end
    return ToolCall(new_id(), call.name, call.arguments, call.written_id), after


def _end_of_failure(text: str, start: int, close_call: str, *others: str) -> int:
    """Where an attempt ends: after the call's closing tag, or before the next of the others."""
    nearest = re.compile("|".join(map(re.escape, (close_call, *others)))).search(text, start)
    if nearest is None:
        return len(text)
    return nearest.end() if nearest[0] == close_call else nearest.start()


_KIMI: Final = SectionTags(
    open="<|tool_calls_section_begin|>",
    close="<|tool_calls_section_end|>",
    open_call="<|tool_call_begin|>",
    close_call="<|tool_call_end|>",
)
_KIMI_HEADER: Final = re.compile(r"\s*(functions\.([^\s<>:]{1,200}):\d{1,9})\s*<\|tool_call_argument_begin\|>")
_KIMI_NAME: Final = re.compile(r"\s*(?:functions\.)?([^\s<>:{}\"]{1,200})")


class KimiK2Parser(TaggedParser):
    """The format's parser; see `ToolParser`.

    The id that the model writes gives the tool's name, and its result is shown under it; the call's own id comes from
    the id source, as in all formats, since a model may write one id twice. Calls outside of a section are failures.
    """

    tags: ClassVar[re.Pattern[str]] = re.compile(
        r"</?think>|<\|tool_calls_section_(?:begin|end)\|>|<\|tool_call_(?:begin|argument_begin|end)\|>"
    )

    def _read_call(self, text: JSONSource, tag: re.Match[str]) -> Read:
        if tag[0] == _KIMI.open:
            return read_section(text, tag, _KIMI, _read_kimi, self._new_id)
        return read_stray(text, tag, _KIMI)


def _read_kimi(text: JSONSource, start: int) -> tuple[Call, int]:
    header = _KIMI_HEADER.match(text, start)
    if header is None:
        meant = _KIMI_NAME.match(text, start)
        expected = "expected functions.<tool>:<index><|tool_call_argument_begin|>{...}"
        raise MalformedError(f"{expected}; got {got(text, start)}", meant[1] if meant else None)
    try:
        arguments, end = decode_arguments(text, header.end(), header[2])
    except MalformedError as e:
        e.written_id = header[1]
        raise
    return Call(header[2], arguments, header[1]), end


_DEEPSEEK: Final = SectionTags(
    open="<｜tool▁calls▁begin｜>",
    close="<｜tool▁calls▁end｜>",
    open_call="<｜tool▁call▁begin｜>",
    close_call="<｜tool▁call▁end｜>",
)
_DSML: Final = SectionTags(
    open="<｜DSML｜function_calls>",
    close="</｜DSML｜function_calls>",
    open_call="<｜DSML｜invoke",
    close_call="</｜DSML｜invoke>",
)
_HEAD: Final = re.compile(r"([^\s<>{}\"`]{1,200})<｜tool▁sep｜>")
_FENCED_NAME: Final = re.compile(r"([^\s<>{}\"`]{1,200})\n```json\n")
_INVOKE: Final = re.compile(r' name="([^"\s<>]{1,200})">')
_PARAMETER: Final = re.compile(r'<｜DSML｜parameter name="([^"<>]{1,200})" string="(true|false)">')
_DSML_TAG: Final = re.compile(r"</?｜DSML｜(?:parameter|invoke|function_calls)")
_END_PARAMETER: Final = "</｜DSML｜parameter>"


class DeepSeekV3Parser(TaggedParser):
    """The formats' parser; see `ToolParser`. Calls outside of a section are failures."""

    tags: ClassVar[re.Pattern[str]] = re.compile(
        r"</?think>|<｜tool▁calls?▁(?:begin|end)｜>|<｜tool▁sep｜>|</?｜DSML｜(?:function_calls>|invoke|parameter)"
    )

    def _read_call(self, text: JSONSource, tag: re.Match[str]) -> Read:
        if tag[0] == _DEEPSEEK.open:
            return read_section(text, tag, _DEEPSEEK, _read_deepseek, self._new_id)
        if tag[0] == _DSML.open:
            return read_section(text, tag, _DSML, _read_invoke, self._new_id)
        return read_stray(text, tag, _DSML if "DSML" in tag[0] else _DEEPSEEK)


def _read_deepseek(text: JSONSource, start: int) -> tuple[Call, int]:
    """A call of V3 or V3.1, after its opening tag."""
    head = _HEAD.match(text, start)
    if head is None:
        raise MalformedError(f"expected <tool><｜tool▁sep｜>{{...}}; got {got(text, start)}")
    fenced = _FENCED_NAME.match(text, head.end()) if head[1] == "function" else None
    if fenced is None:
        arguments, end = decode_arguments(text, head.end(), head[1])
        return Call(head[1], arguments), end
    arguments, end = decode_arguments(text, fenced.end(), fenced[1])
    return Call(fenced[1], arguments), end_of_tag(text, end, "```", fenced[1])


def _read_invoke(text: JSONSource, start: int) -> tuple[Call, int]:
    """A call of V3.2, after `<｜DSML｜invoke`."""
    head = _INVOKE.match(text, start)
    if head is None:
        raise MalformedError(f'expected <｜DSML｜invoke name="<tool>">; got {got(text, start)}')
    name, arguments = head[1], dict[str, Any]()
    position = skip_white_space(text, head.end())
    while parameter := _PARAMETER.match(text, position):
        key, value, end = _read_parameter(text, parameter, name)
        if key in arguments:
            raise MalformedError(f"the parameter {key!r} of {name!r} stands twice", name, end)
        arguments[key] = value
        position = skip_white_space(text, end)
    if not text.startswith(_DSML.close_call, position):
        expected = 'expected <｜DSML｜parameter name="..." string="true|false"> or ' + _DSML.close_call
        raise MalformedError(f"{expected} in the call of {name!r}; got {got(text, position)}", name, position)
    return Call(name, arguments), position


def _read_parameter(text: str, parameter: re.Match[str], name: str) -> tuple[str, Any, int]:
    """Key, value and the position after the parameter. A value is not escaped: it ends at the first tag."""
    key, end = parameter[1], _DSML_TAG.search(text, parameter.end())
    if end is None or not text.startswith(_END_PARAMETER, end.start()):
        at = len(text) if end is None else end.start()
        reason = f"the parameter {key!r} of {name!r} is not closed by {_END_PARAMETER}; got {got(text, at)}"
        raise MalformedError(reason, name, at)
    written, after = text[parameter.end() : end.start()], end.start() + len(_END_PARAMETER)
    if parameter[2] == "true":
        return key, written, after
    try:
        return key, whole_value(written), after
    except StrictJSONError as e:
        raise MalformedError(f'the parameter {key!r} of {name!r}, which says string="false": {e}', name, after) from e
