"""Formats whose call is a JSON object, `{"name": "x", "arguments": {}}`: Hermes, Llama 3, Mistral and others.

Hermes, which Qwen uses: `<tool_call>{"name": "x", "arguments": {}}</tool_call>`; reasoning is in `<think>`.

Llama 3: the whole answer is `{"name": "x", "parameters": {}}`, optionally after `<|python_tag|>`. Models also write
`"arguments"` for `"parameters"`; like SGLang, this parser accepts either, but not both in one call. Several calls are
separated by semicolons, as in SGLang and vLLM; the template itself can write one call only. Sources: the chat
templates of Llama 3.1, 3.2 and 3.3 (as in vllm-project/vllm, examples/tool_chat_template_llama3.1_json.jinja) and
sgl-project/sglang, function_call/llama32_detector.py. Meta's documentation shows calls with a leading
`"type": "function"`, which is optional here. Llama 4's own template has text between `<|python_start|>` and
`<|python_end|>`, and the calls after it, without separators. Built-in tools and code after `<|python_tag|>` are not
JSON, so they are failures. These models don't reason; `<think>` is parsed for derived models that do.

Mistral: `[TOOL_CALLS]` and an array of calls, or a name and its arguments; reasoning is in `[THINK]`:
- Tokenizers up to v7: `[TOOL_CALLS] [{"name": "x", "arguments": {}}]`, each call with an optional "id".
- v11: `[TOOL_CALLS]x[CALL_ID]123456789[ARGS]{}` for each call.
- v13: `[TOOL_CALLS]x[ARGS]{}` for each call.

All three are accepted, since they can't be confused. Sources: the models' chat templates (as in vllm-project/vllm,
examples/tool_chat_template_mistral_official.jinja; Mistral-Small-3.2's and Ministral-3's) and sgl-project/sglang,
function_call/mistral_detector.py.

Calls in an array, after or between tags: Granite 3 (`<|tool_call|>[...]`), Phi-4-mini (`functools[...]`), Hunyuan A13B
(`<tool_calls>[...]</tool_calls>`). Apertus' objects have one key, the tool's name: `<|tools_prefix|>[{"x": {}}]`, and
`<|tools_suffix|>` ends the turn. Sources: Granite-3.3's, Hunyuan-A13B's and Apertus' chat templates, vllm-project/vllm,
tool_parsers/hunyuan_a13b_tool_parser.py, phi4mini_tool_parser.py and examples/tool_chat_template_phi4_mini.jinja.
"""

import contextlib
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from strands_rollout.tool_parsers import base
from strands_rollout.tool_parsers.base import MalformedError, ParseFailure, ReadResult, TaggedParser, ToolCall

_LEADING_NAME: Final = re.compile(r'\{\s{0,20}"name"\s{0,20}:\s{0,20}"([^"\\\x00-\x1f]{1,200})"')


def _find_call_faults(
    value: Mapping[str, Any], *, arguments: str = "arguments", optional: str | None = None
) -> list[str]:
    """List the faults of a call's object, which may also have a string under the key `optional`."""
    reasons = []
    if "name" not in value:
        reasons.append("the name is missing")
    elif not isinstance(value["name"], str) or not value["name"].strip():
        reasons.append(f"the name is {_describe_type(value['name'])}, not a string with characters in it")
    if arguments not in value:
        reasons.append(f"the {arguments} are missing")
    elif not isinstance(value[arguments], dict):
        reasons.append(f"the {arguments} are {_describe_type(value[arguments])}, not an object")
    if optional is not None and not isinstance(value.get(optional, ""), str):
        reasons.append(f"the {optional} is {_describe_type(value[optional])}, not a string")
    others = [key for key in value if key not in ("name", arguments, optional)]
    if others:
        reasons.append(f"there are other keys than name and {arguments}: {', '.join(map(repr, others[:5]))}")
    return [*reasons, f'expected {{"name": "<tool>", "{arguments}": {{...}}}} and nothing else'] if reasons else []


def _get_name(value: Mapping[str, Any]) -> str | None:
    name = value.get("name")
    return name if isinstance(name, str) and name else None


def _leading_name(text: str, start: int) -> str | None:
    """Return the name at the beginning of a JSON object, or None; the rest of the object may be invalid."""
    name = _LEADING_NAME.match(text, start)
    return name[1] if name else None


def _describe_type(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return "a string" if value else "an empty string"
    return "an array" if isinstance(value, list) else "an object" if isinstance(value, dict) else "a number"


_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"


class HermesParser(TaggedParser):
    """Parser of the format of Hermes and Qwen, JSON in `<tool_call>`; see the module.

    After the opening tag, a call's block has a JSON object, with optional white space around it, and `</tool_call>`;
    tags inside the object's strings are content. Any other block is a failure. A failed block ends at the first
    `</tool_call>` after the JSON object. If the JSON is invalid, the block ends at the first `</tool_call>` after the
    opening tag. Without such a tag, the block ends at the end of the text.

    The time is linear in the text, although the text after the first `</tool_call>` of a broken block is parsed again.
    The broken block's JSON continues past a tag only if the tag is inside a string. The next block begins inside such a
    string, so text inside strings of one block is outside strings of the other. So the next
    block's JSON ends at the first tag inside the broken block's strings.
    """

    tags: ClassVar[re.Pattern[str]] = re.compile(r"</?(?:think|tool_call)>")

    def _read_call(self, text: base.JSONSource, tag: re.Match[str]) -> ReadResult:
        if tag[0] == _CLOSE:
            return [ParseFailure(_CLOSE, f"a {_CLOSE} without its {_OPEN} before it")], tag.end()
        start = base.skip_white_space(text, tag.end())
        try:
            value, end = base.decode_object(text, start, origin=tag.end())
        except base.StrictJSONError as e:
            return _failure(text, tag.start(), tag.end(), [str(e)], _leading_name(text, start))
        reasons = _find_call_faults(value)
        close = base.skip_white_space(text, end)
        if text.startswith(_CLOSE, close):
            if not reasons:
                return [ToolCall(self._new_id(), value["name"], value["arguments"])], close + len(_CLOSE)
        elif close < len(text):
            expected = f"expected {_CLOSE} after the JSON object, at offset {close - tag.end()}"
            reasons.append(f"{expected}; got {base.quote(text, close)}")
        return _failure(text, tag.start(), end, reasons, _get_name(value))


def _failure(text: str, opened: int, search_from: int, reasons: list[str], name: str | None) -> ReadResult:
    close = text.find(_CLOSE, search_from)
    end = len(text) if close < 0 else close + len(_CLOSE)
    if close < 0:
        reasons = [*reasons, f"unterminated: there is no {_CLOSE} after it"]
    return [ParseFailure(text[opened:end], "; ".join(reasons), name)], end


_PYTHON: Final = "<|python_"
_PYTHON_TAG: Final = "<|python_tag|>"
_PYTHON_END: Final = "<|python_end|>"
_LIKE_A_CALL: Final = re.compile(
    r'\{\s{0,20}"name"\s{0,20}:\s{0,20}"[^"\\\x00-\x1f]{1,200}"\s{0,20},\s{0,20}"(?:parameters|arguments)"'
)


class Llama3JSONParser(TaggedParser):
    """Parser of Llama 3's JSON format, in which a call needs no tag; see the module.

    A JSON object with neither `parameters` nor `arguments`, but with keys other than `type` and `name`, is an ordinary
    answer. A call must be the whole answer, or follow `<|python_tag|>` or `<|python_end|>`; after other text, it is a
    failure. All text after a call belongs to the attempted calls, so a `</think>` there does not close reasoning.
    """

    tags: ClassVar[re.Pattern[str]] = re.compile(
        r'</?think>|<\|python_(?:tag|start|end)\|>|(?<![^\s>])\{(?=\s{0,20}"(?:type|name|parameters|arguments)"\s{0,20}:)'
    )

    def _read_first(self, text: base.JSONSource, tag: re.Match[str]) -> ReadResult | None:
        if tag[0].startswith(_PYTHON):
            return None
        with contextlib.suppress(base.StrictJSONError):
            value, _ = base.decode_object(text, tag.start(), origin=tag.start())
            if not ({"parameters", "arguments"} & value.keys() or value.keys() <= {"type", "name"}):
                return None  # clearly not meant as a call
        return self._read_calls(text, tag.start(), tag.start()), len(text)

    def _read_call(self, text: base.JSONSource, tag: re.Match[str]) -> ReadResult | None:
        is_object = text.startswith("{", base.skip_white_space(text, tag.end()))
        if tag[0] == _PYTHON_TAG or (tag[0] == _PYTHON_END and is_object):
            return self._read_calls(text, tag.start(), tag.end()), len(text)
        if tag[0].startswith(_PYTHON):
            return [], tag.end()
        if not _LIKE_A_CALL.match(text, tag.start()):
            return None
        reason = f"a call must be the whole answer, or stand after {_PYTHON_TAG}"
        return [ParseFailure(text[tag.start() :], reason, _leading_name(text, tag.start()))], len(text)

    def _read_calls(self, text: base.JSONSource, opened: int, start: int) -> list[ToolCall | ParseFailure]:
        found: list[ToolCall | ParseFailure] = []
        separators = ";{" if text.startswith(_PYTHON_END, opened) else ";"
        while True:
            begin = base.skip_white_space(text, start)
            try:
                value, end = base.decode_object(text, begin, origin=begin)
            except base.StrictJSONError as e:
                return [*found, ParseFailure(text[opened:], str(e), _leading_name(text, begin))]
            after = base.skip_white_space(text, end)
            key = "arguments" if "arguments" in value and "parameters" not in value else "parameters"
            reasons = _find_call_faults(value, arguments=key, optional="type")
            if value.get("type", "function") != "function":
                reasons.append(f'the type is {value["type"]!r}; expected "function"')
            if after < len(text) and text[after] not in separators:
                reasons.append(f"expected the end of the answer, or ; and another call; got {base.quote(text, after)}")
                return [*found, ParseFailure(text[opened:], "; ".join(reasons), _get_name(value))]
            if reasons:
                found.append(ParseFailure(text[opened:end], "; ".join(reasons), _get_name(value)))
            else:
                found.append(ToolCall(self._new_id(), value["name"], value[key]))
            if after == len(text):
                return found
            opened, start = after, after + (text[after] == ";")


_CALLS: Final = "[TOOL_CALLS]"
_HEADER: Final = re.compile(r"([^\s\[\]{}\"]{1,200})(?:\[CALL_ID\]([A-Za-z0-9]{9}))?\[ARGS\]")
_ID: Final = re.compile(r"[A-Za-z0-9]{9}")
_NAME: Final = re.compile(r"[^\s\[\]{}\"]{1,200}")


class ArrayParser(TaggedParser):
    """Base class for formats with a JSON array of calls after a tag.

    If an array is empty, is not valid JSON, has an element other than an object, or lacks a required closing tag, the
    whole array is one failure. The failure ends at a closing tag, the next opening tag, the end of reasoning, or the
    end of the text, whichever comes first. In an otherwise valid array, each object that is not a call is a failure.
    """

    open_calls: ClassVar[str]
    close_calls: ClassVar[str] = ""
    closes_turn: ClassVar[bool] = False
    """True if the closing tag may be the turn's end token. The text lacks that token."""
    id_key: ClassVar[str | None] = None
    """Key of a call's optional id; None if calls of this format have no id.

    An id that is not a string makes the call a failure. A string that is not exactly nine ASCII letters or digits is
    ignored.
    """

    def _read_call(self, text: base.JSONSource, tag: re.Match[str]) -> ReadResult:
        if tag[0] != self.open_calls:
            return [ParseFailure(tag[0], f"a {tag[0]} without {self.open_calls} before it")], tag.end()
        try:
            found, end = self._read_calls(text, tag.start(), base.skip_white_space(text, tag.end()))
            if not self.close_calls or (self.closes_turn and not text[end:].strip()):
                return found, end
            return found, base.expect_tag(text, end, self.close_calls, None)
        except MalformedError as e:
            ends = filter(None, (self.close_calls, self.open_calls, self.close_reasoning))
            nearest = re.compile("|".join(map(re.escape, ends))).search(text, e.position or tag.end())
            is_close = nearest is not None and nearest[0] == self.close_calls
            end = len(text) if nearest is None else nearest.end() if is_close else nearest.start()
            return [ParseFailure(text[tag.start() : end], str(e), e.name)], end

    def _read_calls(self, text: base.JSONSource, opened: int, start: int) -> ReadResult:
        """Parse the calls after the tag that begins at `opened`."""
        if not text.startswith("[", start):
            raise MalformedError(
                f"expected a JSON array of calls after {self.open_calls}; got {base.quote(text, start)}"
            )
        return self._read_array(text, opened, start)

    def _read_array(self, text: base.JSONSource, opened: int, start: int) -> ReadResult:
        elements, begins, ends = list[dict[str, Any]](), [opened], list[int]()
        position, mark = start, "["
        while text.startswith(mark, position):
            begin = base.skip_white_space(text, position + 1)
            try:
                value, end = base.decode_object(text, begin, origin=start)
            except base.StrictJSONError as e:
                raise MalformedError(f"the array of calls: {e}", _leading_name(text, begin)) from e
            elements.append(value)
            begins.append(begin)
            ends.append(end)
            position, mark = base.skip_white_space(text, end), ","
        if not text.startswith("]", position):
            expected = "expected , and another call, or ] after the last"
            raise MalformedError(f"{expected}; got {base.quote(text, position)}", _get_name(elements[-1]), position)
        # the first element's text includes the tag and the bracket before it; the last element's text includes the
        # bracket after it
        del begins[1]
        ends[-1] = position + 1
        found: list[ToolCall | ParseFailure] = []
        for value, begin, end in zip(elements, begins, ends, strict=True):
            found.append(self._read_element(value, text[begin:end]))
        return found, position + 1

    def _read_element(self, value: dict[str, Any], text: str) -> ToolCall | ParseFailure:
        if reasons := _find_call_faults(value, optional=self.id_key):
            return ParseFailure(text, "; ".join(reasons), _get_name(value))
        written_id = value.get(self.id_key or "", "")
        shown_id = written_id if _ID.fullmatch(written_id) else None
        return ToolCall(self._new_id(), value["name"], value["arguments"], shown_id)


class GraniteParser(ArrayParser):
    """Parser of Granite 3's format, `<|tool_call|>[...]`; see the module and `ArrayParser`."""

    tags: ClassVar[re.Pattern[str]] = re.compile(r"</?think>|<\|tool_call\|>")
    open_calls: ClassVar[str] = "<|tool_call|>"


class Phi4MiniParser(ArrayParser):
    """Parser of Phi-4-mini's format, `functools[...]`; see the module and `ArrayParser`."""

    tags: ClassVar[re.Pattern[str]] = re.compile(r"</?think>|functools(?=\[)")
    open_calls: ClassVar[str] = "functools"


class HunyuanA13BParser(ArrayParser):
    """Parser of Hunyuan A13B's format, `<tool_calls>[...]</tool_calls>`; see the module and `ArrayParser`."""

    tags: ClassVar[re.Pattern[str]] = re.compile(r"</?(?:think|tool_calls)>")
    open_calls: ClassVar[str] = "<tool_calls>"
    close_calls: ClassVar[str] = "</tool_calls>"


class ApertusParser(ArrayParser):
    """Parser of Apertus' format, `<|tools_prefix|>[{"x": {}}]`; see the module and `ArrayParser`."""

    tags: ClassVar[re.Pattern[str]] = re.compile(r"<\|(?:inner|tools)_(?:prefix|suffix)\|>")
    open_reasoning: ClassVar[str] = "<|inner_prefix|>"
    close_reasoning: ClassVar[str] = "<|inner_suffix|>"
    open_calls: ClassVar[str] = "<|tools_prefix|>"
    close_calls: ClassVar[str] = "<|tools_suffix|>"
    closes_turn: ClassVar[bool] = True

    def _read_element(self, value: dict[str, Any], text: str) -> ToolCall | ParseFailure:
        name, arguments = next(iter(value.items()), ("", None))
        if len(value) == 1 and name.strip() and isinstance(arguments, dict):
            return ToolCall(self._new_id(), name, arguments)
        return ParseFailure(text, 'expected {"<tool>": {...}} and nothing else', name or None)


class MistralParser(ArrayParser):
    """Parser of Mistral's three formats, all with `[TOOL_CALLS]`; see the module and `ArrayParser`."""

    open_calls: ClassVar[str] = _CALLS
    id_key: ClassVar[str | None] = "id"
    tags: ClassVar[re.Pattern[str]] = re.compile(r"\[TOOL_CALLS\]|\[/?THINK\]|\[ARGS\]|\[CALL_ID\]")
    open_reasoning: ClassVar[str] = "[THINK]"
    close_reasoning: ClassVar[str] = "[/THINK]"

    def _read_calls(self, text: base.JSONSource, opened: int, start: int) -> ReadResult:
        if text.startswith("[", start) and not text.startswith(_CALLS, start):
            return self._read_array(text, opened, start)
        header = _HEADER.match(text, start)
        if header is None:
            meant = _NAME.match(text, start)
            expected = f"expected a JSON array of calls, or <tool>[ARGS]{{...}}, after {_CALLS}"
            raise MalformedError(f"{expected}; got {base.quote(text, start)}", meant[0] if meant else None)
        arguments, end = base.decode_arguments(text, header.end(), header[1])
        return [ToolCall(self._new_id(), header[1], arguments, header[2])], end
