"""GLM-4.5's, 4.6's and 4.7's format: `<tool_call>x<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`.

Values are bare text: a string is the text, all else is JSON. Which of them it is, the tool's schema says; where it says
nothing, a value is JSON if it can be read so, as the template writes it. Sources: the models' chat templates (as in
ggml-org/llama.cpp, models/templates/GLM-4.6.jinja), and how SGLang and vLLM read them (sgl-project/sglang,
function_call/glm4_moe_detector.py, glm47_moe_detector.py). Stricter than these: what does not fit its type is a
failure, and no value is unescaped, unquoted or evaluated as Python.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from strands_rollout.tool_parsers.base import MalformedError, ParseFailure, Segment
from strands_rollout.tool_parsers.call_blocks import Call, got, read_block
from strands_rollout.tool_parsers.schema_parser import SchemaParser
from strands_rollout.tool_parsers.strict_json import JSONSource

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_NAME: Final = re.compile(r"\s*([^\s<>{}\[\]\"'=]{1,200})\s*(?=<arg_key>|\Z)")
_KEY: Final = re.compile(r"<arg_key>([^\s<>](?:[^<>]{0,198}[^\s<>])?)</arg_key>\s*<arg_value>")
_INNER_TAG: Final = re.compile(r"</?arg_(?:key|value)>")
_END_VALUE: Final = "</arg_value>"
_SPACE: Final = re.compile(r"\s*")


class GLM4Parser(SchemaParser):
    """The format's parser; see `SchemaParser`.

    Nothing is escaped in this format: a block ends at the first `</tool_call>`, a value at the first `</arg_value>`,
    and a value that holds another tag of the format is a failure. White space between tags is free; in a value it is
    the value's.
    """

    tags: ClassVar[re.Pattern[str]] = re.compile(r"</?think>|</?tool_call>|</?arg_(?:key|value)>")
    untyped_is_json: ClassVar[bool] = True

    def _read_call(
        self,
        text: JSONSource,
        tag: re.Match[str],
        *,
        is_first: bool,  # noqa: ARG002 - calls may stand anywhere
    ) -> tuple[Sequence[Segment], int]:
        if tag[0] != OPEN:
            return [ParseFailure(tag[0], f"a {tag[0]} outside of {OPEN} ... {CLOSE}")], tag.end()
        segment, end = read_block(text, tag, CLOSE, self._read_inside, self._new_id)
        return [segment], end

    def _read_inside(self, block: str) -> Call:
        head = _NAME.match(block)
        if head is None:
            raise MalformedError(f"expected the tool's name after {OPEN}, then <arg_key>; got {got(block.lstrip(), 0)}")
        name, arguments = head[1], dict[str, Any]()
        position = head.end()
        while pair := _KEY.match(block, position):
            key = pair[1]
            end = _INNER_TAG.search(block, pair.end())
            if end is None or end[0] != _END_VALUE:
                found = "the end of the block" if end is None else repr(end[0])
                raise MalformedError(f"the value of {key!r} for {name!r} is not closed: got {found}", name)
            if key in arguments:
                raise MalformedError(f"the key {key!r} for {name!r} stands twice", name)
            text = block[pair.end() : end.start()]
            arguments[key] = self._value(name, key, text, f"the value of {key!r} for {name!r}")
            space = _SPACE.match(block, end.end())
            position = space.end() if space else end.end()
        if position < len(block):
            expected = "expected <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>, no white space around the key"
            raise MalformedError(f"{expected}, in the call of {name!r}; got {got(block, position)}", name)
        return Call(name, arguments)
