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

import re
from collections.abc import Callable
from typing import Any, ClassVar, Final, NamedTuple

from strands_rollout.tool_parsers import base
from strands_rollout.tool_parsers.base import MalformedError, ParseFailure, Read, TaggedParser, ToolCall

ReadCall = tuple[str, dict[str, Any], str | None, int]
"""A call's tool, its arguments, the id that the model wrote, if any, and the position after them."""


class Section(NamedTuple):
    """The tags of a section with one call or more, and what reads a call between its own two tags."""

    open: str
    close: str
    open_call: str
    close_call: str
    read: Callable[[base.JSONSource, int], ReadCall]

    def end_of_failure(self, text: str, start: int, *others: str) -> int:
        """Where an attempt at a call ends: after the call's closing tag, or before the next of the others."""
        nearest = re.compile("|".join(map(re.escape, (self.close_call, *others)))).search(text, start)
        if nearest is None:
            return len(text)
        return nearest.end() if nearest[0] == self.close_call else nearest.start()


class SectionParser(TaggedParser):
    """A parser of such formats. Calls outside of a section are failures.

    A call that is malformed is a failure, and the next one counts. A section that is never closed is one failure: where
    it would have ended is not known.
    """

    sections: ClassVar[dict[str, Section]]
    """By a text that their tags have, and those before them have not."""

    def _read_call(self, text: base.JSONSource, tag: re.Match[str]) -> Read:
        section = next(section for sign, section in self.sections.items() if sign in tag[0])
        if tag[0] == section.open:
            return self._read_section(text, tag, section)
        is_call = tag[0] == section.open_call
        end = section.end_of_failure(text, tag.end(), section.open, section.close) if is_call else tag.end()
        reason = f"{tag[0]} stands outside of {section.open} ... {section.close}"
        return [ParseFailure(text[tag.start() : end], reason)], end

    def _read_section(self, text: base.JSONSource, tag: re.Match[str], section: Section) -> Read:
        found: list[ToolCall | ParseFailure] = []
        position = base.skip_white_space(text, tag.end())
        while not text.startswith(section.close, position):
            if position == len(text):
                reasons = [part.reason for part in found if isinstance(part, ParseFailure)]
                reasons.append(f"unterminated: there is no {section.close} after it")
                named = next((part.name for part in found if part.name), None)
                return [ParseFailure(text[tag.start() :], "; ".join(reasons), named)], position
            segment, position = self._read_one(text, position, section)
            found.append(segment)
            position = base.skip_white_space(text, position)
        end = position + len(section.close)
        return found or [ParseFailure(text[tag.start() : end], "there is no call between the tags")], end

    def _read_one(self, text: base.JSONSource, start: int, section: Section) -> tuple[ToolCall | ParseFailure, int]:
        """What begins there in a section: a call, or an attempt at one up to where the next thing begins."""
        if not text.startswith(section.open_call, start):
            end = section.end_of_failure(text, start, section.close, section.open_call)
            reason = f"expected {section.open_call} or {section.close}; got {base.got(text, start)}"
            return ParseFailure(text[start:end], reason), end
        inside = start + len(section.open_call)
        try:
            name, arguments, written_id, end = section.read(text, inside)
            after = base.end_of_tag(text, end, section.close_call, name)
        except MalformedError as e:
            end = section.end_of_failure(text, e.position or inside, section.close, section.open_call)
            return ParseFailure(text[start:end], str(e), e.name, e.written_id), end
        return ToolCall(self._new_id(), name, arguments, written_id), after


_KIMI_HEADER: Final = re.compile(r"\s*(functions\.([^\s<>:]{1,200}):\d{1,9})\s*<\|tool_call_argument_begin\|>")
_KIMI_NAME: Final = re.compile(r"\s*(?:functions\.)?([^\s<>:{}\"]{1,200})")


def _read_kimi(text: base.JSONSource, start: int) -> ReadCall:
    header = _KIMI_HEADER.match(text, start)
    if header is None:
        meant = _KIMI_NAME.match(text, start)
        expected = "expected functions.<tool>:<index><|tool_call_argument_begin|>{...}"
        raise MalformedError(f"{expected}; got {base.got(text, start)}", meant[1] if meant else None)
    try:
        arguments, end = base.decode_arguments(text, header.end(), header[2])
    except MalformedError as e:
        e.written_id = header[1]
        raise
    return header[2], arguments, header[1], end


class KimiK2Parser(SectionParser):
    """The format's parser; see `ToolParser`.

    The id that the model writes gives the tool's name, and its result is shown under it; the call's own id comes from
    the id source, as in all formats, since a model may write one id twice.
    """

    tags: ClassVar[re.Pattern[str]] = re.compile(
        r"</?think>|<\|tool_calls_section_(?:begin|end)\|>|<\|tool_call_(?:begin|argument_begin|end)\|>"
    )
    sections: ClassVar = {
        "": Section(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            _read_kimi,
        )
    }


_HEAD: Final = re.compile(r"([^\s<>{}\"`]{1,200})<｜tool▁sep｜>")
_FENCED_NAME: Final = re.compile(r"([^\s<>{}\"`]{1,200})\n```json\n")
_INVOKE: Final = re.compile(r' name="([^"\s<>]{1,200})">')
_PARAMETER: Final = re.compile(r'<｜DSML｜parameter name="([^"<>]{1,200})" string="(true|false)">')
_DSML_TAG: Final = re.compile(r"</?｜DSML｜(?:parameter|invoke|function_calls)")
_END_PARAMETER: Final = "</｜DSML｜parameter>"
_END_INVOKE: Final = "</｜DSML｜invoke>"


def _read_deepseek(text: base.JSONSource, start: int) -> ReadCall:
    """A call of V3 or V3.1, after its opening tag."""
    head = _HEAD.match(text, start)
    if head is None:
        raise MalformedError(f"expected <tool><｜tool▁sep｜>{{...}}; got {base.got(text, start)}")
    fenced = _FENCED_NAME.match(text, head.end()) if head[1] == "function" else None
    if fenced is None:
        arguments, end = base.decode_arguments(text, head.end(), head[1])
        return head[1], arguments, None, end
    arguments, end = base.decode_arguments(text, fenced.end(), fenced[1])
    return fenced[1], arguments, None, base.end_of_tag(text, end, "```", fenced[1])


def _read_invoke(text: base.JSONSource, start: int) -> ReadCall:
    """A call of V3.2, after `<｜DSML｜invoke`."""
    head = _INVOKE.match(text, start)
    if head is None:
        raise MalformedError(f'expected <｜DSML｜invoke name="<tool>">; got {base.got(text, start)}')
    name, arguments = head[1], dict[str, Any]()
    position = base.skip_white_space(text, head.end())
    while parameter := _PARAMETER.match(text, position):
        key, value, end = _read_parameter(text, parameter, name)
        if key in arguments:
            raise MalformedError(f"the parameter {key!r} of {name!r} stands twice", name, end)
        arguments[key] = value
        position = base.skip_white_space(text, end)
    if not text.startswith(_END_INVOKE, position):
        expected = f'expected <｜DSML｜parameter name="..." string="true|false"> or {_END_INVOKE}'
        raise MalformedError(f"{expected} in the call of {name!r}; got {base.got(text, position)}", name, position)
    return name, arguments, None, position


def _read_parameter(text: str, parameter: re.Match[str], name: str) -> tuple[str, Any, int]:
    """Key, value and the position after the parameter. A value is not escaped: it ends at the first tag."""
    key, end = parameter[1], _DSML_TAG.search(text, parameter.end())
    if end is None or not text.startswith(_END_PARAMETER, end.start()):
        at = len(text) if end is None else end.start()
        reason = f"the parameter {key!r} of {name!r} is not closed by {_END_PARAMETER}; got {base.got(text, at)}"
        raise MalformedError(reason, name, at)
    written, after = text[parameter.end() : end.start()], end.start() + len(_END_PARAMETER)
    if parameter[2] == "true":
        return key, written, after
    try:
        return key, base.whole_value(written), after
    except base.StrictJSONError as e:
        raise MalformedError(f'the parameter {key!r} of {name!r}, which says string="false": {e}', name, after) from e


class DeepSeekV3Parser(SectionParser):
    """The formats' parser; see `ToolParser`."""

    tags: ClassVar[re.Pattern[str]] = re.compile(
        r"</?think>|<｜tool▁calls?▁(?:begin|end)｜>|<｜tool▁sep｜>|</?｜DSML｜(?:function_calls>|invoke|parameter)"
    )
    sections: ClassVar = {
        "DSML": Section(
            "<｜DSML｜function_calls>",
            "</｜DSML｜function_calls>",
            "<｜DSML｜invoke",
            _END_INVOKE,
            _read_invoke,
        ),
        "": Section(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            _read_deepseek,
        ),
    }
