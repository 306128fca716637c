"""The Hermes parser: what is a call, what is a failure and why, and what is reasoning."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from strands_rollout.errors import ConfigError
from strands_rollout.tool_parsers import (
    ParseFailure,
    Reasoning,
    Text,
    ToolCall,
    get_parser,
    parser_names,
    register_parser,
)
from strands_rollout.tool_parsers.json_object import HermesParser

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def parser() -> HermesParser:
    numbers = itertools.count()
    return HermesParser(lambda: f"c{next(numbers)}")


def calls(text: str, *, in_reasoning: bool = False) -> list[Any]:
    return parser().parse(text, in_reasoning)


def only_failure(text: str) -> ParseFailure:
    (found,) = calls(text)
    assert isinstance(found, ParseFailure), found
    return found


def test_calls_and_failures_come_in_the_order_of_the_text_with_ids_from_the_source() -> None:
    bad = '<tool_call>{"name": "g"}</tool_call>'
    first, failure, second = calls(f"Now {CALL} then {bad} and {CALL}")
    assert first == ToolCall("c0", "f", {"a": 1})
    assert second == ToolCall("c1", "f", {"a": 1})
    assert (failure.raw, failure.name) == (bad, "g")


def test_ids_are_random_unless_a_source_is_given() -> None:
    (one,), (other,) = get_parser("hermes").parse(CALL), get_parser("hermes").parse(CALL)
    assert isinstance(one, ToolCall)
    assert isinstance(other, ToolCall)
    assert one.id.startswith("call_")
    assert one.id != other.id
    (counted,) = get_parser("hermes", new_id=lambda: "x").parse(CALL)
    assert counted == ToolCall("x", "f", {"a": 1})


@pytest.mark.parametrize(
    "block",
    [
        '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>',
        '<tool_call>\r\n\t {"arguments" : { "a" : 1 } , "name" : "f" } \n</tool_call>',
    ],
)
def test_white_space_and_the_order_of_keys_are_free(block: str) -> None:
    assert calls(block) == [ToolCall("c0", "f", {"a": 1})]


@pytest.mark.parametrize("tag", ["</tool_call>", "<tool_call>", "</think>", "<think>", "<|im_end|>"])
def test_a_tag_inside_a_json_string_is_content(tag: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"{tag}": "print(\\"{tag}\\")"}}}}</tool_call> after'
    assert parser().segments(text) == [ToolCall("c0", "f", {tag: f'print("{tag}")'}), Text(" after")]


@pytest.mark.parametrize(
    ("block", "reason", "name"),
    [
        ("<tool_call></tool_call>", "begins with '{', at offset 0; got '</tool_call>'", None),
        ("<tool_call>\n[1]</tool_call>", "expected a JSON object, which begins with '{', at offset 1; got '[1]", None),
        ("<tool_call>f(a=1)</tool_call>", "expected a JSON object", None),
        ('<tool_call>{"name": "f", "arguments": {bad}}</tool_call>', "not valid JSON at offset 28: ", "f"),
        ("<tool_call>{'name': 'f'}</tool_call>", "not valid JSON at offset 1: ", None),
        ('<tool_call>{"name": "f", "arguments": {},}</tool_call>', "not valid JSON at offset", "f"),
        ('<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', "Invalid control character", "f"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON", "f"),
        ('<tool_call>{"name": "f", "arguments": {"a": -Infinity}}</tool_call>', "-Infinity is not JSON", "f"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "1e999 is too large for a float", "f"),
        (
            '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
            "a number can't be read: Exceeds the limit (4300 digits)",
            "f",
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>',
            "the key 'a' stands twice in one object",
            "f",
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
            "a string has half of a surrogate pair",
            "f",
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 99 + "]" * 99 + "}}</tool_call>",
            "nested deeper than the 100 levels that are allowed",
            "f",
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 50_000 + "]" * 50_000 + "}}</tool_call>",
            "nested deeper than the 100 levels that are allowed",
            "f",
        ),
        ('<tool_call>{"arguments": {}}</tool_call>', "the name is missing; expected {", None),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', "the name is an empty string, not", None),
        ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', "the name is a number, not a string", None),
        ('<tool_call>{"name": null, "arguments": {}}</tool_call>', "the name is null, not a string", None),
        ('<tool_call>{"name": "f"}</tool_call>', "the arguments are missing; expected {", "f"),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "the arguments are a string, not an object", "f"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "the arguments are an array, not an object", "f"),
        ('<tool_call>{"name": "f", "arguments": true}</tool_call>', "the arguments are true, not an object", "f"),
        (
            '<tool_call>{"name": "f", "arguments": {}, "id": 1, "x": 2}</tool_call>',
            "there are other keys than name and arguments: 'id', 'x'",
            "f",
        ),
        ("<tool_call>{}</tool_call>", "the name is missing; the arguments are missing; expected {", None),
        (
            '<tool_call>{"name": "f", "arguments": {}} done</tool_call>',
            "expected </tool_call> after the JSON object, at offset 31; got 'done</tool_call>'",
            "f",
        ),
        (
            '<tool_call>{"name": "f", "arguments": {}}{"name": "g", "arguments": {}}</tool_call>',
            'expected </tool_call> after the JSON object, at offset 30; got \'{"name"',
            "f",
        ),
        ('<tool_call>{"name": "f", "arguments": {}}', "unterminated: there is no </tool_call> after it", "f"),
        ('<tool_call>{"name": "f", "arguments": {"a": "x', "unterminated: there is no </tool_call> after it", "f"),
        ("<tool_call>", "got the end of the text; unterminated", None),
        ("</tool_call>", "a </tool_call> without its <tool_call> before it", None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_no_call_is_a_failure_that_says_why(block: str, reason: str, name: str | None) -> None:
    failure = only_failure(block)
    assert reason in failure.reason
    assert (failure.raw, failure.name) == (block, name)


def test_a_broken_block_ends_at_its_close_and_the_next_call_counts() -> None:
    broken = '<tool_call>{"name": "f", "arguments": {"a": "oops}}</tool_call>'
    failure, call = calls(broken + CALL)
    assert failure.raw == broken
    assert call == ToolCall("c0", "f", {"a": 1})


def test_text_after_an_object_whose_string_holds_a_close_ends_at_the_close_after_it() -> None:
    block = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}} junk</tool_call>'
    failure, call = calls(block + CALL)
    assert failure.raw == block
    assert call.name == "f"


def test_a_second_opener_before_the_close_belongs_to_the_first_block() -> None:
    text = f"<tool_call>{CALL}"
    assert only_failure(text).raw == text


def test_nesting_is_allowed_up_to_a_hundred_levels() -> None:
    nested = "[" * 98 + "]" * 98
    (call,) = calls(f'<tool_call>{{"name": "f", "arguments": {{"a": {nested}}}}}</tool_call>')
    assert isinstance(call, ToolCall)


def test_a_pair_of_surrogate_escapes_is_a_character() -> None:
    (call,) = calls('<tool_call>{"name": "f", "arguments": {"a": "\\ud83d\\ude00"}}</tool_call>')
    assert call.arguments == {"a": "\N{GRINNING FACE}"}


def test_reasoning_that_never_closes_swallows_the_rest() -> None:
    assert parser().segments(f"Hm. <think>maybe {CALL}") == [Text("Hm. "), Reasoning(f"maybe {CALL}")]


def test_a_stray_close_makes_everything_before_it_reasoning() -> None:
    text = f"maybe {CALL} or <tool_call>broken</tool_call></think>\n{CALL}"
    reasoning, call = parser().segments(text)
    assert reasoning == Reasoning(text.split("</think>")[0])
    assert isinstance(call, ToolCall)


def test_reasoning_may_open_again_between_calls() -> None:
    kinds = [type(part) for part in parser().segments(f"<think>a</think>{CALL}<think>b {CALL}</think>{CALL}end")]
    assert kinds == [Reasoning, ToolCall, Reasoning, ToolCall, Text]


def test_parts_of_white_space_only_are_left_out() -> None:
    assert parser().segments(f"<think>\n\n</think>\n\n{CALL}\n{CALL}\n") == [
        ToolCall("c0", "f", {"a": 1}),
        ToolCall("c1", "f", {"a": 1}),
    ]
    assert parser().segments("") == []


def test_an_unknown_parser_names_the_nearest_and_a_registered_one_is_found() -> None:
    with pytest.raises(ConfigError, match="unknown tool parser 'hermis'; did you mean 'hermes'"):
        get_parser("hermis")
    with pytest.raises(ConfigError, match="'hermes' can't be registered: the name is empty or taken"):
        register_parser("hermes", lambda new_id: HermesParser(new_id))
    register_parser("hermes", HermesParser)
    assert "hermes" in parser_names()


def test_a_new_format_is_one_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strands_rollout.tool_parsers._factories", {})
    register_parser("mine", HermesParser)
    assert isinstance(get_parser("mine"), HermesParser)
