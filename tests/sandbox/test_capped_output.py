"""Bounded output: head and tail are kept, and what lies between is counted."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from strands_rollout.sandbox.capped_output import CappedOutput, shorten

MARKER = re.compile(r"\n\.\.\. \[(\d+) characters dropped\] \.\.\.\n")


@given(text=st.text(alphabet="aé漢😀\n", max_size=300), cap=st.integers(1, 60), step=st.integers(1, 17))
def test_every_character_is_kept_or_counted_however_the_bytes_arrive(text: str, cap: int, step: int) -> None:
    output = CappedOutput(cap)
    data = text.encode()
    for start in range(0, len(data), step):
        output.feed(data[start : start + step])
    output.feed(b"", final=True)
    assert output.total_bytes == len(data)
    assert output.truncated == (len(text) > cap)
    if not output.truncated:
        assert output.text() == text
        return
    head, dropped, tail = MARKER.split(output.text())
    assert len(head) + int(dropped) + len(tail) == len(text)
    assert len(head) + len(tail) == cap
    assert text.startswith(head)
    assert text.endswith(tail)


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    output = CappedOutput(10)
    output.feed(b"a\xff\xe6")
    output.feed(b"", final=True)
    assert output.text() == "a\ufffd\ufffd"


def test_a_second_cut_counts_what_the_first_one_dropped() -> None:
    output = CappedOutput(100)
    output.feed(b"x" * 1000)
    head, dropped, tail = MARKER.split(shorten(output.text(), 20))
    assert (head, int(dropped), tail) == ("x" * 10, 980, "x" * 10)
    assert shorten("short", 20) == "short"
