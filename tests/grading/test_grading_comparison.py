"""Equality of answers without algebra: notation is normalised on both sides, numbers are exact."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_rollout.grading import grade, label_texts
from strands_rollout.grading.comparison import LONGEST_ANSWER, compare
from strands_rollout.grading.exact_numbers import exact_number

EQUAL = [
    ("42.", "42"),
    ("42.0", "42"),
    ("042", "42"),
    ("+42", "42"),
    ("-0", "0"),
    ("\u22125", "-5"),
    ("1,234", "1234"),
    ("1{,}234", "1234"),
    (r"1\,234\,567", "1234567"),
    (r"1,\!234", "1234"),
    ("1 234", "1234"),
    (".5", "1/2"),
    ("5.", "5"),
    ("½", "0.5"),
    (r"\frac12", "0.5"),
    (r"\dfrac{1}{2}", "1/2"),
    (r"-\tfrac{1}{2}", r"\frac{-1}{2}"),
    (r"1\frac{1}{2}", "3/2"),
    ("-1 1/2", "-1.5"),
    ("1e3", "1000"),
    (r"1.5 \times 10^{3}", "1500"),
    ("10^5", "100000"),
    ("$42$", "42"),
    (r"\(42\)", "42"),
    (r"\$42", "42"),
    ("(42)", "42"),
    ("x = 42", "42"),
    ("42", "x=42"),
    (r"6 \cdot 7 = 42", "42"),
    ("f(x) = 2x+1", "2x+1"),
    (r"42\text{ cm}", "42"),
    ("42 cm^2", "42"),
    ("42 dollars", "42"),
    (r"42^\circ", "42"),
    ("42\u00b0", "42"),
    (r"50\%", "50"),
    ("50%", "0.5"),
    ("50 percent", "50"),
    ("5 m", "5"),
    ("1,2", "2, 1"),
    ("1 or 2", "2, 1"),
    (r"1 \text{ and } 2", r"\{1,2\}"),
    (r"\{1,2\}", r"\{2, 1\}"),
    (r"\{5\}", "5"),
    (r"\pm 3", "-3, 3"),
    ("x=1, x=2", "1, 2"),
    ("100,200", "100, 200"),
    (r"\left(1, 2\right)", "(1,2)"),
    ("(1/2, 3)", "(0.5, 3.0)"),
    ("1, 2", "(1, 2)"),
    ("(x,y) = (3,4)", "(3,4)"),
    ("[1,2)", "[1, 2)"),
    ("2516", "2516_8"),
    ("2516_{8}", "2516_8"),
    ("3:4", "3 : 4"),
    (r"\text{Yes}", "yes"),
    (r"\text{(B)}", "B"),
    (r"\sqrt 2", r"\sqrt{2}"),
    ("x^{2}", "x^2"),
    (r"2\times3x", r"2\cdot 3x"),
    (r"x \leq 3", r"x\le 3"),
]

DIFFERENT = [
    ("41", "42"),
    ("-42", "42"),
    ("0.333", "1/3"),
    ("11/2", "1 1/2"),
    ("50%", "5"),
    ("5 m", "5 cm"),
    ("42:1", "42"),
    ("42_8", "42"),
    ("42_8", "42_9"),
    ("42'", "42"),
    (r"42 \ldots", "42"),
    ("(2,1)", "(1,2)"),
    ("[1,2]", "(1,2)"),
    ("(1,2,3)", "(1,2)"),
    (r"\{1,2\}", "(1,2)"),
    ("1, 2", "1"),
    ("42, 43", "42"),
    ("A", "B"),
    ("a", "A"),
    ("no solution", "42"),
    ("42", "no"),
    ("12,34", "1234"),
    ("", "42"),
    ("42", ""),
    ("1" * (LONGEST_ANSWER + 1), "1"),
]

UNDECIDED = [
    (r"\sqrt{4}", "2"),
    ("2x+1", "1+2x"),
    ("x=1, y=2", "x=2, y=1"),
    ("y=5", "x=5"),
    (r"x \le 42", "42"),
    ("42x", "42"),
    ("5m", "5"),
    ("42 million", "42"),
    ("x, 42", "42"),
    (r"\frac{1}{0}", "1"),
    ("10^{99999}", "1"),
]


@pytest.mark.parametrize(("prediction", "label"), EQUAL)
def test_equal_answers_need_no_algebra(prediction: str, label: str) -> None:
    assert compare(prediction, label).equal is True


@pytest.mark.parametrize(("prediction", "label"), DIFFERENT)
def test_different_answers_need_no_algebra(prediction: str, label: str) -> None:
    assert compare(prediction, label).equal is False


def test_a_giant_prediction_is_wrong_unread() -> None:
    giant = "x+" * LONGEST_ANSWER
    assert compare(giant, "42").method == "too_long"
    assert compare(giant, giant).equal is True


@pytest.mark.parametrize(("prediction", "label"), UNDECIDED)
def test_what_only_algebra_can_tell_is_left_to_it(prediction: str, label: str) -> None:
    comparison = compare(prediction, label)
    assert comparison.equal is None
    assert all(comparison.formulas)


@given(value=st.fractions(), grouped=st.booleans())
def test_a_number_is_read_back_exactly(value: Fraction, grouped: bool) -> None:
    over = f"{abs(value.numerator):,}" if grouped else str(abs(value.numerator))
    sign = "-" if value < 0 else ""
    assert exact_number(f"{sign}\\frac{{{over}}}{{{value.denominator}}}") == value
    assert exact_number(f"{sign}{over}/{value.denominator}") == value


@given(value=st.integers(), label=st.integers())
def test_integers_are_equal_exactly_when_they_are(value: int, label: int) -> None:
    if len(str(value)) < LONGEST_ANSWER:
        assert grade(f"so \\boxed{{{value:,}}}", label).correct is (value == label)


@given(prediction=st.text(max_size=60), label=st.text(max_size=60))
def test_any_two_texts_can_be_compared(prediction: str, label: str) -> None:
    compare(prediction, label)


@given(parts=st.lists(st.sampled_from([*r"(){}[],^_$ \ =-+./%", "1", "42", r"\frac", r"\{", "x", r"\text{", "e"])))
def test_any_notation_can_be_compared_with_itself(parts: list[str]) -> None:
    text = "".join(parts)
    assert compare(text, text).equal is (bool(text.strip()) or False)
    compare(text, "42")


@pytest.mark.parametrize(
    ("label", "texts"),
    [
        (42, ("42",)),
        (42.0, ("42.0",)),
        ("42", ("42",)),
        (r"\boxed{42}", ("42",)),
        ("6*7=<<6*7=42>>42\n#### 42", ("42",)),
        (["42", 43], ("42", "43")),
        ('["42"]', ("42",)),
        ("[1,2]", ("[1,2]",)),
        ('["broken', ('["broken',)),
        (None, ()),
        ([], ()),
        ("", ("",)),
    ],
)
def test_labels_come_in_many_shapes(label: object, texts: tuple[str, ...]) -> None:
    assert label_texts(label) == texts


def test_any_of_several_labels_is_right() -> None:
    verdict = grade(r"\boxed{1/2}", ["0.4", "0.5"])
    assert (verdict.correct, verdict.label, verdict.method) == (True, "0.5", "number")
    assert grade(r"\boxed{2}", [r"\sqrt{4}", r"\sqrt{9}"]).formulas == (("2", r"\sqrt{4}"), ("2", r"\sqrt{9}"))


@pytest.mark.parametrize(
    "piece", ["1", "1,", "1a", "(", "()", "ab ", r"\frac{1}", "1 ", "a=", "sqrt(", r"\{1,", "$", "^"]
)
def test_a_comparison_takes_milliseconds_whatever_the_answer(piece: str) -> None:
    started = time.perf_counter()
    compare((piece * LONGEST_ANSWER)[:LONGEST_ANSWER], "42")
    assert time.perf_counter() - started < 0.1
