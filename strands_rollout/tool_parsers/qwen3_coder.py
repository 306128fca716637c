"""Qwen3-Coder's and Qwen3.5's format: `<tool_call><function=x><parameter=key>value</parameter></function></tool_call>`.

Values are bare text. A string is the text; all else is JSON, or the words that Qwen3-Coder's template writes for it:
True, False, None. Which of them it is, the tool's schema says; where it says nothing, a value is a string. Sources: the
models' chat templates (as in vllm-project/vllm, examples/tool_chat_template_qwen3coder.jinja), and how SGLang and vLLM
read them (sgl-project/sglang, function_call/qwen3_coder_detector.py). Stricter than these: what does not fit its type
is a failure instead of a string, and no value is evaluated as Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from strands_rollout.tool_parsers.base import MalformedError, ParseFailure, Segment
from strands_rollout.tool_parsers.call_blocks import Call, got, read_block
from strands_rollout.tool_parsers.schema_parser import SchemaParser
from strands_rollout.tool_parsers.strict_json import JSONSource

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_FUNCTION: Final = re.compile(r"\s*<function=([^\s<>]{1,200})>")
_PARAMETER: Final = re.compile(r"\s*<parameter=([^\s<>]{1,200})>")
_END: Final = re.compile(r"\s*</function>\s*")
_INNER_TAG: Final = re.compile(r"</?(?:parameter|function)[=>]")
_END_PARAMETER: Final = "</parameter>"


class Qwen3CoderParser(SchemaParser):
    """The format's parser; see `SchemaParser`.

    Nothing is escaped in this format: a block ends at the first `</tool_call>`, a value at the first `</parameter>`,
    and a value that holds another tag of the format is a failure, since it can't be told from a forgotten close. One
    line break after a value's opening tag and one before its closing tag are the format's; all else is the value's.
    """

    tags: ClassVar[re.Pattern[str]] = re.compile(r"</?think>|</?tool_call>|<function=|</function>")
    words: ClassVar[Mapping[str, Any]] = {"True": True, "False": False, "None": None}
    untyped_is_json: ClassVar[bool] = False

    def _read_call(
        self,
        text: JSONSource,
        tag: re.Match[str],
        *,
        is_first: bool,  # noqa: ARG002 - calls may stand anywhere
    ) -> tuple[Sequence[Segment], int]:
        if tag[0] == OPEN:
            segment, end = read_block(text, tag, CLOSE, self._read_inside, self._new_id)
            return [segment], end
        if tag[0] != "<function=":
            return [ParseFailure(tag[0], f"a {tag[0]} without its opening tag before it")], tag.end()
        following = self.tags.search(text, tag.end())
        end = (
            len(text) if following is None else following.end() if following[0] == "</function>" else following.start()
        )
        return [ParseFailure(text[tag.start() : end], f"a function outside of {OPEN} ... {CLOSE}")], end

    def _read_inside(self, block: str) -> Call:
        function = _FUNCTION.match(block)
        if function is None:
            raise MalformedError(f"expected <function=TOOL> after {OPEN}; got {got(block.lstrip(), 0)}")
        name, arguments = function[1], dict[str, Any]()
        position = function.end()
        while parameter := _PARAMETER.match(block, position):
            key = parameter[1]
            end = _INNER_TAG.search(block, parameter.end())
            if end is None or end[0] != _END_PARAMETER:
                found = "the end of the block" if end is None else repr(end[0])
                raise MalformedError(f"the parameter {key!r} of {name!r} is not closed: got {found}", name)
            if key in arguments:
                raise MalformedError(f"the parameter {key!r} of {name!r} stands twice", name)
            text = block[parameter.end() : end.start()].removeprefix("\n").removesuffix("\n")
            arguments[key] = self._value(name, key, text, f"the parameter {key!r} of {name!r}")
            position = end.end()
        if not _END.fullmatch(block, position):
            expected = "expected <parameter=NAME> or </function> and nothing after it"
            raise MalformedError(f"{expected} in the call of {name!r}; got {got(block[position:].lstrip(), 0)}", name)
        return Call(name, arguments)
