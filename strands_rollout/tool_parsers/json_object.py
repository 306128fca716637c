"""Formats whose call is one JSON object, `{"name": "x", "arguments": {}}`: Hermes, Llama 3, Mistral and others.

Hermes, which Qwen uses: `<tool_call>{"name": "x", "arguments": {}}</tool_call>`, and `<think>`.

Llama 3: the whole answer is `{"name": "x", "parameters": {}}`, perhaps after `<|python_tag|>`. Models write
`"arguments"` for `"parameters"` too, and SGLang takes either; so does this, but not both in one call. Several calls are
separated by semicolons, as SGLang and vLLM read them; the template itself can write one only. Sources: the chat
templates of Llama 3.1, 3.2 and 3.3 (as in vllm-project/vllm, examples/tool_chat_template_llama3.1_json.jinja) and
sgl-project/sglang, function_call/llama32_detector.py. Meta's documentation shows calls that begin with
`"type": "function"`, which may be there. Llama 4's own template has words between `<|python_start|>` and
`<|python_end|>`, and the calls after them, with nothing between. Built-in tools and code after `<|python_tag|>` are no
JSON: a failure. These models don't reason: `<think>` counts where one made from them does.

Mistral: `[TOOL_CALLS]` and an array of calls, or a name and its arguments; reasoning is `[THINK]`:
- Tokenizers up to v7: `[TOOL_CALLS] [{"name": "x", "arguments": {}}]`, each with an "id" or without.
- v11: `[TOOL_CALLS]x[CALL_ID]123456789[ARGS]{}`; v13: `[TOOL_CALLS]x[ARGS]{}`; once per call.

All three are taken; they can't be confused. Sources: the models' chat templates (as in vllm-project/vllm,
examples/tool_chat_template_mistral_official.jinja; Mistral-Small-3.2's and Ministral-3's) and sgl-project/sglang,
function_call/mistral_detector.py.

The array alone, after or between tags: Granite 3 (`<|tool_call|>[...]`), Phi-4-mini (`functools[...]`) and Hunyuan A13B
(`<tool_calls>[...]</tool_calls>`). Apertus' objects have one key, the tool's name: `<|tools_prefix|>[{"x": {}}]`, and
`<|tools_suffix|>` ends the turn. Sources: Granite-3.3's, Hunyuan-A13B's and Apertus' chat templates, vllm-project/vllm,
tool_parsers/hunyuan_a13b_tool_parser.py, phi4mini_tool_parser.py and examples/tool_chat_template_phi4_mini.jinja.
"""

import contextlib
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from strands_rollout.tool_parsers import base
from strands_rollout.tool_parsers.base import MalformedError, ParseFailure, Read, TaggedParser, ToolCall

_LEADING_NAME: Final = re.compile(r'\{\s{0,20}"name"\s{0,20}:\s{0,20}"([^"\\\x00-\x1f]{1,200})"')


def _call_faults(value: Mapping[str, Any], *, arguments: str = "arguments", also: str | None = None) -> list[str]:
    """What is wrong with a call's object; `also` is a key that may be there beside the two, with a string."""
    reasons = []
    if "name" not in value:
        reasons.append("the name is missing")
    elif not isinstance(value["name"], str) or not value["name"].strip():
        reasons.append(f"the name is {_kind_of(value['name'])}, not a string with characters in it")
    if arguments not in value:
        reasons.append(f"the {arguments} are missing")
    elif not isinstance(value[arguments], dict):
        reasons.append(f"the {arguments} are {_kind_of(value[arguments])}, not an object")
    if also is not None and not isinstance(value.get(also, ""), str):
        reasons.append(f"the {also} is {_kind_of(value[also])}, not a string")
    others = [key for key in value if key not in ("name", arguments, also)]
    if others:
        reasons.append(f"there are other keys than name and {arguments}: {', '.join(map(repr, others[:5]))}")
    return [*reasons, f'expected {{"name": "<tool>", "{arguments}": {{...}}}} and nothing else'] if reasons else []


def _name_of(value: Mapping[str, Any]) -> str | None:
    name = value.get("name")
    return name if isinstance(name, str) and name else None


def _leading_name(text: str, start: int) -> str | None:
    """The name of an object that can't be decoded, where it begins with that."""
    name = _LEADING_NAME.match(text, start)
    return name[1] if name else None


def _kind_of(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return "a string" if value else "an empty string"
    return "an array" if isinstance(value, list) else "an object" if isinstance(value, dict) else "a number"


_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"


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

    def _read_call(self, text: base.JSONSource, tag: re.Match[str]) -> Read:
        if tag[0] == _CLOSE:
            return [ParseFailure(_CLOSE, f"a {_CLOSE} without its {_OPEN} before it")], tag.end()
        start = base.skip_white_space(text, tag.end())
        try:
            value, end = base.decode_object(text, start, origin=tag.end())
        except base.StrictJSONError as e:
            return _failure(text, tag.start(), tag.end(), [str(e)], _leading_name(text, start))
        reasons = _call_faults(value)
        close = base.skip_white_space(text, end)
        if text.startswith(_CLOSE, close):
            if not reasons:
                return [ToolCall(self._new_id(), value["name"], value["arguments"])], close + len(_CLOSE)
        elif close < len(text):
            expected = f"expected {_CLOSE} after the JSON object, at offset {close - tag.end()}"
            reasons.append(f"{expected}; got {base.got(text, close)}")
        return _failure(text, tag.start(), end, reasons, _name_of(value))


def _failure(text: str, opened: int, search_from: int, reasons: list[str], name: str | None) -> Read:
    """The failure of the block that was opened at a position, and the position after the block."""
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
    """The format's parser; see `ToolParser`.

    An answer that is a JSON object without parameters, and with more than a name, is an answer and no call. What looks
    like a call after other text is a failure, since a call must be the whole answer; so all that follows a call is
    part of the attempt, and a `</think>` there closes nothing.
    """

    tags: ClassVar[re.Pattern[str]] = re.compile(
        r'</?think>|<\|python_(?:tag|start|end)\|>|(?<![^\s>])\{(?=\s{0,20}"(?:type|name|parameters|arguments)"\s{0,20}:)'
    )

    def _read_first(self, text: base.JSONSource, tag: re.Match[str]) -> Read | None:
        if tag[0].startswith(_PYTHON):
            return None
        with contextlib.suppress(base.StrictJSONError):
            value, _ = base.decode_object(text, tag.start(), origin=tag.start())
            if not ({"parameters", "arguments"} & value.keys() or value.keys() <= {"type", "name"}):
                return None  # no one would take it for a call
        return self._read_calls(text, tag.start(), tag.start()), len(text)

    def _read_call(self, text: base.JSONSource, tag: re.Match[str]) -> Read | None:
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
        """The calls from here to the end of the text."""
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
            reasons = _call_faults(value, arguments=key, also="type")
            if value.get("type", "function") != "function":
                reasons.append(f'the type is {value["type"]!r}; expected "function"')
            if after < len(text) and text[after] not in separators:
                reasons.append(f"expected the end of the answer, or ; and another call; got {base.got(text, after)}")
                return [*found, ParseFailure(text[opened:], "; ".join(reasons), _name_of(value))]
            if reasons:
                found.append(ParseFailure(text[opened:end], "; ".join(reasons), _name_of(value)))
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
    """A parser of a format with a JSON array of calls after a tag.

    An array that is no valid JSON is one failure, up to its closing tag, the next opening one, the end of reasoning, or
    the end; an element of a valid one that is no call is a failure of its own.
    """

    open_calls: ClassVar[str]
    close_calls: ClassVar[str] = ""
    closes_turn: ClassVar[bool] = False
    """Whether the closing tag ends a turn, and so is no part of its text."""
    id_key: ClassVar[str | None] = None
    """Of an id of nine letters and digits that a call may have."""

    def _read_call(self, text: base.JSONSource, tag: re.Match[str]) -> Read:
        if tag[0] != self.open_calls:
            return [ParseFailure(tag[0], f"a {tag[0]} without {self.open_calls} before it")], tag.end()
        try:
            found, end = self._read_calls(text, tag.start(), base.skip_white_space(text, tag.end()))
            if not self.close_calls or (self.closes_turn and not text[end:].strip()):
                return found, end
            return found, base.end_of_tag(text, end, self.close_calls, None)
        except MalformedError as e:
            ends = filter(None, (self.close_calls, self.open_calls, self.close_reasoning))
            nearest = re.compile("|".join(map(re.escape, ends))).search(text, e.position or tag.end())
            is_close = nearest is not None and nearest[0] == self.close_calls
            end = len(text) if nearest is None else nearest.end() if is_close else nearest.start()
            return [ParseFailure(text[tag.start() : end], str(e), e.name)], end

    def _read_calls(self, text: base.JSONSource, opened: int, start: int) -> Read:
        """What stands after the tag that begins at `opened`."""
        if not text.startswith("[", start):
            raise MalformedError(f"expected a JSON array of calls after {self.open_calls}; got {base.got(text, start)}")
        return self._read_array(text, opened, start)

    def _read_array(self, text: base.JSONSource, opened: int, start: int) -> Read:
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
            raise MalformedError(f"{expected}; got {base.got(text, position)}", _name_of(elements[-1]), position)
        # what is around the elements is shown by the first and the last, where they fail
        del begins[1]
        ends[-1] = position + 1
        found: list[ToolCall | ParseFailure] = []
        for value, begin, end in zip(elements, begins, ends, strict=True):
            found.append(self._read_element(value, text[begin:end]))
        return found, position + 1

    def _read_element(self, value: dict[str, Any], text: str) -> ToolCall | ParseFailure:
        if reasons := _call_faults(value, also=self.id_key):
            return ParseFailure(text, "; ".join(reasons), _name_of(value))
        written_id = value.get(self.id_key or "", "")
        shown_id = written_id if _ID.fullmatch(written_id) else None
        return ToolCall(self._new_id(), value["name"], value["arguments"], shown_id)


class GraniteParser(ArrayParser):
    """The format's parser; see `ArrayParser`."""

    tags: ClassVar[re.Pattern[str]] = re.compile(r"</?think>|<\|tool_call\|>")
    open_calls: ClassVar[str] = "<|tool_call|>"


class Phi4MiniParser(ArrayParser):
    """The format's parser; see `ArrayParser`."""

    tags: ClassVar[re.Pattern[str]] = re.compile(r"</?think>|functools(?=\[)")
    open_calls: ClassVar[str] = "functools"


class HunyuanA13BParser(ArrayParser):
    """The format's parser; see `ArrayParser`."""

    tags: ClassVar[re.Pattern[str]] = re.compile(r"</?(?:think|tool_calls)>")
    open_calls: ClassVar[str] = "<tool_calls>"
    close_calls: ClassVar[str] = "</tool_calls>"


class ApertusParser(ArrayParser):
    """The format's parser; see `ArrayParser`."""

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
    """The formats' parser; see `ToolParser`."""

    open_calls: ClassVar[str] = _CALLS
    id_key: ClassVar[str | None] = "id"
    tags: ClassVar[re.Pattern[str]] = re.compile(r"\[TOOL_CALLS\]|\[/?THINK\]|\[ARGS\]|\[CALL_ID\]")
    open_reasoning: ClassVar[str] = "[THINK]"
    close_reasoning: ClassVar[str] = "[/THINK]"

    def _read_calls(self, text: base.JSONSource, opened: int, start: int) -> Read:
        if text.startswith("[", start) and not text.startswith(_CALLS, start):
            return self._read_array(text, opened, start)
        header = _HEADER.match(text, start)
        if header is None:
            meant = _NAME.match(text, start)
            expected = f"expected a JSON array of calls, or <tool>[ARGS]{{...}}, after {_CALLS}"
            raise MalformedError(f"{expected}; got {base.got(text, start)}", meant[0] if meant else None)
        arguments, end = base.decode_arguments(text, header.end(), header[1])
        return [ToolCall(self._new_id(), header[1], arguments, header[2])], end
