"""One table of cases for every family's parser: calls, reasoning, text around them, and each kind of malformed call."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parser_families import FAMILIES, Call, Family, family

from strands_rollout.tool_parsers import ParseFailure, Reasoning, Text, ToolCall, get_parser, parser_names

SEARCH: Call = ("search", {"query": "Zürich", "limit": 5})
NESTED: Call = ("store.put-v2", {"item": {"a": [1, {"b": None}], "c": {"d": [True, False, []]}}, "tags": [["x"], []]})
UNICODE: Call = ("say", {"text": "Grüße 你好 \N{ROCKET} \u202e\u00a0 \\n \"quoted\" 'so' & <b>", "n": -1.5e-3})
LINES: Call = ("write", {"path": "/tmp/a.py", "content": '\ndef f():\n    return "x"\n\n'})
NO_ARGUMENTS: Call = ("now", {})
WHOLE = {"llama3_json", "pythonic", "lfm2", "apertus", "granite", "phi4_mini", "hunyuan_a13b"}
EACH = pytest.mark.parametrize("known", FAMILIES, ids=str)


def calls_of(*calls: Call) -> list[ToolCall]:
    return [ToolCall(f"c{index}", name, arguments) for index, (name, arguments) in enumerate(calls)]


def test_table_has_every_parser() -> None:
    assert {known.parser for known in FAMILIES} == set(parser_names())


@EACH
@pytest.mark.parametrize("call", [SEARCH, NESTED, UNICODE, LINES, NO_ARGUMENTS], ids=lambda call: call[0])
def test_parse_returns_the_written_call(known: Family, call: Call) -> None:
    assert known.make([call]).segments(known.turn(calls=[call])) == calls_of(call)


@EACH
def test_parse_parallel_calls_in_order_with_own_ids(known: Family) -> None:
    calls = [SEARCH, NO_ARGUMENTS, NESTED]
    assert known.make(calls).parse(known.turn(calls=calls)) == calls_of(*calls)


@EACH
def test_segments_reasoning_and_text_before_calls(known: Family) -> None:
    if known.mixes:
        turn = known.turn(reasoning="why", text="I will look.", calls=[SEARCH])
        expected: list[Any] = [Reasoning("why"), Text("I will look."), *calls_of(SEARCH)]
    else:
        turn, expected = known.turn(reasoning="why", calls=[SEARCH]), [Reasoning("why"), *calls_of(SEARCH)]
    assert known.make([SEARCH]).segments(turn) == expected


@EACH
def test_segments_of_turn_without_calls_is_text(known: Family) -> None:
    assert known.make().segments("") == []
    assert known.make().segments("Zürich is {lovely} [1], 3 < 4.") == [Text("Zürich is {lovely} [1], 3 < 4.")]
    assert known.make().segments(known.turn(reasoning="why", text="So.")) == [Reasoning("why"), Text("So.")]


@EACH
def test_segments_calls_in_reasoning_are_drafts(known: Family) -> None:
    draft = known.calls([NO_ARGUMENTS])
    assert known.make([SEARCH]).parse(known.turn(reasoning=f"maybe {draft} no", calls=[SEARCH])) == calls_of(SEARCH)
    turn = known.reasoning[0] + "maybe " + known.calls([SEARCH])
    assert known.make([SEARCH]).parse(turn) == []
    assert [type(part) for part in known.make([SEARCH]).segments(turn)] == [Reasoning]


@EACH
def test_segments_in_reasoning_ends_at_closing_tag(known: Family) -> None:
    draft = known.calls([NO_ARGUMENTS])
    turn = known.turn(reasoning=f"maybe {draft}", calls=[SEARCH], in_reasoning=True)
    assert known.make([SEARCH]).segments(turn, in_reasoning=True) == [Reasoning(f"maybe {draft}"), *calls_of(SEARCH)]
    assert known.make([SEARCH]).segments(f"maybe {draft}", in_reasoning=True) == [Reasoning(f"maybe {draft}")]
    assert known.make([SEARCH]).segments(draft, in_reasoning=True) == [Reasoning(draft)]


@EACH
def test_parse_cut_call_is_never_a_call(known: Family) -> None:
    turn = known.turn(calls=[SEARCH])
    for length in range(len(turn)):
        assert not any(isinstance(part, ToolCall) for part in known.make([SEARCH]).parse(turn[:length])), turn[:length]


@EACH
def test_parse_broken_call_does_not_hide_valid_call(known: Family) -> None:
    """A failure covers one call if the format marks its end; a list of calls, or Llama's objects, fail as a whole."""
    turn = known.turn(calls=[NO_ARGUMENTS, SEARCH]).replace("{}", "{oops}", 1).replace("now", "now<", 1)
    turn = turn.replace("[now<()", "[now(x=)", 1)
    parts = known.make([SEARCH]).parse(turn)
    assert isinstance(parts[0], ParseFailure)
    whole = known.parser in WHOLE or known.id in ("mistral-array", "mistral-nemo")
    assert [part.name for part in parts if isinstance(part, ToolCall)] == ([] if whole else ["search"])


def malformed_calls() -> Iterator[tuple[str, str, str, str]]:
    """Yield family, tool, a part of the failure's reason, and text for each row of the table."""
    for line in Path(__file__).with_name("malformed_calls.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            known, name, reason, text = line.split(" ¦ ", maxsplit=3)
            yield known, name, reason, text.replace("⏎", "\n")


@pytest.mark.parametrize(("known", "name", "reason", "text"), list(malformed_calls()), ids=lambda value: value[:40])
def test_parse_malformed_call_is_failure_with_reason(known: str, name: str, reason: str, text: str) -> None:
    part = text.partition("«")[2].partition("»")[0]
    text = text.replace("«", "").replace("»", "")
    [failure] = family(known).make().parse(text)
    assert isinstance(failure, ParseFailure)
    assert reason in failure.reason
    assert (failure.raw, failure.name or "-") == (part or text, name)
    if part and known != "gpt_oss":  # a section with a malformed call and a valid call
        parts = family(known).make().parse(text + family(known).calls([SEARCH]))
        assert [type(part) for part in parts] == [ParseFailure, ToolCall]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("9" * 5000, "a number can't be read: Exceeds the limit (4300 digits)"),
        ("[" * 50_000 + "]" * 50_000, "nested deeper than the 100 levels that are allowed"),
    ],
    ids=["digits", "deeply nested"],
)
def test_parse_value_beyond_limits_is_failure(value: str, reason: str) -> None:
    call = f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>'
    [failure] = family("hermes").make().parse(call)
    assert isinstance(failure, ParseFailure)
    assert (failure.raw, failure.name) == (call, "f")
    assert reason in failure.reason


def test_mistral_array_element_fails_alone() -> None:
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
def test_llama_call_with_type_and_arguments(text: str) -> None:
    assert family("llama3_json").make().segments(text) == [ToolCall("c0", "f", {"n": "10"})]


@pytest.mark.parametrize(
    "answer", ['{"answer": 4}', '{"name": "Bob", "age": 3}', '{"type": "object", "properties": {}}']
)
def test_llama_json_answer_is_text(answer: str) -> None:
    assert family("llama3_json").make().segments(answer) == [Text(answer)]


@pytest.mark.parametrize("key", ["parameters", "arguments"])
def test_llama_call_after_text_is_failure(key: str) -> None:
    call = f'{{"name": "f", "{key}": {{}}}}'
    text, failure = family("llama3_json").make().segments(f"I call {call}")
    assert text == Text("I call ")
    assert isinstance(failure, ParseFailure)
    assert (failure.raw, failure.name) == (call, "f")
    assert "a call must be the whole answer" in failure.reason


def test_gpt_oss_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>first<|end|><|start|>assistant<|channel|>commentary<|message|>Plan: 1.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>then<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f code<|message|>{"a": 1}<|call|><|start|>assistant<|channel|>final<|message|>Done.<|return|>'
    )
    assert family("gpt_oss").make().segments(text) == [
        Reasoning("first"),
        Text("Plan: 1."),
        Reasoning("then"),
        ToolCall("c0", "f", {"a": 1}),
        Text("Done."),
    ]


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ("<|channel|>analysi<|message|>so 42<|end|>", []),
        ("<|channel|>analysis now<|message|>so 42<|end|>", []),
        ("<|channel|>analysis of it all<|message|>so 42<|end|>", []),
        ("<|start|>assistant<|message|>so 42<|end|>", []),
        ("<|start|>assistant analysis<|message|>so 42<|end|>", []),
        ("<|channel|><|message|>so 42<|end|>", []),
        ("<|channel|>analysis so 42", []),
        ("so 42<|end|>", []),
        ("so 42<|end|><|start|>assistant<|channel|>final<|message|>41", ["41"]),
        ("<|channel|>final<|message|>41<|end|>so 42", ["41"]),
        ("<|channel|>thought<|message|>so 42<|end|><|start|>assistant<|channel|>final<|message|>41", ["41"]),
        ("<|channel|>commentary<|message|>41", ["41"]),
        ("41", ["41"]),
    ],
)
def test_gpt_oss_text_outside_messages_is_reasoning(turn: str, said: list[str]) -> None:
    segments = family("gpt_oss").make().segments(turn)
    assert [part.text for part in segments if isinstance(part, Text)] == said
    assert not any(isinstance(part, ParseFailure) for part in segments)
    assert all("so 42" not in part for part in said)
    shown = "".join(part.text for part in segments if isinstance(part, Reasoning | Text))
    assert ("so 42" in turn) == ("so 42" in shown)


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (" to=self<|message|>so 42<|eom|><|start|>assistant to=user<|message|>41", ["41"]),
        ("<|message|>41", ["41"]),
        (" to=self<|message|>so 42", []),
        (" to=self so 42<|eom|><|start|>assistant to=user<|message|>41", ["41"]),
        ("so 42<|eom|>", []),
        ("<|start|>self<|message|>so 42<|eom|>", []),
        ("41", ["41"]),
    ],
)
def test_muse_glimmer_text_outside_messages_is_reasoning(turn: str, said: list[str]) -> None:
    segments = family("muse_glimmer").make().segments(turn)
    assert [part.text for part in segments if isinstance(part, Text)] == said
    assert not any(isinstance(part, ParseFailure) for part in segments)


@pytest.mark.parametrize(
    ("known", "turn", "said"),
    [
        ("kimi_k3", "<|open|>thinking<|sep|>so 42<|close|>thinking<|sep|><|open|>response<|sep|>41", ["41"]),
        ("kimi_k3", "<|open|>response<|sep|>41<|close|>response<|sep|><|open|>x<|sep|>so 42", ["41"]),
        ("gemma4", "41<|channel>analysis\nso 42<channel|>", ["41"]),
        ("gemma4", "<|channel>analysis\nso 42", []),
    ],
)
def test_unknown_channel_is_reasoning(known: str, turn: str, said: list[str]) -> None:
    segments = family(known).make().segments(turn)
    assert [part.text for part in segments if isinstance(part, Text)] == said
    assert "so 42" in "".join(part.text for part in segments if isinstance(part, Reasoning))


@pytest.mark.parametrize(
    ("tools", "written", "meant"),
    [
        (["f"], "f.f", "f"),
        (["f", "f.f"], "f.f", "f.f"),
        (["g"], "f.f", "f.f"),
        (["calendar.get"], "weather.get", "weather.get"),
        (["f"], "f.g", "f.g"),
    ],
)
def test_muse_glimmer_call_may_repeat_the_tools_name(tools: list[str], written: str, meant: str) -> None:
    known = family("muse_glimmer")
    turn = known.turn(calls=[(written, {"n": "1"})])
    [call] = known.make([(name, {"n": "1"}) for name in tools]).parse(turn)
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == (meant, {"n": "1" if meant in tools else 1})


STRAY = [known for known in FAMILIES if known.parser not in ("gpt_oss", "llama3_json", "muse_glimmer", "pythonic")]


@pytest.mark.parametrize("known", STRAY, ids=str)
def test_segments_stray_close_makes_text_before_it_reasoning(known: Family) -> None:
    draft = "maybe " + known.calls([NO_ARGUMENTS])
    thought, call = known.make([SEARCH]).segments(draft + known.reasoning[1] + known.calls([SEARCH]))
    assert thought == Reasoning(draft)
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == SEARCH


@pytest.mark.parametrize("name", parser_names())
def test_parse_ids_are_unique_by_default(name: str) -> None:
    known = next(known for known in FAMILIES if known.parser == name)
    first, second = get_parser(name).parse(known.turn(calls=[NO_ARGUMENTS, NO_ARGUMENTS]))
    assert isinstance(first, ToolCall)
    assert isinstance(second, ToolCall)
    assert first.id != second.id
