"""What holds of the Hermes parser for every text: round trips, no exceptions, nothing lost, linear time."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strands_rollout.tool_parsers import ParseFailure, Reasoning, Segment, Text, ToolCall
from strands_rollout.tool_parsers.hermes import HermesParser

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
KEYS = st.text() | st.sampled_from(TAGS)
VALUES = st.recursive(
    SCALARS | st.sampled_from(TAGS),
    lambda v: st.lists(v, max_size=4) | st.dictionaries(KEYS, v, max_size=4),
    max_leaves=20,
)
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=4)
NAMES = st.text(min_size=1).filter(lambda name: name.strip())
SPACE = st.text(" \t\r\n", max_size=4)
PROSE = st.text().filter(lambda text: not any(tag in text for tag in TAGS) and "<" not in text)
PIECES = st.sampled_from(
    [
        *TAGS,
        '{"name": "f", "arguments": {}}',
        '{"name":',
        '"',
        "\\",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "x",
        "\n",
        "1e5",
        "\ud800",
    ]
)


def parser() -> HermesParser:
    numbers = itertools.count()
    return HermesParser(lambda: f"c{next(numbers)}")


@given(
    turns=st.lists(st.tuples(PROSE, NAMES, ARGUMENTS, SPACE, SPACE, st.booleans(), st.booleans()), max_size=4),
    tail=PROSE,
)
def test_what_was_written_is_what_is_read(turns: list[Any], tail: str) -> None:
    text = ""
    expected: list[Segment] = []
    for prose, name, arguments, before, after, ascii_only, spread in turns:
        call = {"name": name, "arguments": arguments}
        written = json.dumps(call, ensure_ascii=ascii_only, indent=1 if spread else None, allow_nan=False)
        text += f"{prose}<tool_call>{before}{written}{after}</tool_call>"
        expected += [Text(prose)] if prose.strip() else []
        expected += [ToolCall(f"c{sum(isinstance(e, ToolCall) for e in expected)}", name, arguments)]
    expected += [Text(tail)] if tail.strip() else []
    assert parser().segments(text + tail) == expected


@given(pieces=st.lists(PIECES, max_size=30), in_reasoning=st.booleans())
@example(pieces=["<tool_call>", "</think>", "<tool_call>"], in_reasoning=False)
def test_no_text_raises_and_nothing_of_it_is_lost(pieces: list[str], in_reasoning: bool) -> None:
    text = "".join(pieces)
    segments = parser().segments(text, in_reasoning)
    assert parser().parse(text, in_reasoning) == [s for s in segments if isinstance(s, ToolCall | ParseFailure)]
    position = 0
    for segment in segments:
        shown = segment.raw if isinstance(segment, ParseFailure) else None
        shown = segment.text if isinstance(segment, Text | Reasoning) else shown
        if shown is not None:
            position = text.index(shown, position) + len(shown)
        elif isinstance(segment, ToolCall):
            position = text.index("</tool_call>", position) + len("</tool_call>")
    assert not in_reasoning or "</think>" in text or not parser().parse(text, in_reasoning)


@given(data=st.data())
def test_one_changed_character_never_raises_and_never_becomes_another_tool_silently(data: st.DataObject) -> None:
    text = 'ok <tool_call>\n{"name": "f", "arguments": {"a": [1, "b", null]}}\n</tool_call>'
    at = data.draw(st.integers(0, len(text)))
    changed = text[:at] + data.draw(st.sampled_from(["", "x", '"', "}", "\\", "<", "\x00"])) + text[at + 1 :]
    for part in parser().segments(changed):
        if isinstance(part, ToolCall):
            assert part.name == json.loads(changed.split("<tool_call>")[1].split("</tool_call>")[0])["name"]


HOSTILE = [
    "<tool_call>",
    "<tool_call>{</tool_call>",
    '<tool_call>{"</tool_call>',
    '<tool_call>{",":"</tool_call>',
    '<tool_call>{"name":"x","arguments":{"a":[[[[',
    "<think></think>",
    "</think>",
    "</tool_call>",
    "[",
    '{"',
    " ",
    '\\"',
]


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("head", ["", '<tool_call>{"name":"x","arguments":{"a":'])
@pytest.mark.slow
def test_a_megabyte_of_hostile_text_is_parsed_in_linear_time(piece: str, head: str) -> None:
    text = head + piece * (1_000_000 // len(piece)) + "</tool_call>"
    started = time.process_time()
    parser().segments(text)
    # under half a second in linear time, minutes in quadratic time: no question of a busy machine
    assert time.process_time() - started < 20
