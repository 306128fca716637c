"""The answer in an assistant's words: the last box, else the last Answer: line."""

from __future__ import annotations

import time

import pytest

from strands_rollout.grading.extraction import extract_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{42}", "42"),
        (r"first \boxed{41}, then \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, 2\right.}", r"\left\{1, 2\right."),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed { 42 }", "42"),
        (r"\boxed 42.", "42."),
        (r"$\boxed 42$", "42"),
        (r"\fbox{42}", "42"),
        (r"\boxed{\boxed{42}}", "42"),
        (r"\boxed{41 \boxed{42}}", "42"),
        (r"\boxed{42 is not closed, but \boxed{7}", "7"),
        (r"\boxed{42} and then \boxed{}", "42"),
        (r"\boxed{42} and then \boxed{4", "42"),
        (r"\boxed{}", ""),
        (r"\boxed{ }", ""),
        (r"\boxed{42", ""),
        (r"\boxed{\frac{1}{2}", ""),
        (r"\boxedtext{42}", ""),
        (r"\boxed{} Answer: 42", "42"),
        (r"Answer: 41, I mean \boxed{42}", "42"),
        (r"\boxed{42} Answer: 41", "42"),
    ],
)
def test_the_last_balanced_box_is_the_answer(text: str, answer: str) -> None:
    assert extract_answer(text).rstrip(".") == answer.rstrip(".")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 42", "42"),
        ("answer : 42.", "42"),
        ("**Answer:** 42", "42"),
        ("**Answer**: 42", "42"),
        ("Final answer: 42\nThat was it.", "42"),
        ("Answer: $42$.", "42"),
        ("Answer: the sum is $42$.", "42"),
        (r"Answer: \(42\)", "42"),
        (r"Answer: \[ 42 \]", "42"),
        ("Answer: $5 and $6", "$5 and $6"),
        ("Answer:\n\n42", "42"),
        ("Answer\uff1a42", "42"),
        ("Answer: 41\nAnswer: 42", "42"),
        ("Answer: 42\nAnswer:", "42"),
        ("Answer: `42`", "42"),
        ("The answer is 42", ""),
        ("", ""),
    ],
)
def test_without_a_box_the_last_answer_line_counts(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


def test_an_answer_buried_under_fifty_thousand_characters_is_not_found() -> None:
    assert extract_answer("\\boxed{42}" + " " * 40_000) == "42"
    assert extract_answer("\\boxed{42}" + " " * 50_000) == ""


@pytest.mark.parametrize("piece", [r"\boxed{", "{", "}", "\\", "Answer: ", "answer ", "Answer: \\(", "$", r"\boxed "])
def test_a_hostile_text_takes_linear_time(piece: str) -> None:
    started = time.perf_counter()
    extract_answer(piece * (2_000_000 // len(piece)))
    extract_answer(r"\boxed{" + piece * (2_000_000 // len(piece)))
    assert time.perf_counter() - started < 2.0
