"""What strands-sglang 0.4.3 publishes of its parsers (its unit tests' cases, and its parsers' code), held against ours.

Each row is one behaviour in our words: `MET` has the same outcome there, `STRICTER` another on purpose. Not taken over:
tags of one's own and reading drafts as calls (a format of one's own is a class and `register_parser`); ids that sort as
text (a rollout names calls by turn and place); a Kimi call's own id as the call's id (a model may write one id twice);
results of parsing as JSON text (`payload`), since a failure here carries what was wrong.
"""

from __future__ import annotations

from typing import Any

import pytest

from strands_rollout.tool_parsers import ParseFailure, ToolCall, for_tool_specs, get_parser

DRAFT = '<tool_call>{"name": "draft", "arguments": {}}</tool_call>'
REAL = '<tool_call>{"name": "real", "arguments": {"y": 2}}</tool_call>'
CALLED_REAL = ("real", {"y": 2})


def kimi(inside: str) -> str:
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


def kimi_call(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


# what it is about, parser, text, outcome: a name and arguments for each call, a tool's name or None for each failure
MET: list[tuple[str, str, str, list[Any]]] = [
    ("one call", "hermes", REAL, [CALLED_REAL]),
    ("calls with text between", "hermes", f"\n {REAL}\n and \n{REAL}", [CALLED_REAL, CALLED_REAL]),
    ("text only", "hermes", "Just some text.", []),
    ("nothing", "hermes", "", []),
    ("no arguments", "hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', [("f", {})]),
    (
        "nested arguments",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {\n"a": {"b": [1, 2]}, "c": [{"d": 1}]\n}}</tool_call>',
        [("f", {"a": {"b": [1, 2]}, "c": [{"d": 1}]})],
    ),
    ("broken JSON", "hermes", '<tool_call>{"name": "f", "arguments": {no json}}</tool_call>', ["f"]),
    ("broken JSON after the name", "hermes", '<tool_call>{"name": "f", broken}</tool_call>', ["f"]),
    ("broken JSON without a name", "hermes", "<tool_call>{broken}</tool_call>", [None]),
    ("no name", "hermes", '<tool_call>{"arguments": {"x": 1}}</tool_call>', [None]),
    ("an empty name", "hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', [None]),
    ("a name that is a number", "hermes", '<tool_call>{"name": 123, "arguments": {}}</tool_call>', [None]),
    ("an array", "hermes", "<tool_call>[1, 2, 3]</tool_call>", [None]),
    ("null", "hermes", "<tool_call>null</tool_call>", [None]),
    ("white space", "hermes", '<tool_call>\n  {\n "name": "f",\n "arguments": {}}\n  </tool_call>', [("f", {})]),
    ("good and bad calls", "hermes", f"{REAL}<tool_call>{{x}}</tool_call>{REAL}", [CALLED_REAL, None, CALLED_REAL]),
    (
        "a name with signs",
        "hermes",
        '<tool_call>{"name": "my-tool_v2.0", "arguments": {}}</tool_call>',
        [("my-tool_v2.0", {})],
    ),
    (
        "unicode",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "你好\N{ROCKET}"}}</tool_call>',
        [("f", {"a": "你好\N{ROCKET}"})],
    ),
    ("a draft in reasoning", "hermes", f"<think>\nMaybe {DRAFT}\nno.\n</think>\n{REAL}", [CALLED_REAL]),
    (
        "drafts in turn",
        "hermes",
        f"<think>{DRAFT}</think>{REAL}<think>{DRAFT}</think>{REAL}",
        [CALLED_REAL, CALLED_REAL],
    ),
    (
        "several parameters",
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>x</parameter>\n<parameter=b>y</parameter>\n</function>\n</tool_call>",
        [("f", {"a": "x", "b": "y"})],
    ),
    ("no parameters", "qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", [("f", {})]),
    (
        "one line",
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>x</parameter></function></tool_call>",
        [("f", {"a": "x"})],
    ),
    (
        "signs in a value",
        "qwen3_coder",
        '<tool_call><function=f><parameter=a>b & c | "d"</parameter></function></tool_call>',
        [("f", {"a": 'b & c | "d"'})],
    ),
    ("no function", "qwen3_coder", "<tool_call>\n<parameter=a>1</parameter>\n</tool_call>", [None]),
    ("a function without a name", "qwen3_coder", "<tool_call>\n<function=>\n</function>\n</tool_call>", [None]),
    (
        "a draft in reasoning",
        "qwen3_coder",
        "<think><tool_call><function=f></function></tool_call></think>\n<tool_call><function=g></function></tool_call>",
        [("g", {})],
    ),
    (
        "values as JSON",
        "glm4",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        '<arg_key>b</arg_key>\n<arg_value>{"c": [1]}</arg_value>\n</tool_call>',
        [("f", {"a": 1, "b": {"c": [1]}})],
    ),
    (
        "a string in quotes, type unknown",
        "glm4",
        '<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>"multiply"</arg_value>\n</tool_call>',
        [("f", {"a": "multiply"})],
    ),
    (
        "a string without quotes",
        "glm4",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>hello world</arg_value>\n</tool_call>",
        [("f", {"a": "hello world"})],
    ),
    ("no arguments", "glm4", "<tool_call>f\n</tool_call>", [("f", {})]),
    (
        "no line breaks",
        "glm4",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        [("f", {"a": 1})],
    ),
    (
        "white space before the name",
        "glm4",
        "<tool_call>   f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        [("f", {"a": 1})],
    ),
    ("no name", "glm4", "<tool_call>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", [None]),
    ("a call", "kimi_k2", kimi(kimi_call("functions.get-it.v2:0", '{"a": 1}')), [("get-it.v2", {"a": 1})]),
    (
        "parallel calls",
        "kimi_k2",
        kimi(kimi_call("functions.f:0", "{}") + "\n" + kimi_call("functions.g:1", "{}")),
        [("f", {}), ("g", {})],
    ),
    ("white space", "kimi_k2", kimi("\n" + kimi_call(" functions.f:0 ", "\n{} ") + "\n"), [("f", {})]),
    ("broken JSON", "kimi_k2", kimi(kimi_call("functions.f:0", "{no json}")), ["f"]),
    (
        "a draft in reasoning",
        "kimi_k2",
        "<think>" + kimi(kimi_call("functions.f:0", "{}")) + "</think>" + kimi(kimi_call("functions.g:0", "{}")),
        [("g", {})],
    ),
]

# the same, and what strands-sglang makes of it
STRICTER: list[tuple[str, str, str, list[Any]]] = [
    ("an opener in a block; there a failure named by what follows", "hermes", f"<tool_call>{REAL}", [None]),
    ("arguments are missing; there {}", "hermes", '<tool_call>{"name": "f"}</tool_call>', ["f"]),
    ("arguments are an array; there {}", "hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', ["f"]),
    ("a block that never ends; there nothing", "hermes", '<tool_call>{"name": "f", "arguments": {}}', ["f"]),
    ("reasoning that never ends; there a call", "hermes", f"<think>maybe {DRAFT}", []),
    ("other keys; there ignored", "hermes", '<tool_call>{"name": "f", "arguments": {}, "x": 1}</tool_call>', ["f"]),
    ("NaN; there a float", "hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', ["f"]),
    (
        "a key twice; there the last",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>',
        ["f"],
    ),
    (
        "a number of no known type; there a number",
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
        [("f", {"a": "1"})],
    ),
    (
        "white space of a value; there cut off",
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>\n  x \n</parameter></function></tool_call>",
        [("f", {"a": "  x "})],
    ),
    ("a block that never ends; there nothing", "qwen3_coder", "<tool_call><function=f></function>", ["f"]),
    ("text in a block; there ignored", "qwen3_coder", "<tool_call>so <function=f></function></tool_call>", [None]),
    (
        "a parameter that never ends; there left out",
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1</function></tool_call>",
        ["f"],
    ),
    (
        "a parameter twice; there the last",
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        ["f"],
    ),
    (
        "a second function; there ignored",
        "qwen3_coder",
        "<tool_call><function=f></function><function=g></function></tool_call>",
        ["f"],
    ),
    (
        "white space of a value; there cut off",
        "glm4",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>  x </arg_value>\n</tool_call>",
        [("f", {"a": "  x "})],
    ),
    (
        "white space around a key; there cut off",
        "glm4",
        "<tool_call>f\n<arg_key> a </arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        ["f"],
    ),
    (
        "a block that never ends; there nothing",
        "glm4",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>",
        ["f"],
    ),
    (
        "text between pairs; there ignored",
        "glm4",
        "<tool_call>f\n<arg_key>a</arg_key><arg_value>1</arg_value>so</tool_call>",
        ["f"],
    ),
    ("a key without a value; there left out", "glm4", "<tool_call>f\n<arg_key>a</arg_key></tool_call>", ["f"]),
    ("words as a name; there a name", "glm4", "<tool_call>call the tool</tool_call>", [None]),
    ("an id without functions.; there a name", "kimi_k2", kimi(kimi_call("f:0", "{}")), ["f"]),
    ("an id without a number; there a name", "kimi_k2", kimi(kimi_call("functions.f", "{}")), ["f"]),
    ("arguments are an array; there {}", "kimi_k2", kimi(kimi_call("functions.f:0", "[1]")), ["f"]),
    (
        "a section that never ends; there nothing",
        "kimi_k2",
        kimi(kimi_call("functions.f:0", "{}")).removesuffix("<|tool_calls_section_end|>"),
        ["f"],
    ),
    ("a call outside of a section; there nothing", "kimi_k2", kimi_call("functions.f:0", "{}"), [None]),
    ("an empty section; there nothing", "kimi_k2", kimi(""), [None]),
    ("text in a section; there ignored", "kimi_k2", kimi("so " + kimi_call("functions.f:0", "{}")), [None, ("f", {})]),
]


def outcome(parser: str, text: str) -> list[Any]:
    return [
        part.name if isinstance(part, ParseFailure) else (part.name, part.arguments)
        for part in get_parser(parser).parse(text)
        if isinstance(part, ToolCall | ParseFailure)
    ]


@pytest.mark.parametrize(("what", "parser", "text", "expected"), MET, ids=lambda value: str(value)[:40])
def test_what_strands_sglang_reads_is_read_alike(what: str, parser: str, text: str, expected: list[Any]) -> None:
    assert outcome(parser, text) == expected


@pytest.mark.parametrize(("what", "parser", "text", "expected"), STRICTER, ids=lambda value: str(value)[:40])
def test_what_strands_sglang_repairs_or_passes_over_is_told(
    what: str, parser: str, text: str, expected: list[Any]
) -> None:
    assert outcome(parser, text) == expected


def test_values_as_python_writes_them_are_read_where_the_format_has_such() -> None:
    values = {"a": ["x", True, None], "b": {"c": 1.5}, "d": False, "e": "['as', 'text']"}
    schemas = {"f": {"properties": {key: {"type": kind} for key, kind in zip("abde", KINDS, strict=True)}}}
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=f>\n{pairs}</function>\n</tool_call>"
    [call] = for_tool_specs(get_parser("qwen3_coder"), specs_of(schemas)).parse(text)
    assert isinstance(call, ToolCall)
    assert call.arguments == values


KINDS = ("array", "object", "boolean", "string")


def specs_of(schemas: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": name, "inputSchema": {"json": schema}} for name, schema in schemas.items()]


def test_a_multiline_value_keeps_its_lines() -> None:
    code = 'def hello():\n    print("Hello")\n\nhello()'
    text = f"<tool_call>\n<function=write>\n<parameter=code>\n{code}\n</parameter>\n</function>\n</tool_call>"
    assert outcome("qwen3_coder", text) == [("write", {"code": code})]
    text = f"<tool_call>write\n<arg_key>code</arg_key>\n<arg_value>{code}</arg_value>\n</tool_call>"
    assert outcome("glm4", text) == [("write", {"code": code})]
