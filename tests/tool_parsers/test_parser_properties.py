"""Properties of every family's parser for every text: round trips, no exceptions, nothing lost, linear time."""

import re
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parser_families import FAMILIES, Call, Family

from strands_rollout.tool_parsers import ParseFailure, Reasoning, Text, ToolCall

EACH = pytest.mark.parametrize("known", FAMILIES, ids=str)
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # passes on a busy machine
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,20}", fullmatch=True)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
STRINGS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    SCALARS | STRINGS, lambda v: st.lists(v, max_size=3) | st.dictionaries(STRINGS, v, max_size=3), max_leaves=8
)
JSON = ['{"a": 1}', '{"a":', "{", "}", "[", "]", '"', "\\", ",", ":", "1e999", "x", "\n", " ", "\ud800", "<", "|>"]


def calls_for(known: Family) -> st.SearchStrategy[list[Call]]:
    if not known.has_bare_values:
        arguments = st.dictionaries(STRINGS, VALUES, max_size=3)
    else:
        safe = VALUES.filter(lambda value: not re.search(r"<[/\w]|｜", repr(value)))  # noqa: RUF001
        arguments = st.dictionaries(NAMES, safe, max_size=3)
    return st.lists(st.tuples(NAMES, arguments), min_size=1, max_size=3, unique_by=lambda call: call[0])


PROSE = st.text("ab \n.{é", max_size=12).map(lambda text: text if text.strip() else "")


@EACH
@given(data=st.data())
@settings(UNHURRIED, max_examples=15)
def test_parse_round_trip(known: Family, data: st.DataObject) -> None:
    calls = data.draw(calls_for(known))
    thought = data.draw(PROSE)
    text = data.draw(PROSE) if known.mixes else ""
    in_reasoning = bool(thought) and data.draw(st.booleans())
    turn = known.turn(reasoning=thought, text=text, calls=calls, in_reasoning=in_reasoning)
    expected: list[Any] = [Reasoning(thought)] if thought else []
    expected += [Text(text)] if text else []
    expected += [ToolCall(f"c{index}", name, arguments) for index, (name, arguments) in enumerate(calls)]
    assert known.make(calls).segments(turn, in_reasoning) == expected


@EACH
@pytest.mark.parametrize("in_reasoning", [False, True])
def test_cut_segments_lose_no_text(known: Family, in_reasoning: bool) -> None:
    turn = known.turn(reasoning="hm, so", calls=[("f", {"a": "x"})], in_reasoning=in_reasoning)
    opening, closing = ("" if in_reasoning else known.reasoning[0]), known.reasoning[1]
    for end in range(len(opening) + 1, len(turn) + 1):
        thought, *said = known.make().cut_segments(turn[:end], in_reasoning)
        if end <= len(opening) + len("hm, so"):
            assert (thought, said) == (Reasoning(turn[len(opening) : end]), []), end
        if end >= len(opening) + len("hm, so") + len(closing):
            assert thought == Reasoning("hm, so"), end
            # in these formats, a header that was cut before its recipient counts as reasoning
            has_headers = known.parser in ("gpt_oss", "muse_glimmer")
            assert set(map(type, said)) <= ({Text, Reasoning} if has_headers else {Text}), end
            assert known.stripped("".join(one.text for one in said)) in known.stripped(turn[:end]), end
    assert "f" in "".join(one.text for one in said)


@EACH
@given(data=st.data(), in_reasoning=st.booleans())
@settings(UNHURRIED, max_examples=50)
def test_cut_segments_have_no_calls_and_never_raise(known: Family, data: st.DataObject, in_reasoning: bool) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from([*known.pieces, *JSON]), max_size=16)))
    segments = known.make().cut_segments(text, in_reasoning)
    assert set(map(type, segments)) <= {Reasoning, Text}
    kept = known.make().segments(text, in_reasoning)
    if not any(isinstance(part, ToolCall | ParseFailure) for part in kept):
        assert segments == kept


@EACH
@given(data=st.data(), in_reasoning=st.booleans())
@settings(UNHURRIED, max_examples=50)
def test_segments_never_raise_and_lose_no_text(known: Family, data: st.DataObject, in_reasoning: bool) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from([*known.pieces, *JSON]), max_size=16)))
    segments = known.make().segments(text, in_reasoning)
    calls = [part for part in segments if isinstance(part, ToolCall | ParseFailure)]
    assert known.make().parse(text, in_reasoning) == calls
    position = 0
    shown = [part.raw if isinstance(part, ParseFailure) else part.text for part in segments if not is_call(part)]
    for part in shown:
        position = text.index(part, position) + len(part)
    assert all(part.strip() for part in shown)
    if not any(map(is_call, segments)):
        # strip each part first: joined parts may form a tag
        assert "".join(map(known.stripped, shown)) == known.stripped(text)


def is_call(part: object) -> bool:
    return isinstance(part, ToolCall)


@EACH
@pytest.mark.slow
def test_segments_of_hostile_text_take_linear_time(known: Family) -> None:
    written = known.calls([("f", {"a": "x"})])
    broken = (written[:-1], written.replace("{", "{,"), written.replace('"', "", 1), written.replace("a", "", 1))
    opener = next(iter(re.findall(r"[\[<][^\]>]*[\]>]|\{", written)))
    for piece in (*known.pieces, written, *broken, opener + '{"', opener + '{"name":', ' {"name": {', "[{", *JSON):
        text = piece * (100_000 // len(piece))
        for head, tail in (("", ""), (opener, ""), ("", written[-20:])):
            started = time.process_time()
            known.make().segments(head + text + tail)
            # linear time takes far less than a second, quadratic time minutes, also on a busy machine
            assert time.process_time() - started < 5, (piece, head, tail)
