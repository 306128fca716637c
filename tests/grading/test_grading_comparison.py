"""`compare` and `grade`: a table of labeled pairs, and time limits for hostile answers."""

import time
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strands_rollout.grading import grade, numeric
from strands_rollout.grading.comparison import MAX_ANSWER_CHARS, compare
from strands_rollout.grading.values import exact_number

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # for a busy machine
PAIRS: Final = Path(__file__).with_name("grading_pairs.txt")


def labelled_pairs() -> list[tuple[str, str, str, bool]]:
    pairs, kind = [], ""
    for line in PAIRS.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            kind = line[3:]
        elif not line.startswith("#"):
            answer, _, label = line[2:].rpartition(" | ")
            pairs.append((kind, answer, label, {"= ": True, "! ": False}[line[:2]]))
    return pairs


def reply(answer: str) -> str:
    return answer if r"\boxed" in answer or "Answer:" in answer else rf"\boxed{{{answer}}}"


def test_is_less_ignores_rounding_differences() -> None:
    two = Fraction(2)
    low, high = (numeric._to_mpmath(two) * (1 + sign * numeric._local.epsilon / 4) for sign in (-1, 1))
    for one, other in ((two, low), (low, two), (two, high), (high, two), (low, high)):
        assert numeric.is_close(one, other)
        assert not numeric.is_less(one, other)
    assert numeric.is_less(Fraction(1), low)
    assert not numeric.is_less(high, Fraction(1))


@pytest.mark.parametrize(("answer", "label"), [("2 i x < 6", "i x < 3"), ("x < 2i", "x < 3i"), ("i x > 1", "x < 1")])
def test_grade_of_complex_inequalities_is_wrong(answer: str, label: str) -> None:
    assert not grade(f"Answer: ${answer}$", label).correct


def test_grade_judges_every_labelled_pair_right() -> None:
    pairs = labelled_pairs()
    assert len(pairs) == len({pair[1:3] for pair in pairs}) > 700
    wrong = [(answer, label) for _, answer, label, equal in pairs if grade(reply(answer), label).correct is not equal]
    assert wrong == []


@pytest.mark.slow
def test_math_verify_misjudges_more_of_the_pairs(caplog: pytest.LogCaptureFixture) -> None:
    math_verify: Any = pytest.importorskip("math_verify")
    caplog.set_level("CRITICAL")
    wrong: Counter[bool] = Counter()
    for _, answer, label, equal in labelled_pairs()[::5]:
        gold = math_verify.parse(f"${label}$", parsing_timeout=None)
        given = math_verify.parse(reply(answer), parsing_timeout=None)
        wrong[equal] += math_verify.verify(gold, given, timeout_seconds=None) is not equal
    assert wrong[True] > 10
    assert wrong[False] > 5


def test_compare_is_symmetric_for_complete_notations() -> None:
    kinds = {"integers", "fractions", "decimals", "radicals", "powers", "logarithms", "complex", "sets"}
    for kind, answer, label, equal in labelled_pairs():
        if kind in kinds and r"\boxed" not in answer:
            assert compare(label, answer).equal is equal, (label, answer)


def test_compare_gives_up_on_a_giant_prediction() -> None:
    giant = "x+" * MAX_ANSWER_CHARS
    assert compare(giant, "42").method == "too_long"
    assert compare(giant, giant).equal is True
    assert compare("1" * (MAX_ANSWER_CHARS + 1), "1").equal is False


@pytest.mark.parametrize(("prediction", "label", "method"), [("", "42", "empty"), ("42", "", "no_label")])
def test_compare_empty_text_equals_nothing(prediction: str, label: str, method: str) -> None:
    assert compare(prediction, label) == compare(prediction + " ", label)
    assert (compare(prediction, label).equal, compare(prediction, label).method) == (False, method)


HOSTILE: Final = r"""
10^10^10+x | 9**9**9**9 x | 9^{9^{9}}x | 10^{99999} | 99999! | 3!!! | \binom{10^7}{5\cdot 10^6} | 2^{x^{x^x}} | 1e999+x
x^{999999999} | \sqrt{2}^{99999999} | \sqrt[99999]{x^{99999}} | e^{e^{e^{e}}} | 999!^{99} | \cosh 10^{50}
\ln\ln\ln\ln 10 | (1/x)^{5000}+(1/y)^{5000} | \tan 90^\circ | \lfloor 10^{59.5} \rfloor
"""
PIECES: Final = r"""
1¦1,¦1a¦(¦()¦ab ¦\frac{1}¦1 ¦a=¦sqrt(¦\{1,¦$¦^¦x^¦-¦+x¦|¦x!¦{¦\sin ¦\sin x+¦\sqrt{¦\sqrt¦x^{9999}+¦\pi^¦\pm 1,¦<x
x\le ¦\cup(1,2)¦ or x<1¦\color{red}¦**¦_¦`¦"¦\text{¦\underline¦\frac1x+¦x_1¦999!+¦\binom{999}{500}+¦\¦(x+1.1)^{900}
e^{\sin x}¦\log x ¦=1¦= 6/2¦\frac{x^{99}}{7}+¦\tan x^2+¦x(¦five ¦cm/¦°¦1 of a ¦1) of ¦]0,¦]0,1[¦=]0,1[\cup
\gcd(2,¦\gcd(¦lcm(999,998)¦\setminus ¦\mathbb{R}\setminus\{1\}¦\mathbb{R}-¦(A) ¦答案是¦所以¦gcd
"""
TEXTS: Final = [
    *(text for line in HOSTILE.strip().splitlines() for text in line.split(" | ")),
    *(
        (piece * MAX_ANSWER_CHARS)[:MAX_ANSWER_CHARS]
        for line in PIECES.strip("\n").splitlines()
        for piece in line.split("¦")
    ),
]


@pytest.mark.parametrize("hostile", TEXTS)
def test_compare_is_fast_on_hostile_answers(hostile: str) -> None:
    for label in ("x+1", hostile[1:], "[1,2]"):
        started = time.thread_time()
        verdict = compare(hostile, label)
        assert time.thread_time() - started < 2.0
        assert not (verdict.equal and label in {"x+1", "[1,2]"})


def test_compare_and_grade_end_at_cpu_s() -> None:
    answer, label = r"\sin x+\cos x", r"\cos x+\sin x"
    assert compare(answer, label).equal is True
    assert compare(answer, label, cpu_s=0.0).method == "algebra_timeout"
    assert grade(r"\boxed{1}", [r"\sqrt{2}"] * 100_000, cpu_s=0.05).method == "algebra_timeout"


def test_compare_limits_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numeric, "_MAX_STEPS", 5)
    assert compare(r"\sin x+\cos x", r"\cos x+\sin x").method == "algebra_refused"


@UNHURRIED
@given(value=st.fractions(), grouped=st.booleans())
def test_exact_number_reads_fractions_back(value: Fraction, grouped: bool) -> None:
    over = f"{abs(value.numerator):,}" if grouped else str(abs(value.numerator))
    sign = "-" if value < 0 else ""
    assert exact_number(f"{sign}\\frac{{{over}}}{{{value.denominator}}}") == value
    assert exact_number(f"{sign}{over}/{value.denominator}") == value


@UNHURRIED
@given(parts=st.lists(st.sampled_from([*r"(){}[],^_$ \ =-+./%", "1", "42", r"\frac", r"\{", "x", r"\text{", "e"])))
def test_compare_any_notation_equals_itself(parts: list[str]) -> None:
    text = "".join(parts)
    assert compare(text, text).equal is (bool(text.strip()) or False)
    compare(text, "42")


def test_grade_accepts_any_of_several_labels() -> None:
    verdict = grade(r"\boxed{1/2}", ["0.4", "0.5"])
    assert (verdict.correct, verdict.label, verdict.method) == (True, "0.5", "number")
    assert grade(r"\boxed{3}", [r"\sqrt{4}", r"\sqrt{9}"]).label == r"\sqrt{9}"
    assert grade(r"\boxed{4}", [r"\sqrt{4}", r"\sqrt{9}"]).correct is False
