"""The Hermes parser: tags inside strings, and broken calls beside valid ones; `get_parser` and `register_parser`."""

import itertools
from typing import Any

import pytest

from strands_rollout.errors import ConfigError
from strands_rollout.tool_parsers import ParseFailure, Text, ToolCall, get_parser, parser_names, register_parser
from strands_rollout.tool_parsers.json_object import HermesParser

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def parser() -> HermesParser:
    numbers = itertools.count()
    return HermesParser(lambda: f"c{next(numbers)}")


def calls(text: str) -> list[Any]:
    return parser().parse(text)


@pytest.mark.parametrize("tag", ["</tool_call>", "<think>", "<|im_end|>"])
def test_hermes_tag_inside_json_string_is_content(tag: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"{tag}": "print(\\"{tag}\\")"}}}}</tool_call> after'
    assert parser().segments(text) == [ToolCall("c0", "f", {tag: f'print("{tag}")'}), Text(" after")]


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>{"name": "f", "arguments": {"a": "oops}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}} junk</tool_call>',
        "<tool_call><tool_call>{}</tool_call>",
    ],
    ids=["a string that never ends", "text after a string with a close", "a second opener"],
)
def test_hermes_broken_block_does_not_hide_next_call(broken: str) -> None:
    failure, call = calls(broken + CALL)
    assert isinstance(failure, ParseFailure)
    assert (failure.raw, call) == (broken, ToolCall("c0", "f", {"a": 1}))


def test_get_parser_suggests_name_and_finds_registered() -> None:
    with pytest.raises(ConfigError, match="unknown tool parser 'hermis'; did you mean 'hermes'"):
        get_parser("hermis")
    for name in ("hermes", "auto", ""):
        with pytest.raises(
            ConfigError, match=f"can't register a tool parser named '{name}': the name is empty, reserved or taken"
        ):
            register_parser(name, lambda new_id: HermesParser(new_id))
    register_parser("hermes", HermesParser)
    assert "hermes" in parser_names()
