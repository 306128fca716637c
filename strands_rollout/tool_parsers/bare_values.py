"""Formats whose values are bare text, typed by the tools' JSON Schemas: those of Qwen3-Coder, GLM and others.

Qwen3-Coder and Qwen3.5: `<tool_call><function=x><parameter=key>value</parameter></function></tool_call>`. A string is
the text itself; other values are JSON or Python literals, as in the model's first chat template: True, None,
['a', 'b']. A value of unknown type is a string. Sources: the models' chat templates (as in vllm-project/vllm,
examples/tool_chat_template_qwen3coder.jinja), and the parsers of SGLang and vLLM (sgl-project/sglang,
function_call/qwen3_coder_detector.py).

GLM-4.5, 4.6 and 4.7: `<tool_call>x<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`. A string is the
text itself; other values are JSON. A value of unknown type is read as JSON if it is valid JSON, else as a string.
Sources: the models' chat templates (as in ggml-org/llama.cpp, models/templates/GLM-4.6.jinja), and the parsers of
SGLang and vLLM (sgl-project/sglang, function_call/glm4_moe_detector.py, glm47_moe_detector.py).

Seed-OSS: like Qwen3-Coder, but with `<seed:tool_call>` and `<seed:think>`. Source: the model's chat template (as in
ggml-org/llama.cpp, models/templates/ByteDance-Seed-OSS.jinja).

MiniMax-M2: `<minimax:tool_call><invoke name="x"><parameter name="key">value</parameter></invoke></minimax:tool_call>`,
whose outer tags may enclose several calls. A value of unknown type is a string. Sources: the model's chat template (as
in ggml-org/llama.cpp, models/templates/MiniMax-M2.jinja) and sgl-project/sglang, function_call/minimax_m2.py.

Hunyuan 3: `<tool_calls:opensource><tool_call:opensource>x<tool_sep:opensource>`, then keys and values as in GLM's
format, but with the suffix `:opensource` in their tags. Sources: tencent/Hy3's chat template and sgl-project/sglang,
function_call/hunyuan_detector.py; SGLang also accepts tags without the suffix, from an earlier tokenizer.

Muse Glimmer: a turn consists of messages with recipients, as in harmony: reasoning to `self`, text to `user`, calls to
a tool. After the prompt's `<|start|>assistant`: ` to=self<|message|>...<|eom|>`, then `<|start|>assistant
to=x<|message|>` and `<atem:function_calls><atem:invoke name="x"><atem:parameter name="key">value</atem:parameter>
</atem:invoke></atem:function_calls>`. A value of unknown type is JSON if it is valid JSON. The prompt names a tool `x`
as `x.*`, so the model may write `x.x`. If `x` is a tool and `x.x` is not, this means `x`. Sources: the model's chat
template (as in huggingface/trl, chat_templates/muse_glimmer_training.jinja), sgl-project/sglang,
function_call/muse_glimmer_detector.py, and vllm-project/vllm, tool_parsers/muse_glimmer_tool_parser.py.

These parsers are stricter than their sources. A value is a failure if its type does not match its schema. Only strings
inside JSON and Python literals are unescaped. No text is evaluated as Python code. The parsers check only the type of a
whole value; keys of nested objects, ranges and patterns are for the tool to check.
"""

import contextlib
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Self

from strands_rollout.files.json_codec import Json
from strands_rollout.tool_parsers import base
from strands_rollout.tool_parsers.base import (
    MalformedError,
    NewId,
    ParseFailure,
    ReadResult,
    Reasoning,
    Segment,
    TaggedParser,
    Text,
    ToolCall,
)
from strands_rollout.tool_parsers.literals import python_as_json
from strands_rollout.tool_parsers.sections import ReadCall, Section, SectionParser, ValueTags

Schemas = Mapping[str, Mapping[str, Any]]
"""Tool name -> JSON Schema of its arguments."""

_TYPES: Final = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
_STRING: Final = frozenset({"string"})
_MAX_DEPTH: Final = 20
_UNCLOSED_FORMAT: Final = "{value} is not closed: got {tag}"


def types_of(schemas: Schemas, tool: str, key: str) -> frozenset[str] | None:
    """Return the JSON types that the argument `key` of `tool` may have; None if they are unknown."""
    root = schemas.get(tool)
    properties = root.get("properties") if isinstance(root, Mapping) else None
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(schema, root or {}, 0)


def typed_value(
    text: str, types: frozenset[str] | None, what: str, *, may_be_python: bool, untyped_is_json: bool
) -> Json:
    """Convert a bare text to a value of one of the given types.

    A string is the text itself; other values are strict JSON, or Python literals of JSON values. If the argument may be
    a string or another type, the other type takes precedence.

    Args:
        text: The text between the value's tags.
        types: The JSON types that the argument may have; None if unknown.
        what: Name of the argument in a failure's reason.
        may_be_python: Accept Python literals.
        untyped_is_json: Read a text of unknown type as JSON if it is valid JSON; otherwise as a string.

    Raises:
        MalformedError: The text is not a value of these types.
    """
    if types == _STRING or (types is None and not untyped_is_json):
        return text
    fault: base.StrictJSONError | None = None
    try:
        value = _decode(text, may_be_python=may_be_python)
    except base.StrictJSONError as e:
        fault = e
    else:
        if types is None or base.has_json_type(value, types):
            return value
    if types is None or "string" in types:
        return text
    reason = f"{what} is {text[:40]!r}; expected {' or '.join(sorted(types))}"
    raise MalformedError(reason if fault is None else f"{reason}: {fault}") from fault


def _decode(text: str, *, may_be_python: bool) -> Json:
    try:
        return base.decode_single_value(text)
    except base.StrictJSONError:
        if may_be_python:
            with contextlib.suppress(ValueError, KeyError, OverflowError):
                return base.decode_single_value(python_as_json(text))
        raise


def _types(schema: object, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    named = schema.get("type")
    if named is not None:
        names = named if isinstance(named, list | tuple) else [named]
        known = all(isinstance(name, str) and name in _TYPES for name in names)
        return frozenset(names) if known and names else None
    if isinstance(schema.get("$ref"), str):
        if not schema["$ref"].startswith("#/"):
            return None
        found: object = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        return _types(found, root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list | tuple):
            return _union([_types(option, root, depth + 1) for option in schema[key]])
    if isinstance(schema.get("allOf"), list | tuple):
        known_types = [types for part in schema["allOf"] if (types := _types(part, root, depth + 1)) is not None]
        return frozenset.intersection(*known_types) or None if known_types else None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list | tuple):
        return None
    others = sorted(_TYPES - _STRING)
    return _union(
        [frozenset(name for name in others if base.has_json_type(value, {name})) or _STRING for value in values]
    )


def _union(options: list[frozenset[str] | None]) -> frozenset[str] | None:
    """Return the union of the options' types; None if there are no options, or an option has unknown types."""
    known = [types for types in options if types is not None]
    return frozenset().union(*known) if known and len(known) == len(options) else None


class SchemaParser(TaggedParser):
    """Base class of `UntypedParser`s for formats whose values are bare text.

    These formats have no escapes: a value ends at the first closing tag. If another tag of the format is in the value,
    the call is a failure, since the value's closing tag may be missing.
    """

    values: ClassVar[ValueTags]
    may_be_python: ClassVar[bool] = False  # accept Python literals: ['a', True, None]
    untyped_is_json: ClassVar[bool]  # a value of unknown type is JSON if it is valid JSON; else a string

    def __init__(self, new_id: NewId = base.random_id, schemas: Schemas | None = None) -> None:
        super().__init__(new_id)
        self._schemas = schemas or {}

    def for_tools(self, schemas: Schemas) -> Self:
        """Return a parser of this format that knows these schemas; see `UntypedParser.for_tools`."""
        return type(self)(self._new_id, schemas)

    def _read_arguments(self, block: str, position: int, name: str) -> tuple[dict[str, Any], int]:
        def value_of(_opened: re.Match[str], key: str, written: str) -> Json:
            return typed_value(
                self._value_text(written),
                types_of(self._schemas, name, key),
                self.values.value_format.format(key, name),
                may_be_python=self.may_be_python,
                untyped_is_json=self.untyped_is_json,
            )

        return self.values.read(block, position, name, value_of)

    def _value_text(self, text: str) -> str:
        """Return a value's text, given the text between its tags."""
        return text


class BlockParser(SchemaParser):
    """Base class for formats with a block for each call; a block ends at the first closing tag."""

    open_block: ClassVar[str] = "<tool_call>"
    close_block: ClassVar[str] = "</tool_call>"

    def _read_block(self, text: str, tag: re.Match[str]) -> ReadResult:
        end = text.find(self.close_block, tag.end())
        inside = text[tag.end() : len(text) if end < 0 else end]
        after = len(text) if end < 0 else end + len(self.close_block)
        try:
            name, arguments = self._read_inside(inside)
        except MalformedError as e:
            reasons, meant = [str(e)], e.name
        else:
            if end >= 0:
                return [ToolCall(self._new_id(), name, arguments)], after
            reasons, meant = [], name
        if end < 0:
            reasons.append(f"unterminated: there is no {self.close_block} after it")
        return [ParseFailure(text[tag.start() : after], "; ".join(reasons), meant)], after

    @abstractmethod
    def _read_inside(self, block: str) -> tuple[str, dict[str, Any]]:
        """Parse a block; return the tool's name and the arguments."""


class Qwen3CoderParser(BlockParser):
    """Parser of Qwen3-Coder's format, `<tool_call><function=x>`; see the module and `SchemaParser`.

    A line break after a value's opening tag, and a line break before its closing tag, are not part of the value.
    """

    tags: ClassVar[re.Pattern[str]] = re.compile(r"</?think>|</?tool_call>|<function=|</function>")
    values: ClassVar[ValueTags] = ValueTags(
        open=re.compile(r"\s*<parameter=([^\s<>]{1,200})>"),
        close="</parameter>",
        inner=re.compile(r"</?(?:parameter|function)[=>]"),
        key_format="the parameter {!r} of {!r}",
        value_format="the parameter {!r} of {!r}",
        unclosed_format=_UNCLOSED_FORMAT,
    )
    may_be_python: ClassVar[bool] = True
    untyped_is_json: ClassVar[bool] = False
    _function: ClassVar[re.Pattern[str]] = re.compile(r"\s*<function=([^\s<>]{1,200})>")
    _end: ClassVar[re.Pattern[str]] = re.compile(r"\s*</function>\s*")

    def _read_call(self, text: base.JSONSource, tag: re.Match[str]) -> ReadResult:
        if tag[0] == self.open_block:
            return self._read_block(text, tag)
        if tag[0] != "<function=":
            return [ParseFailure(tag[0], f"a {tag[0]} without its opening tag before it")], tag.end()
        following = self.tags.search(text, tag.end())
        if following is None:
            end = len(text)
        else:
            end = following.end() if following[0] == "</function>" else following.start()
        reason = f"a function outside of {self.open_block} ... {self.close_block}"
        return [ParseFailure(text[tag.start() : end], reason)], end

    def _read_inside(self, block: str) -> tuple[str, dict[str, Any]]:
        function = self._function.match(block)
        if function is None:
            raise MalformedError(
                f"expected <function=TOOL> after {self.open_block}; got {base.quote(block.lstrip(), 0)}"
            )
        name = function[1]
        arguments, position = self._read_arguments(block, function.end(), name)
        if not self._end.fullmatch(block, position):
            expected = "expected <parameter=NAME> or </function> and nothing after it"
            raise MalformedError(
                f"{expected} in the call of {name!r}; got {base.quote(block[position:].lstrip(), 0)}", name
            )
        return name, arguments

    def _value_text(self, text: str) -> str:
        return text.removeprefix("\n").removesuffix("\n")


class SeedOSSParser(Qwen3CoderParser):
    """Parser of the format of Seed-OSS: like `Qwen3CoderParser`, but all line breaks in a value belong to the value."""

    open_block: ClassVar[str] = "<seed:tool_call>"
    close_block: ClassVar[str] = "</seed:tool_call>"
    open_reasoning: ClassVar[str] = "<seed:think>"
    close_reasoning: ClassVar[str] = "</seed:think>"
    tags: ClassVar[re.Pattern[str]] = re.compile(r"</?seed:(?:think|tool_call)>|<function=|</function>")

    def _value_text(self, text: str) -> str:
        return text


class GLM4Parser(BlockParser):
    """Parser of the format of GLM-4.5, 4.6 and 4.7; see the module and `SchemaParser`.

    White space between tags is ignored; white space in a value belongs to the value.
    """

    tags: ClassVar[re.Pattern[str]] = re.compile(r"</?think>|</?tool_call>|</?arg_(?:key|value)>")
    values: ClassVar[ValueTags] = ValueTags(
        open=re.compile(r"\s*<arg_key>([^\s<>](?:[^<>]{0,198}[^\s<>])?)</arg_key>\s*<arg_value>"),
        close="</arg_value>",
        inner=re.compile(r"</?arg_(?:key|value)>"),
        key_format="the key {!r} for {!r}",
        value_format="the value of {!r} for {!r}",
        unclosed_format=_UNCLOSED_FORMAT,
    )
    untyped_is_json: ClassVar[bool] = True
    _name: ClassVar[re.Pattern[str]] = re.compile(r"\s*([^\s<>{}\[\]\"'=]{1,200})\s*(?=<arg_key>|\Z)")

    def _read_call(self, text: base.JSONSource, tag: re.Match[str]) -> ReadResult:
        if tag[0] == self.open_block:
            return self._read_block(text, tag)
        reason = f"a {tag[0]} outside of {self.open_block} ... {self.close_block}"
        return [ParseFailure(tag[0], reason)], tag.end()

    def _read_inside(self, block: str) -> tuple[str, dict[str, Any]]:
        head = self._name.match(block)
        if head is None:
            raise MalformedError(
                f"expected the tool's name after {self.open_block}, then <arg_key>; got {base.quote(block.lstrip(), 0)}"
            )
        name = head[1]
        arguments, position = self._read_arguments(block, head.end(), name)
        rest = block[position:].lstrip()
        if rest:
            expected = "expected <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>, no white space around the key"
            raise MalformedError(f"{expected}, in the call of {name!r}; got {base.quote(rest, 0)}", name)
        return name, arguments


Tags = tuple[str, str, str, str]


class SchemaSectionParser(SchemaParser, SectionParser):
    """Base class for formats with bare values and several calls in a section; see `SectionParser`."""

    section: ClassVar[Tags]  # the section's opening and closing tags, then a call's
    head: ClassVar[re.Pattern[str]]  # matches the text after a call's opening tag; its group is the tool's name
    head_format: ClassVar[str]  # the expected head, for a failure's reason

    def __init__(self, new_id: NewId = base.random_id, schemas: Schemas | None = None) -> None:
        super().__init__(new_id, schemas)
        self.sections = {"": Section(*self.section, self._read_tagged_call)}

    def _read_tagged_call(self, text: base.JSONSource, start: int) -> ReadCall:
        head = self.head.match(text, start)
        if head is None:
            raise MalformedError(f"expected {self.head_format}; got {base.quote(text, start)}")
        name = self._tool_name(head[1])
        arguments, end = self._read_arguments(text, head.end(), name)
        return name, arguments, None, base.expect_tag(text, end, self.section[3], name)

    def _tool_name(self, written: str) -> str:
        """Return the tool that a call's written name refers to."""
        return written


class MiniMaxM2Parser(SchemaSectionParser):
    """Parser of MiniMax-M2's format, `<minimax:tool_call><invoke name="x">`; see the module."""

    tags: ClassVar[re.Pattern[str]] = re.compile(r"</?think>|</?minimax:tool_call>|<invoke(?= name=\")")
    section: ClassVar[Tags] = ("<minimax:tool_call>", "</minimax:tool_call>", "<invoke", "</invoke>")
    head: ClassVar[re.Pattern[str]] = re.compile(r' name="([^"\s<>]{1,200})">')
    head_format: ClassVar[str] = '<invoke name="TOOL">'
    values: ClassVar[ValueTags] = ValueTags(
        open=re.compile(r'\s*<parameter name="([^"<>]{1,200})">'),
        close="</parameter>",
        inner=re.compile(r"</?(?:minimax:tool_call>|invoke\b|parameter\b>?)"),
        key_format="the parameter {!r} of {!r}",
        value_format="the parameter {!r} of {!r}",
        unclosed_format=_UNCLOSED_FORMAT,
    )
    untyped_is_json: ClassVar[bool] = False


class Hunyuan3Parser(SchemaSectionParser):
    """Parser of Hunyuan 3's format, `<tool_calls:opensource>`; see the module."""

    tags: ClassVar[re.Pattern[str]] = re.compile(r"</?(?:think|tool_calls?|tool_sep|arg_key|arg_value):opensource>")
    open_reasoning: ClassVar[str] = "<think:opensource>"
    close_reasoning: ClassVar[str] = "</think:opensource>"
    section: ClassVar[Tags] = (
        "<tool_calls:opensource>",
        "</tool_calls:opensource>",
        "<tool_call:opensource>",
        "</tool_call:opensource>",
    )
    head: ClassVar[re.Pattern[str]] = re.compile(r"\s*([^\s<>{}\[\]\"'=]{1,200})\s*<tool_sep:opensource>")
    head_format: ClassVar[str] = "TOOL<tool_sep:opensource>"
    values: ClassVar[ValueTags] = ValueTags(
        open=re.compile(
            r"\s*<arg_key:opensource>([^\s<>](?:[^<>]{0,198}[^\s<>])?)</arg_key:opensource>\s*<arg_value:opensource>"
        ),
        close="</arg_value:opensource>",
        inner=re.compile(r"</?(?:tool_calls?|tool_sep|arg_key|arg_value):opensource>"),
        key_format="the key {!r} for {!r}",
        value_format="the value of {!r} for {!r}",
        unclosed_format=_UNCLOSED_FORMAT,
    )
    untyped_is_json: ClassVar[bool] = True


_MUSE_HEADER: Final = re.compile(r"\s*+(?:<\|start\|>assistant)?+\s*+(?:to=(?P<to>[^\s<]{1,200}))?+\s*+<\|message\|>")
_MUSE_END: Final = re.compile(r"<\|eo[mt]\|>")
_MUSE_MARKER: Final = re.compile(r"<\|(?:start|message|eom|eot)\|>|</?atem:(?:function_calls|invoke|parameter)\b")
_MUSE_TOOL: Final = re.compile(r"to=(?!(?:self|user)(?![^\s<]))([^\s<]{1,200})|</?atem:")


class MuseGlimmerParser(SchemaSectionParser):
    """Parser of Muse Glimmer's format, messages with recipients; see the module.

    The text begins after the prompt's `<|start|>assistant`, or inside the reasoning that the prompt opened. The last
    message has no closing token if that token ended the turn. Only a closing token ends a message, so a call in
    unclosed reasoning is a draft. Text outside of messages is reasoning, or a failure if it addresses a tool or
    contains a call. A turn without any marker is text, unless the prompt opened reasoning.
    """

    open_reasoning: ClassVar[str] = "to=self<|message|>"
    close_reasoning: ClassVar[str] = "<|eom|>"
    tags: ClassVar[re.Pattern[str]] = re.compile(r"<atem:function_calls>")
    section: ClassVar[Tags] = ("<atem:function_calls>", "</atem:function_calls>", "<atem:invoke", "</atem:invoke>")
    head: ClassVar[re.Pattern[str]] = re.compile(r' name="([^"\s<>]{1,200})">')
    head_format: ClassVar[str] = '<atem:invoke name="TOOL">'
    values: ClassVar[ValueTags] = ValueTags(
        open=re.compile(r'\s*<atem:parameter name="([^"<>]{1,200})">'),
        close="</atem:parameter>",
        inner=re.compile(r"</?atem:(?:function_calls|invoke|parameter)\b>?"),
        key_format="the parameter {!r} of {!r}",
        value_format="the parameter {!r} of {!r}",
        unclosed_format=_UNCLOSED_FORMAT,
    )
    untyped_is_json: ClassVar[bool] = True

    def _split(self, text: str, *, in_reasoning: bool, reads_calls: bool) -> list[Segment]:
        if not in_reasoning and _MUSE_MARKER.search(text) is None:
            return [Text(text)] if text.strip() else []
        found: list[Segment] = []
        recipient: str | None = "self"  # of the current message, whose content begins at `position`
        start = position = 0
        while in_reasoning or start < len(text):
            if not in_reasoning:
                header = _MUSE_HEADER.match(text, start)
                recipient, position = (None, start) if header is None else (header["to"] or "user", header.end())
            close = _MUSE_END.search(text, position)
            end, after = (len(text), len(text)) if close is None else close.span()
            content, in_reasoning = text[position:end], False
            if recipient in ("self", "user"):
                base.add_text(found, Reasoning if recipient == "self" else Text, content)
            elif not reads_calls and (recipient is not None or _MUSE_TOOL.search(content)):
                base.add_text(found, Text, text[start:after])
            elif recipient is not None:
                found += self._calls(content, recipient, text[start:after])
            elif meant := _MUSE_TOOL.search(content):
                expected = "a call stands in a message <|start|>assistant to=<tool><|message|>...<|eom|>"
                found.append(ParseFailure(text[start:after], f"{expected}; got {base.quote(text, start)}", meant[1]))
            else:
                base.add_text(found, Reasoning, text[start:after])
            start = after
        return found

    def _calls(self, content: str, recipient: str, message: str) -> list[Segment]:
        source = base.JSONSource(content)
        found: list[Segment] = []
        position = base.skip_white_space(source, 0)
        while tag := self.tags.match(source, position):
            segments, end = self._read_call(source, tag)
            found += segments
            position = base.skip_white_space(source, end)
        if position < len(source) or not found:
            expected = f"a message to {recipient!r} is <atem:function_calls> ... </atem:function_calls>"
            reason = f"{expected}; got {base.quote(source, position)}"
            found.append(ParseFailure(content[position:] if found else message, reason, recipient))
        return found

    def _tool_name(self, written: str) -> str:
        first, _, rest = written.partition(".")
        return first if first == rest and first in self._schemas and written not in self._schemas else written
