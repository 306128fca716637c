# ruff: noqa: RUF001, RUF002 - the format's own characters
"""DeepSeek V3's formats: a section of calls between special tokens, in the three forms that were published.

- V3, R1 and V3-0324: `function<｜tool▁sep｜>x`, then the arguments as JSON in a fenced block.
- V3.1 and V3.2-Exp: `x<｜tool▁sep｜>{...}`.
- V3.2: an XML-like section of `｜DSML｜` tags, each parameter with its own word on whether it is a string.

All three are taken; they can't be confused. V4's tags are others (`｜DSML｜tool_calls`) and are not. Sources: the
models' chat templates (as in sgl-project/sglang, examples/chat_template/tool_chat_template_deepseekv3.jinja, and
ggml-org/llama.cpp, models/templates/deepseek-ai-DeepSeek-V3.1.jinja and DeepSeek-V3.2.jinja) and V3.2's
encoding/encoding_dsv32.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from strands_rollout.tool_parsers.base import MalformedError, Segment
from strands_rollout.tool_parsers.call_blocks import (
    Call,
    SectionTags,
    decode_arguments,
    end_of_tag,
    got,
    read_section,
    read_stray,
)
from strands_rollout.tool_parsers.strict_json import JSONSource, StrictJSONError, skip_white_space, whole_value
from strands_rollout.tool_parsers.tagged_parser import TaggedParser

_SECTION: Final = SectionTags(
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

    def _read_call(
        self,
        text: JSONSource,
        tag: re.Match[str],
        *,
        is_first: bool,  # noqa: ARG002 - calls may stand anywhere
    ) -> tuple[Sequence[Segment], int]:
        if tag[0] == _SECTION.open:
            return read_section(text, tag, _SECTION, _read_inside, self._new_id)
        if tag[0] == _DSML.open:
            return read_section(text, tag, _DSML, _read_invoke, self._new_id)
        return read_stray(text, tag, _DSML if "DSML" in tag[0] else _SECTION)


def _read_inside(text: JSONSource, start: int) -> tuple[Call, int]:
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
