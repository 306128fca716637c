"""Formats whose values are not written as JSON but as Python literals or Gemma 4's own literals.

Llama 4: `[x(key='value', other=[1, True])]` at the end of the answer, optionally after text, and optionally between
`<|python_start|>` and `<|python_end|>`. Sources: models/llama4/prompt_format.md of meta-llama/llama-models,
vllm-project/vllm, examples/tool_chat_template_llama4_pythonic.jinja, and sgl-project/sglang,
function_call/pythonic_detector.py. The model's own template requests JSON, which `llama3_json` parses.

LFM2: the same list of calls, between `<|tool_call_start|>` and `<|tool_call_end|>`. Sources: the models' chat templates
(as in ggml-org/llama.cpp, models/templates/LFM2-8B-A1B.jinja and LFM2.5-8B-A1B.jinja) and sgl-project/sglang,
function_call/lfm2_detector.py; SGLang repairs invalid calls, but this parser does not.

In both formats, a name may contain dots and dashes, and a string may contain line breaks: the templates write both.
JSON's true, false and null are accepted too.

Gemma 4: `<|tool_call>call:x{key:<|"|>value<|"|>,other:[1,true]}<tool_call|>`, with bare keys, and strings without
escapes between `<|"|>` tokens; reasoning is in `<|channel>thought`. Sources: the model's chat template (as in
ggml-org/llama.cpp, models/templates/google-gemma-4-31B-it.jinja), which writes None for null, and sgl-project/sglang,
function_call/gemma4_detector.py. An unquoted word, which SGLang accepts as a string, is a failure.
"""

import json
import re
from typing import Any, ClassVar, Final

from strands_rollout.tool_parsers import base
from strands_rollout.tool_parsers.base import (
    MalformedError,
    ParseFailure,
    ReadResult,
    Reasoning,
    TaggedParser,
    ToolCall,
)
from strands_rollout.tool_parsers.json_object import ArrayParser

# Python's strings and constants. JSON's constants, which are invalid in Python, match too: `_WORDS` lacks them, so
# `_as_json` raises a KeyError
_PYTHON: Final = re.compile(
    r"""'(?:[^'\\\n]|\\.)*+'|"(?:[^"\\\n]|\\.)*+"|\b(?:True|False|None|true|false|null)\b""", re.DOTALL
)
# the same, but strings may contain line breaks, and JSON's constants stay as they are
_IN_CALLS: Final = re.compile(r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+"|\b(?:True|False|None)\b""", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED: Final[dict[str, str]] = dict(zip("\\'\"abfnrtv\n", ["\\", "'", '"', *"\a\b\f\n\r\t\v", ""], strict=True))
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}


def python_as_json(text: str, literals: re.Pattern[str] = _PYTHON) -> str:
    """Replace the strings and constants of Python literals in a text by JSON.

    Nothing is evaluated or parsed by Python, whose own parser can be made to crash.

    Raises:
        ValueError, OverflowError: A string has an invalid escape, or an unsupported escape (octal, or by name).
        KeyError: A constant is JSON's, such as `true`, and `literals` matches it.
    """
    return literals.sub(_as_json, text)


def _as_json(token: re.Match[str]) -> str:
    written = token[0]
    return json.dumps(_ESCAPE.sub(_unescape, written[1:-1])) if written[0] in "'\"" else _WORDS[written]


def _unescape(escape: re.Match[str]) -> str:
    written = escape[1]
    if len(written) > 1:
        return chr(int(written[1:], 16))
    if written in "xuUN01234567":
        raise ValueError(f"the escape {escape[0]} is not read")
    return _ESCAPED.get(written, escape[0])


_CALL: Final = re.compile(r"\s*+([^\W\d][\w.-]{0,199})\s*+\(")
_KEY: Final = re.compile(r"\s*+([^\W\d][\w.-]{0,199})\s*+=\s*+")


def read_calls(block: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse a block that is a list of calls; return the name and arguments of each.

    Raises:
        MalformedError: The block is not a list of calls with keyword arguments whose values are JSON values, written as
            Python literals.
    """
    try:
        text = base.JSONSource(python_as_json(block, _IN_CALLS))
    except (ValueError, OverflowError) as e:
        raise MalformedError(f"a string can't be read: {e}") from e
    calls = list[tuple[str, dict[str, Any]]]()
    position, mark = base.skip_white_space(text, 0), "["
    while text.startswith(mark, position):
        opened = _CALL.match(text, position + 1)
        if opened is None:
            raise MalformedError(f"expected a call as in [tool(key=value)]; got {base.quote(text, position + 1)}")
        arguments, position = _read_arguments(text, opened.end(), opened[1])
        calls.append((opened[1], arguments))
        position, mark = base.skip_white_space(text, position), ","
    if not calls or not text.startswith("]", position) or text[position + 1 :].strip():
        name = calls[-1][0] if calls else None
        expected = "expected [tool(key=value), ...] and nothing after it"
        raise MalformedError(f"{expected}; got {base.quote(text, position)}", name)
    return calls


def _read_arguments(text: base.JSONSource, start: int, name: str) -> tuple[dict[str, Any], int]:
    arguments = dict[str, Any]()
    position = base.skip_white_space(text, start)
    while not text.startswith(")", position):
        if arguments and not text.startswith(",", position):
            raise MalformedError(f"expected , or ) in the call of {name!r}; got {base.quote(text, position)}", name)
        position += bool(arguments)
        key = _KEY.match(text, position)
        if key is None:
            raise MalformedError(f"expected key=value in the call of {name!r}; got {base.quote(text, position)}", name)
        if key[1] in arguments:
            raise MalformedError(f"the argument {key[1]!r} of {name!r} stands twice", name)
        try:
            arguments[key[1]], position = base.decode_value(text, key.end(), origin=key.end())
        except base.StrictJSONError as e:
            raise MalformedError(f"the argument {key[1]!r} of {name!r}: {e}", name) from e
        position = base.skip_white_space(text, position)
    return arguments, position + 1


class PythonicParser(TaggedParser):
    """Parser of Llama 4's format, a list of Python calls; see the module.

    If text other than `<|python_end|>` follows a list of calls, the whole attempt is a failure.
    """

    tags: ClassVar[re.Pattern[str]] = re.compile(
        r"</?think>|<\|python_(?:start|end)\|>"
        r"|\[(?=\s{0,20}[^\W\d][\w.-]{0,199}\((?:\s{0,20}[^\W\d][\w.-]{0,199}\s{0,20}=[^=]|\s{0,20}\)\s{0,20}[,\]]))"
    )

    def _read_call(self, text: base.JSONSource, tag: re.Match[str]) -> ReadResult:
        if tag[0] == "<|python_end|>":
            return [], tag.end()
        begin = tag.start() if tag[0] == "[" else tag.end()
        try:
            calls = read_calls(text[begin:].strip().removesuffix("<|python_end|>"))
        except MalformedError as e:
            return [ParseFailure(text[tag.start() :], str(e), e.name)], len(text)
        return [ToolCall(self._new_id(), *call) for call in calls], len(text)


_BLOCK_END: Final = re.compile(r"<\|tool_call_(?:start|end)\|>")
_OBJECTS: Final = re.compile(r"\[\s*+\{")


class LFM2Parser(ArrayParser):
    """Parser of LFM2's format, a list of Python calls between tags; see the module. It also accepts JSON arrays."""

    tags: ClassVar[re.Pattern[str]] = re.compile(r"</?think>|<\|tool_call_(?:start|end)\|>")
    open_calls: ClassVar[str] = "<|tool_call_start|>"
    close_calls: ClassVar[str] = "<|tool_call_end|>"

    def _read_calls(self, text: base.JSONSource, opened: int, start: int) -> ReadResult:
        if _OBJECTS.match(text, start):
            return self._read_array(text, opened, start)
        following = _BLOCK_END.search(text, start)
        end = len(text) if following is None else following.start()
        return [ToolCall(self._new_id(), *call) for call in read_calls(text[start:end])], end


_HEAD: Final = re.compile(r"call:([^\s<>{}:]{1,200})(?=\{)")
# a string, a key with the character before it, a JSON quote (which the format does not allow), or None
_GEMMA: Final = re.compile(
    r'<\|"\|>((?:(?!<\|"\|>).)*+)<\|"\|>|([{,]\s*+)([^\s{}\[\],:"<>]{1,200})(?=\s*+:)|"|\bNone\b', re.DOTALL
)


class Gemma4Parser(TaggedParser):
    """Parser of Gemma 4's format, with its own literals; see the module. A call ends at the first closing tag."""

    tags: ClassVar[re.Pattern[str]] = re.compile(r"<\|channel>(?:thought)?|<channel\|>|<\|tool_call>|<tool_call\|>")
    open_reasoning: ClassVar[str] = "<|channel>thought"
    close_reasoning: ClassVar[str] = "<channel|>"

    def _read_call(self, text: base.JSONSource, tag: re.Match[str]) -> ReadResult | None:
        # any channel is reasoning, not only one named "thought": answers have no channel
        if tag[0] == "<|channel>":
            end, after = self._end_of_reasoning(text, tag.end())
            return [Reasoning(text[tag.start() : end])], after
        if tag[0] != "<|tool_call>":
            return [ParseFailure(tag[0], "it closes no call")], tag.end()
        end = text.find("<tool_call|>", tag.end())
        after = len(text) if end < 0 else end + len("<tool_call|>")
        head = _HEAD.match(text, tag.end())
        if head is None:
            reason = f"expected call:TOOL{{...}}; got {base.quote(text, tag.end())}"
        elif end < 0:
            reason = "unterminated: there is no <tool_call|> after it"
        else:
            try:
                arguments = base.decode_single_value(_GEMMA.sub(_gemma_as_json, text[head.end() : end]))
                return [ToolCall(self._new_id(), head[1], arguments)], after
            except base.StrictJSONError as e:
                reason = f"the arguments of {head[1]!r}, with keys and strings as in JSON: {e}"
        return [ParseFailure(text[tag.start() : after], reason, head[1] if head else None)], after


def _gemma_as_json(token: re.Match[str]) -> str:
    if token[0] == "None":
        return "null"
    if token[0] == '"':
        raise base.StrictJSONError('got a "; strings stand between <|"|> and <|"|>')
    return json.dumps(token[1]) if token[3] is None else f"{token[2]}{json.dumps(token[3])}"
