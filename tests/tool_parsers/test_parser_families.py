# ruff: noqa: RUF001 - DeepSeek's own characters
"""One table of cases for every family's parser: calls, reasoning, text around them, and each kind of malformed call."""

from __future__ import annotations

from typing import Any

import pytest
from parser_families import FAMILIES, Call, Family, family

from strands_rollout.tool_parsers import ParseFailure, Reasoning, Text, ToolCall, get_parser, parser_names

SEARCH: Call = ("search", {"query": "Zürich", "limit": 5})
NESTED: Call = ("store.put-v2", {"item": {"a": [1, {"b": None}], "c": {"d": [True, False, []]}}, "tags": [["x"], []]})
UNICODE: Call = ("say", {"text": "Grüße 你好 \N{ROCKET} \u202e\u00a0 \\n \"quoted\" 'so' & <b>", "n": -1.5e-3})
LINES: Call = ("write", {"path": "/tmp/a.py", "content": '\ndef f():\n    return "x"\n\n'})
NO_ARGUMENTS: Call = ("now", {})
EACH = pytest.mark.parametrize("known", FAMILIES, ids=str)


def calls_of(*calls: Call) -> list[ToolCall]:
    return [ToolCall(f"c{index}", name, arguments) for index, (name, arguments) in enumerate(calls)]


def test_the_table_has_every_parser_of_the_package() -> None:
    assert {known.parser for known in FAMILIES} == set(parser_names())


@EACH
@pytest.mark.parametrize("call", [SEARCH, NESTED, UNICODE, LINES, NO_ARGUMENTS], ids=lambda call: call[0])
def test_a_call_is_read_as_it_was_written(known: Family, call: Call) -> None:
    assert known.make([call]).segments(known.turn(calls=[call])) == calls_of(call)


@EACH
def test_parallel_calls_come_in_their_order_with_ids_of_their_own(known: Family) -> None:
    calls = [SEARCH, NO_ARGUMENTS, NESTED]
    assert known.make(calls).parse(known.turn(calls=calls)) == calls_of(*calls)


@EACH
def test_reasoning_and_text_stand_before_the_calls(known: Family) -> None:
    if known.mixes:
        turn = known.turn(reasoning="why", text="I will look.", calls=[SEARCH])
        expected: list[Any] = [Reasoning("why"), Text("I will look."), *calls_of(SEARCH)]
    else:
        turn, expected = known.turn(reasoning="why", calls=[SEARCH]), [Reasoning("why"), *calls_of(SEARCH)]
    assert known.make([SEARCH]).segments(turn) == expected


@EACH
def test_a_turn_without_calls_is_text(known: Family) -> None:
    assert known.make().segments("") == []
    assert known.make().segments("Zürich is {lovely} [1], 3 < 4.") == [Text("Zürich is {lovely} [1], 3 < 4.")]
    assert known.make().segments(known.turn(reasoning="why", text="So.")) == [Reasoning("why"), Text("So.")]


@EACH
def test_calls_inside_reasoning_are_drafts(known: Family) -> None:
    draft = known.calls([NO_ARGUMENTS])
    assert known.make([SEARCH]).parse(known.turn(reasoning=f"maybe {draft} no", calls=[SEARCH])) == calls_of(SEARCH)


@EACH
def test_calls_inside_reasoning_that_never_closes_are_drafts(known: Family) -> None:
    turn = known.reasoning[0] + "maybe " + known.calls([SEARCH])
    assert known.make([SEARCH]).parse(turn) == []
    assert [type(part) for part in known.make([SEARCH]).segments(turn)] == [Reasoning]


@EACH
def test_reasoning_that_the_prompt_opened_ends_where_it_is_closed(known: Family) -> None:
    draft = known.calls([NO_ARGUMENTS])
    turn = known.turn(reasoning=f"maybe {draft}", calls=[SEARCH], in_reasoning=True)
    assert known.make([SEARCH]).segments(turn, in_reasoning=True) == [Reasoning(f"maybe {draft}"), *calls_of(SEARCH)]
    assert known.make([SEARCH]).segments(f"maybe {draft}", in_reasoning=True) == [Reasoning(f"maybe {draft}")]
    assert known.make([SEARCH]).segments(draft, in_reasoning=True) == [Reasoning(draft)]


@EACH
def test_a_call_that_is_cut_anywhere_is_no_call(known: Family) -> None:
    turn = known.turn(calls=[SEARCH])
    for length in range(len(turn)):
        assert not any(isinstance(part, ToolCall) for part in known.make([SEARCH]).parse(turn[:length])), turn[:length]


@EACH
def test_a_broken_call_does_not_hide_the_good_one_beside_it(known: Family) -> None:
    """Where the format tells where a call ends; a JSON array and Llama's list of objects are broken as a whole."""
    turn = known.turn(calls=[NO_ARGUMENTS, SEARCH]).replace("{}", "{oops}", 1).replace("now", "now<", 1)
    parts = known.make([SEARCH]).parse(turn)
    assert isinstance(parts[0], ParseFailure)
    whole = known.id in ("mistral-array", "mistral-nemo", "llama3_json", "llama3_json-tag")
    assert [part.name for part in parts if isinstance(part, ToolCall)] == ([] if whole else ["search"])


HERMES_LIKE = "expected a JSON object"
MALFORMED: list[tuple[str, str, str, str | None]] = [
    # family, text, part of the reason, the tool that was meant
    ("qwen3_coder", "<tool_call></tool_call>", "expected <function=TOOL> after <tool_call>; got the end", None),
    ("qwen3_coder", "<tool_call>\n<function=>\n</function>\n</tool_call>", "expected <function=TOOL>", None),
    ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "expected <function=TOOL>", None),
    ("qwen3_coder", "<tool_call><function=f></tool_call>", "expected <parameter=NAME> or </function>", "f"),
    ("qwen3_coder", "<tool_call><function=f>x</function></tool_call>", "expected <parameter=NAME> or </function>", "f"),
    ("qwen3_coder", "<tool_call><function=f></function>x</tool_call>", "and nothing after it", "f"),
    ("qwen3_coder", "<tool_call><function=f></function><function=g></function></tool_call>", "nothing after it", "f"),
    ("qwen3_coder", "<tool_call><function=f><parameter=>1</parameter></function></tool_call>", "<parameter=NAME>", "f"),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</function></tool_call>", "'a' of 'f' is not closed", "f"),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1<parameter=b>2</parameter></function></tool_call>",
        "'a' of 'f' is not closed: got '<parameter='",
        "f",
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        "the parameter 'a' of 'f' stands twice",
        "f",
    ),
    ("qwen3_coder", "<tool_call><function=f></function>", "unterminated: there is no </tool_call>", "f"),
    ("qwen3_coder", "</tool_call>", "without its opening tag before it", None),
    ("qwen3_coder", "<function=f></function>", "a function outside of <tool_call> ... </tool_call>", None),
    ("glm4", "<tool_call></tool_call>", "expected the tool's name after <tool_call>", None),
    ("glm4", "<tool_call><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "expected the tool's name", None),
    ("glm4", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "expected the tool's name", None),
    ("glm4", "<tool_call>f g</tool_call>", "expected the tool's name", None),
    ("glm4", "<tool_call>f<arg_key>a</arg_key></tool_call>", "expected <arg_key>KEY</arg_key><arg_value>", "f"),
    ("glm4", "<tool_call>f<arg_key> a </arg_key><arg_value>1</arg_value></tool_call>", "no white space", "f"),
    ("glm4", "<tool_call>f<arg_key></arg_key><arg_value>1</arg_value></tool_call>", "expected <arg_key>KEY", "f"),
    ("glm4", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>", "the value of 'a' for 'f' is not closed", "f"),
    (
        "glm4",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
        "the value of 'a' for 'f' is not closed: got '<arg_key>'",
        "f",
    ),
    (
        "glm4",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value></tool_call>",
        "the key 'a' for 'f' stands twice",
        "f",
    ),
    (
        "glm4",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>x</tool_call>",
        "in the call of 'f'; got 'x'",
        "f",
    ),
    ("glm4", "<tool_call>f", "unterminated: there is no </tool_call>", "f"),
    ("glm4", "</tool_call>", "outside of <tool_call>", None),
    ("glm4", "</arg_value>", "outside of <tool_call>", None),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>", "no call between the tags", None),
    ("kimi_k2", "<|tool_calls_section_begin|>", "unterminated: there is no <|tool_calls_section_end|>", None),
    ("kimi_k2", "<|tool_calls_section_end|>", "stands outside of <|tool_calls_section_begin|>", None),
    (
        "kimi_k2",
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_call_begin|> stands outside of <|tool_calls_section_begin|>",
        None,
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "unterminated: there is no <|tool_calls_section_end|>",
        "f",
    ),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", "no call between the tags", None),
    ("deepseek_v3", "<｜tool▁calls▁end｜>", "stands outside of <｜tool▁calls▁begin｜>", None),
    ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "stands outside of", None),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "unterminated",
        "f",
    ),
    ("deepseek_v3-2", "<｜DSML｜function_calls>\n</｜DSML｜function_calls>", "no call between the tags", None),
    (
        "deepseek_v3-2",
        '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>',
        "stands outside of <｜DSML｜function_calls>",
        None,
    ),
    ("llama3_json", '{"name": "f"}', "the parameters are missing", "f"),
    ("llama3_json", '{"name": "f", "arguments": "{}"}', "the arguments are a string, not an object", "f"),
    ("llama3_json", '{"name": "f", "parameters": {}, "arguments": {}}', "other keys than name and parameters", "f"),
    ("llama3_json", '{"name": "f", "parameters": "{}"}', "the parameters are a string, not an object", "f"),
    ("llama3_json", '{"parameters": {}}', "the name is missing", None),
    ("llama3_json", '{"name": 7, "parameters": {}}', "the name is a number", None),
    (
        "llama3_json",
        '{"type": "tool", "name": "f", "parameters": {}}',
        "the type is 'tool'; expected \"function\"",
        "f",
    ),
    ("llama3_json", '{"type": 1, "name": "f", "parameters": {}}', "the type is a number, not a string", "f"),
    (
        "llama3_json",
        '{"name": "f", "parameters": {}, "x": 1}',
        "there are other keys than name and parameters: 'x'",
        "f",
    ),
    ("llama3_json", '{"name": "f", "parameters": {bad}}', "not valid JSON", "f"),
    ("llama3_json", '{"name": "f", "parameters": {}} Done.', "expected the end of the answer, or ; and", "f"),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}} Done.', "expected the end of the answer", "f"),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")', HERMES_LIKE, None),
    ("llama3_json", "<|python_tag|>", HERMES_LIKE, None),
    ("mistral-array", "[TOOL_CALLS]", "expected a JSON array of calls, or <tool>[ARGS]{...}", None),
    ("mistral-array", "[TOOL_CALLS] []", HERMES_LIKE, None),
    ("mistral-array", "[TOOL_CALLS] [1]", HERMES_LIKE, None),
    ("mistral-array", '[TOOL_CALLS] {"name": "f", "arguments": {}}', "expected a JSON array of calls", None),
    ("mistral-array", '[TOOL_CALLS] [{"name": "f", "arguments": {}}', "expected , and another call, or ]", "f"),
    ("mistral-array", '[TOOL_CALLS] [{"name": "f", "arguments": {bad}}]', "not valid JSON", "f"),
    ("mistral-array", '[TOOL_CALLS] [{"name": "f"}]', "the arguments are missing", "f"),
    (
        "mistral-array",
        '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": 3}]',
        "the id is a number, not a string",
        "f",
    ),
    ("mistral-array", '[TOOL_CALLS] [{"name": "f", "arguments": {}} {}]', "expected , and another call", "f"),
    ("mistral-named", "[TOOL_CALLS]f", "expected a JSON array of calls, or <tool>[ARGS]{...}", "f"),
    ("mistral-named", "[TOOL_CALLS]f[ARGS]", HERMES_LIKE, "f"),
    ("mistral-named", '[TOOL_CALLS]f{"a": 1}', "expected a JSON array of calls, or <tool>[ARGS]{...}", "f"),
    ("mistral-named", "[TOOL_CALLS]f[CALL_ID]short[ARGS]{}", "expected a JSON array of calls, or <tool>[ARGS]", "f"),
    ("mistral-named", "[ARGS]", "a [ARGS] without [TOOL_CALLS] before it", None),
]


def _section(inside: str) -> str:
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


def _deepseek(inside: str) -> str:
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def _dsml(inside: str) -> str:
    return f"<｜DSML｜function_calls>{inside}</｜DSML｜function_calls>"


KIMI_CALL = "<|tool_call_begin|>{}<|tool_call_end|>".format
V3_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>".format
ARGUMENTS = "<|tool_call_argument_begin|>"
SEPARATOR = "<｜tool▁sep｜>"
WRAPPED: list[tuple[str, str, str, str, str | None]] = [
    # family, what is malformed in a section, the section, part of the reason, the tool that was meant
    ("kimi_k2", *(2 * [KIMI_CALL(f"f:0{ARGUMENTS}{{}}")]), "expected functions.<tool>:<index>", "f"),
    ("kimi_k2", *(2 * [KIMI_CALL(f"functions.f{ARGUMENTS}{{}}")]), "expected functions.<tool>:<index>", "f"),
    ("kimi_k2", *(2 * [KIMI_CALL(f"functions.:0{ARGUMENTS}{{}}")]), "expected functions.<tool>:<index>", "functions."),
    ("kimi_k2", *(2 * [KIMI_CALL("functions.f:0{}")]), "expected functions.<tool>:<index>", "f"),
    ("kimi_k2", *(2 * [KIMI_CALL(f"functions.f:0{ARGUMENTS}[]")]), HERMES_LIKE, "f"),
    ("kimi_k2", *(2 * [KIMI_CALL(f"functions.f:0{ARGUMENTS}")]), HERMES_LIKE, "f"),
    ("kimi_k2", *(2 * [KIMI_CALL(f'functions.f:0{ARGUMENTS}{{"a": NaN}}')]), "NaN is not JSON", "f"),
    ("kimi_k2", *(2 * [KIMI_CALL(f"functions.f:0{ARGUMENTS}{{}} x")]), "expected <|tool_call_end|> after", "f"),
    ("kimi_k2", "x ", "x ", "expected <|tool_call_begin|> or <|tool_calls_section_end|>; got 'x ", None),
    ("deepseek_v3", *(2 * [V3_CALL("f{}")]), "expected <tool><｜tool▁sep｜>{...}", None),
    ("deepseek_v3", *(2 * [V3_CALL(f"{SEPARATOR}f\n```json\n{{}}\n```")]), "expected <tool><｜tool▁sep｜>", None),
    ("deepseek_v3", *(2 * [V3_CALL(f"code{SEPARATOR}f\n```json\n{{}}\n```")]), HERMES_LIKE, "code"),
    (
        "deepseek_v3",
        *(2 * [V3_CALL(f"function{SEPARATOR}f\n```json\n{{}}\n")]),
        "expected ``` after the arguments",
        "f",
    ),
    ("deepseek_v3", *(2 * [V3_CALL(f"function{SEPARATOR}f\n```json\n{{bad}}\n```")]), "not valid JSON", "f"),
    ("deepseek_v3", *(2 * [V3_CALL(f"function{SEPARATOR}f\n{{}}")]), HERMES_LIKE, "function"),
    ("deepseek_v3-1", *(2 * [V3_CALL(f"f{SEPARATOR}[1]")]), HERMES_LIKE, "f"),
    ("deepseek_v3-1", *(2 * [V3_CALL(f"f{SEPARATOR}{{}} x")]), "expected <｜tool▁call▁end｜> after the arguments", "f"),
]
DSML = "<｜DSML｜invoke{}</｜DSML｜invoke>".format
PARAMETER = '<｜DSML｜parameter name="a" string="{}">{}</｜DSML｜parameter>'.format
DSML_CASES: list[tuple[str, str, str | None]] = [
    (">", 'expected <｜DSML｜invoke name="<tool>">', None),
    (' name="">', 'expected <｜DSML｜invoke name="<tool>">', None),
    (' name="f">{"a": 1}', "expected <｜DSML｜parameter", "f"),
    (' name="f">' + PARAMETER("yes", "1"), "expected <｜DSML｜parameter", "f"),
    (' name="f">' + PARAMETER("false", "one"), 'which says string="false": not valid JSON', "f"),
    (' name="f">' + 2 * PARAMETER("true", "1"), "the parameter 'a' of 'f' stands twice", "f"),
    (' name="f"><｜DSML｜parameter name="a" string="true">1', "is not closed by </｜DSML｜parameter>", "f"),
]
ANY_CALL = '{"a": 1}'
GPT_OSS_CASES: list[tuple[str, str, str | None]] = [
    ("<|channel|>commentary to=functions.f<|message|>{bad}", "not valid JSON", "f"),
    ("<|channel|>commentary to=functions.f<|message|>[1]", HERMES_LIKE, "f"),
    ("<|channel|>commentary to=functions.f<|message|>", HERMES_LIKE, "f"),
    ("<|channel|>commentary to=functions.f<|message|>{} x", "expected <|call|> after the arguments of 'f'", "f"),
    ("<|channel|>commentary to=functions.f<|message|>{}<|end|>", "expected <|call|> after the arguments of 'f'", "f"),
    ("<|channel|>analysis to=functions.f<|message|>{}", "a call on the channel 'analysis'; expected commentary", "f"),
    ("<|channel|>final to=functions.f<|message|>{}", "a call on the channel 'final'; expected commentary", "f"),
    ("<|channel|>analysis to=browser.open<|message|>{}", "got a message to 'browser.open'", "browser.open"),
    ("<|channel|>analysis to=python code<|message|>1+1", "got a message to 'python'", "python"),
    ("<|channel|>commentary to=functions.<|message|>{}", "got a message to 'functions.'", None),
    ("<|channel|>commentary to=functions.f{}", "expected <|channel|>commentary to=functions.<tool>", "f{}"),
    (" to=functions.f<|channel|>commentary to=functions.g<|message|>{}", "expected <|channel|>commentary", "f"),
    ("Hi<|channel|>commentary to=functions.f<|message|>{}<|call|>", "a message begins with <|start|>assistant", "f"),
]


def only_failure(known: Family, text: str) -> ParseFailure:
    (found,) = known.make().parse(text)
    assert isinstance(found, ParseFailure), found
    return found


@pytest.mark.parametrize(("known", "text", "reason", "name"), MALFORMED, ids=lambda value: str(value)[:50])
def test_what_is_no_call_is_a_failure_that_says_why(known: str, text: str, reason: str, name: str | None) -> None:
    failure = only_failure(family(known), text)
    assert reason in failure.reason
    assert (failure.raw, failure.name) == (text, name)


@pytest.mark.parametrize(("known", "inside", "raw", "reason", "name"), WRAPPED, ids=lambda value: str(value)[:50])
def test_a_malformed_call_of_a_section_is_a_failure(
    known: str, inside: str, raw: str, reason: str, name: str | None
) -> None:
    good = family(known).calls([SEARCH])
    text = (_section if known == "kimi_k2" else _deepseek)(inside)
    failure = only_failure(family(known), text)
    assert reason in failure.reason
    assert (failure.raw, failure.name) == (raw, name)
    parts = family(known).make().parse(text + good)
    assert [type(part) for part in parts] == [ParseFailure, ToolCall]


@pytest.mark.parametrize(("inside", "reason", "name"), DSML_CASES)
def test_a_malformed_invoke_is_a_failure(inside: str, reason: str, name: str | None) -> None:
    failure = only_failure(family("deepseek_v3-2"), _dsml(DSML(inside)))
    assert reason in failure.reason
    assert (failure.raw, failure.name) == (DSML(inside), name)


@pytest.mark.parametrize(("text", "reason", "name"), GPT_OSS_CASES)
def test_a_malformed_harmony_message_is_a_failure(text: str, reason: str, name: str | None) -> None:
    failure = only_failure(family("gpt_oss"), text)
    assert reason in failure.reason
    assert failure.name == name
    assert failure.raw in text


def test_an_element_of_a_mistral_array_fails_alone_and_an_id_is_allowed() -> None:
    text = '[TOOL_CALLS] [{"name": "f"}, {"name": "g", "arguments": {}, "id": "Ab3456789"}] and so on'
    failure, call, rest = family("mistral-array").make().segments(text)
    assert isinstance(failure, ParseFailure)
    assert failure.raw == '[TOOL_CALLS] [{"name": "f"}'
    assert (call, rest) == (ToolCall("c0", "g", {}), Text(" and so on"))


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "function", "name": "f", "parameters": {"n": "10"}}',
        '{"name": "f", "arguments": {"n": "10"}}',
        '<|python_tag|>{"arguments": {"n": "10"}, "name": "f"}',
    ],
)
def test_a_llama_call_may_say_that_it_is_a_function_and_call_its_parameters_arguments(text: str) -> None:
    assert family("llama3_json").make().segments(text) == [ToolCall("c0", "f", {"n": "10"})]


@pytest.mark.parametrize(
    "answer", ['{"answer": 4}', '{"name": "Bob", "age": 3}', '{"type": "object", "properties": {}}']
)
def test_a_llama_answer_in_json_is_text(answer: str) -> None:
    assert family("llama3_json").make().segments(answer) == [Text(answer)]


@pytest.mark.parametrize("key", ["parameters", "arguments"])
def test_what_looks_like_a_llama_call_after_text_is_a_failure(key: str) -> None:
    call = f'{{"name": "f", "{key}": {{}}}}'
    text, failure = family("llama3_json").make().segments(f"I call {call}")
    assert text == Text("I call ")
    assert isinstance(failure, ParseFailure)
    assert (failure.raw, failure.name) == (call, "f")
    assert "a call must be the whole answer" in failure.reason


def test_harmony_channels_are_reasoning_text_and_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>first<|end|><|start|>assistant<|channel|>commentary<|message|>Plan: 1.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>then<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.f code<|message|>{ANY_CALL}<|call|><|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    assert family("gpt_oss").make().segments(text) == [
        Reasoning("first"),
        Text("Plan: 1."),
        Reasoning("then"),
        ToolCall("c0", "f", {"a": 1}),
        Text("Done."),
    ]


STRAY = [known for known in FAMILIES if known.parser not in ("gpt_oss", "llama3_json")]


@pytest.mark.parametrize("known", STRAY, ids=str)
def test_a_stray_close_makes_everything_before_it_reasoning(known: Family) -> None:
    draft = "maybe " + known.calls([NO_ARGUMENTS])
    thought, call = known.make([SEARCH]).segments(draft + known.reasoning[1] + known.calls([SEARCH]))
    assert thought == Reasoning(draft)
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == SEARCH


@pytest.mark.parametrize("name", parser_names())
def test_ids_are_unique_without_a_source(name: str) -> None:
    known = next(known for known in FAMILIES if known.parser == name)
    first, second = get_parser(name).parse(known.turn(calls=[NO_ARGUMENTS, NO_ARGUMENTS]))
    assert isinstance(first, ToolCall)
    assert isinstance(second, ToolCall)
    assert first.id != second.id
