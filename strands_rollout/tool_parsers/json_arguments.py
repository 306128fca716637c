# ruff: noqa: RUF001, RUF002 - the formats' own characters
"""Formats with the tool's name and arguments between control tokens: those of Kimi, DeepSeek and gpt-oss.

All except gpt-oss have a section of calls between two tags, with each call between two tags of its own.

Kimi K2: each call has an id such as `functions.x:0`, and JSON arguments between control tokens. Sources:
docs/tool_call_guidance.md of moonshotai/Kimi-K2-Instruct, and the chat templates of Kimi-K2-Instruct and
Kimi-K2-Thinking (as in ggml-org/llama.cpp, models/templates). Reasoning, if any, is in `<think>`. The model also writes
`x:0` and `functions.x`. Both are accepted, since they name the tool. An id without the tool's name (`3`, `call_0a`,
`functions_x_0`) is a failure, since the tool could only be guessed.

DeepSeek V3 has three published forms; all are accepted, since they can't be confused:
- V3, R1 and V3-0324: `function<｜tool▁sep｜>x`, then the arguments as JSON in a fenced block.
- V3.1 and V3.2-Exp: `x<｜tool▁sep｜>{...}`.
- V3.2: an XML-like section of `｜DSML｜` tags, in which each parameter's attribute states whether the value is text.

DeepSeek V4: like V3.2, in a section named `｜DSML｜tool_calls`. In both, a call without arguments may be
`<｜DSML｜invoke name="x"/>`; according to SGLang, V4 writes this, although V4's encoder does not.

Sources: the models' chat templates (as in sgl-project/sglang,
examples/chat_template/tool_chat_template_deepseekv3.jinja, and ggml-org/llama.cpp,
models/templates/deepseek-ai-DeepSeek-V3.1.jinja and DeepSeek-V3.2.jinja), V3.2's encoding/encoding_dsv32.py, and V4's
encoder (as in vllm-project/vllm, tokenizers/deepseek_v4_encoding.py).

Kimi K3: `<|open|>tools<|sep|>` with calls, whose arguments state their JSON type; values other than strings are JSON.
Text is in a section `response`. In attributes, `&` and `"` are escaped. Sources: Kimi-K3's chat template (as in
ggml-org/llama.cpp, models/templates/Kimi-K3.jinja) and sgl-project/sglang, function_call/kimik3_detector.py. A value
that does not have its stated type is a failure here. A section with an unknown name is reasoning.

gpt-oss's harmony: a turn consists of messages, each with a channel and an optional recipient. A turn with reasoning and
a call, after the prompt's `<|start|>assistant`: `<|channel|>analysis<|message|>...<|end|>`, then
`<|start|>assistant<|channel|>commentary to=functions.x <|constrain|>json<|message|>{}<|call|>`. The analysis channel is
reasoning. The final channel, and commentary without a recipient, are text. A message to `functions.x` is a call, even
on the analysis channel: gpt-oss-120b writes many calls there. Sources: openai/harmony, docs/format.md, and
gpt-oss-20b's chat template, which has the recipient before the channel. Sources for the analysis channel:
ai-dynamo/dynamo, pull request 10366, and vllm-project/vllm, pull request 35907. Text outside of such messages (an
unknown channel, an invalid header) is reasoning, or a failure if it has a recipient.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from strands_rollout.files.json_codec import Json
from strands_rollout.tool_parsers import base
from strands_rollout.tool_parsers.base import (
    BaseParser,
    MalformedError,
    ParseFailure,
    ReadResult,
    Reasoning,
    Segment,
    Text,
    ToolCall,
)
from strands_rollout.tool_parsers.sections import ReadCall, Section, SectionParser, ValueTags

_KIMI_HEADER: Final = re.compile(
    r"\s*(?P<id>functions\.(?P<name>[^\s<>:]{1,200})(?::\d{1,9})?|(?!functions\.)(?P<bare>[\w.\-]{1,200}):\d{1,9})"
    r"\s*<\|tool_call_argument_begin\|>"
)
_KIMI_NAME: Final = re.compile(r"\s*(?:functions\.)?([^\s<>:{}\"]{1,200})")


def _read_kimi(text: base.JSONSource, start: int) -> ReadCall:
    header = _KIMI_HEADER.match(text, start)
    if header is None:
        meant = _KIMI_NAME.match(text, start)
        expected = "expected functions.<tool>:<index><|tool_call_argument_begin|>{...}"
        raise MalformedError(f"{expected}; got {base.quote(text, start)}", meant[1] if meant else None)
    name = header["name"] or header["bare"]
    try:
        arguments, end = base.decode_arguments(text, header.end(), name)
    except MalformedError as e:
        e.written_id = header["id"]
        raise
    return name, arguments, header["id"], base.expect_tag(text, end, "<|tool_call_end|>", name)


class KimiK2Parser(SectionParser):
    """Parser of Kimi K2's format, in which each call has an id; see the module.

    The id that the model writes contains the tool's name, and the call's result is shown with this id. As in all
    formats, `ToolCall.id` is another id, made by `new_id`, since a model may write an id twice.
    """

    tags: ClassVar[re.Pattern[str]] = re.compile(
        r"</?think>|<\|tool_calls_section_(?:begin|end)\|>|<\|tool_call_(?:begin|argument_begin|end)\|>"
    )
    sections: Mapping[str, Section] = {
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
_INVOKE: Final = re.compile(r' name="([^"\s<>]{1,200})"(/?)>')
_PARAMETERS: Final = ValueTags(
    open=re.compile(r'[ \t\n\r]*+<｜DSML｜parameter name="([^"<>]{1,200})" string="(true|false)">'),
    close="</｜DSML｜parameter>",
    inner=re.compile(r"</?｜DSML｜(?:parameter|invoke|function_calls|tool_calls)"),
    key_format="the parameter {!r} of {!r}",
    value_format="the parameter {!r} of {!r}",
)
_END_INVOKE: Final = "</｜DSML｜invoke>"


def _read_deepseek(text: base.JSONSource, start: int) -> ReadCall:
    """Parse a call of DeepSeek V3 or V3.1, after its opening tag."""
    head = _HEAD.match(text, start)
    if head is None:
        raise MalformedError(f"expected <tool><｜tool▁sep｜>{{...}}; got {base.quote(text, start)}")
    fenced = _FENCED_NAME.match(text, head.end()) if head[1] == "function" else None
    name, start = (head[1], head.end()) if fenced is None else (fenced[1], fenced.end())
    arguments, end = base.decode_arguments(text, start, name)
    if fenced is not None:
        end = base.expect_tag(text, end, "```", name)
    return name, arguments, None, base.expect_tag(text, end, "<｜tool▁call▁end｜>", name)


def _read_invoke(text: base.JSONSource, start: int) -> ReadCall:
    """Parse a call of DeepSeek V3.2 or V4, after `<｜DSML｜invoke`; a call without arguments may be this tag alone."""
    head = _INVOKE.match(text, start)
    if head is None:
        raise MalformedError(f'expected <｜DSML｜invoke name="<tool>">; got {base.quote(text, start)}')
    name = head[1]
    if head[2]:
        return name, {}, None, head.end()

    def value_of(opened: re.Match[str], key: str, written: str) -> Json:
        if opened[2] == "true":
            return written
        try:
            return base.decode_single_value(written)
        except base.StrictJSONError as e:
            raise MalformedError(f'the parameter {key!r} of {name!r}, which says string="false": {e}') from e

    arguments, end = _PARAMETERS.read(text, head.end(), name, value_of)
    position = base.skip_white_space(text, end)
    if not text.startswith(_END_INVOKE, position):
        expected = f'expected <｜DSML｜parameter name="..." string="true|false"> or {_END_INVOKE}'
        raise MalformedError(f"{expected} in the call of {name!r}; got {base.quote(text, position)}", name, position)
    return name, arguments, None, position + len(_END_INVOKE)


class DeepSeekV3Parser(SectionParser):
    """Parser of all three published formats of DeepSeek V3; see the module."""

    tags: ClassVar[re.Pattern[str]] = re.compile(
        r"</?think>|<｜tool▁calls?▁(?:begin|end)｜>|<｜tool▁sep｜>|</?｜DSML｜(?:function_calls>|invoke|parameter)"
    )
    sections: Mapping[str, Section] = {
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


class DeepSeekV4Parser(SectionParser):
    """Parser of DeepSeek V4's format, `<｜DSML｜tool_calls>`; see the module."""

    tags: ClassVar[re.Pattern[str]] = re.compile(r"</?think>|</?｜DSML｜(?:tool_calls>|invoke|parameter)")
    sections: Mapping[str, Section] = {
        "": Section("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "<｜DSML｜invoke", _END_INVOKE, _read_invoke)
    }


def _unescape_attribute(written: str) -> str:
    return written.replace("&quot;", '"').replace("&amp;", "&")


_K3_CALL: Final = re.compile(r' tool="([^"\s<>]{1,200})" index="\d{1,9}"<\|sep\|>')
_K3_ARGUMENTS: Final = ValueTags(
    open=re.compile(
        r'\s*<\|open\|>argument key="([^"]{1,200})" type="(string|number|boolean|null|object|array)"<\|sep\|>'
    ),
    close="<|close|>argument<|sep|>",
    inner=re.compile(r"<\|(?:open|close|sep|end_of_msg)\|>"),
    key_format="the argument {!r} of {!r}",
    value_format="the argument {!r} of {!r}",
    key_of=_unescape_attribute,
)


def _read_k3(text: base.JSONSource, start: int) -> ReadCall:
    head = _K3_CALL.match(text, start)
    if head is None:
        expected = 'expected <|open|>call tool="<tool>" index="<number>"<|sep|>'
        raise MalformedError(f"{expected}; got {base.quote(text, start)}")
    name = _unescape_attribute(head[1])

    def value_of(opened: re.Match[str], key: str, written: str) -> Json:
        kind = opened[2]
        if kind == "string":
            return written
        what = f"the argument {key!r} of {name!r}, which says type={kind!r}"
        try:
            value = base.decode_single_value(written)
        except base.StrictJSONError as e:
            raise MalformedError(f"{what}: {e}") from e
        if not base.has_json_type(value, {kind}):
            raise MalformedError(f"{what}: got {written[:40]!r}")
        return value

    arguments, position = _K3_ARGUMENTS.read(text, head.end(), name, value_of)
    return name, arguments, None, base.expect_tag(text, position, "<|close|>call<|sep|>", name)


class KimiK3Parser(SectionParser):
    """Parser of Kimi K3's format, in which arguments state their JSON type; see the module."""

    open_reasoning: ClassVar[str] = "<|open|>think<|sep|>"
    close_reasoning: ClassVar[str] = "<|close|>think<|sep|>"
    tags: ClassVar[re.Pattern[str]] = re.compile(
        r"<\|(?:open|close)\|>(?:think|response|tools|message)<\|sep\|>|<\|open\|>call|<\|close\|>call<\|sep\|>"
        r"|<\|open\|>(?P<unknown>[^\s<]{1,40})<\|sep\|>"
    )
    sections: Mapping[str, Section] = {
        "": Section("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", "<|open|>call", "<|close|>call<|sep|>", _read_k3)
    }

    def _read_call(self, text: base.JSONSource, tag: re.Match[str]) -> ReadResult:
        if unknown := tag["unknown"]:
            close = f"<|close|>{unknown}<|sep|>"
            end = text.find(close, tag.end())
            after = len(text) if end < 0 else end + len(close)
            return [Reasoning(text[tag.start() : after])], after
        if "response" in tag[0] or "message" in tag[0]:
            return [], tag.end()
        return super()._read_call(text, tag)


_CALL: Final = "<|call|>"
# possessive quantifiers: no backtracking over long white space
_BEGIN: Final = re.compile(r"\s*+(?:<\|start\|>assistant)?+\s*+(?=<\|channel\|>|to=)")
_NEXT: Final = re.compile(r"<\|start\|>assistant(?=\s*+(?:<\|channel\|>|to=))|<\|channel\|>")
_HEADER: Final = re.compile(
    r"(?:to=(?P<first>[^\s<]{1,200}))?+\s*+<\|channel\|>(?P<channel>[a-z]{1,20})(?:\s++to=(?P<second>[^\s<]{1,200}))?+"
    r"\s*+(?:<\|constrain\|>)?+[^\s<]{0,40}\s*+<\|message\|>"
)
_RECIPIENT: Final = re.compile(r"to=(?:functions\.)?([^\s<]{1,200})")
_END: Final = re.compile(r"<\|(?:end|call|return)\|>")
_MARKER: Final = re.compile(r"<\|(?:start|channel|constrain|message|end|call|return)\|>")
_CHANNELS_OF_TEXT: Final = ("final", "commentary")
_CHANNELS_OF_CALLS: Final = ("commentary", "analysis")
_HEADER_END: Final = re.compile(r"<\|(?:message|end|call|return)\|>")


@dataclass(frozen=True, slots=True)
class _Header:
    channel: str
    recipient: str | None
    end: int  # position after `<|message|>`
    has_start: bool = True  # the message begins with `<|start|>assistant`, or is the first message


class GptOssParser(BaseParser):
    """Parser of gpt-oss's format, harmony: messages on channels; see the module.

    The text begins after the prompt's `<|start|>assistant`, or inside the analysis message that the prompt opened. The
    last message has no closing token if that token ended the turn. Only a closing token ends a message, so a call in
    unclosed reasoning is a draft. A call must be a message of its own to `functions.x`, on the commentary or
    analysis channel. It must have a single JSON object and end with `<|call|>`. A call's content type is optional and
    ignored: arguments other than JSON fail anyway. A turn without any marker is text, unless the prompt opened
    reasoning.
    """

    def segments(self, text: str, in_reasoning: bool = False) -> list[Segment]:  # noqa: FBT001, FBT002
        """Split a finished turn into segments; see `ToolParser.segments`."""
        return self._split(text, in_reasoning=in_reasoning, reads_calls=True)

    def cut_segments(self, text: str, in_reasoning: bool = False) -> list[Segment]:  # noqa: FBT001, FBT002
        """Split an unfinished turn into reasoning and text; see `CutTurnParser.cut_segments`."""
        return self._split(text, in_reasoning=in_reasoning, reads_calls=False)

    def _split(self, text: str, *, in_reasoning: bool, reads_calls: bool) -> list[Segment]:
        source, found = base.JSONSource(text), list[Segment]()
        stray = Text if _MARKER.search(source) is None else Reasoning
        position = 0
        if in_reasoning:
            position = self._read_message(source, 0, _Header("analysis", None, 0), found)
        while position < len(text):
            begin = _BEGIN.match(source, position)
            if begin is None:  # text outside of messages, up to the next message
                following = _NEXT.search(source, position)
                end = len(text) if following is None else following.start()
                base.add_text(found, stray, text[position:end])
                position = end
                continue
            header, start = _parse_header(source, begin, is_first=position == 0), position
            if header is None:
                position = _read_broken_message(source, position, found)
            else:
                position = self._read_message(source, position, header, found)
            if not reads_calls and found and isinstance(found[-1], ToolCall | ParseFailure):
                found[-1] = Text(text[start:position])
        return found

    def _read_message(self, text: base.JSONSource, start: int, header: _Header, found: list[Segment]) -> int:
        if header.recipient is not None:
            segment, end = self._read_call(text, start, header)
            found.append(segment)
            return end
        close = _END.search(text, header.end)
        content = text[header.end : len(text) if close is None else close.start()]
        base.add_text(found, Text if header.channel in _CHANNELS_OF_TEXT else Reasoning, content)
        return len(text) if close is None else close.end()

    def _read_call(self, text: base.JSONSource, start: int, header: _Header) -> tuple[ToolCall | ParseFailure, int]:
        recipient = header.recipient or ""
        name = recipient.removeprefix("functions.")
        try:
            _check_header(header, recipient, name)
            arguments, end = base.decode_arguments(text, header.end, name)
            is_last = base.skip_white_space(text, end) == len(text)
            after = len(text) if is_last else base.expect_tag(text, end, _CALL, name)
        except MalformedError as e:
            stop = _END.search(text, e.position or header.end)
            end = len(text) if stop is None else stop.end()
            return ParseFailure(text[start:end], str(e), name or None), end
        return ToolCall(self._new_id(), name, arguments), after


def _check_header(header: _Header, recipient: str, name: str) -> None:
    if not header.has_start:
        raise MalformedError("a message begins with <|start|>assistant", name)
    if not recipient.startswith("functions.") or not name:
        raise MalformedError(f"got a message to {recipient!r}; expected a call to=functions.<tool>", name)
    if header.channel not in _CHANNELS_OF_CALLS:
        raise MalformedError(f"a call on the channel {header.channel!r}; expected commentary", name)


def _parse_header(text: str, begin: re.Match[str], *, is_first: bool) -> _Header | None:
    header = _HEADER.match(text, begin.end())
    if header is None or (header["first"] and header["second"]):
        return None
    has_start = is_first or bool(begin[0].strip())
    return _Header(header["channel"], header["first"] or header["second"], header.end(), has_start)


def _read_broken_message(text: str, start: int, found: list[Segment]) -> int:
    head_end = _HEADER_END.search(text, start)
    recipient = _RECIPIENT.search(text, start, len(text) if head_end is None else head_end.start())
    close = _END.search(text, start)
    end = len(text) if close is None else close.end()
    if recipient is None:
        base.add_text(found, Reasoning, text[start:end])
    else:
        expected = "expected <|channel|>commentary to=functions.<tool> <|constrain|>json<|message|>{...}<|call|>"
        found.append(ParseFailure(text[start:end], f"{expected}; got {base.quote(text, start)}", recipient[1]))
    return end
