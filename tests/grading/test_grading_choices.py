"""Multiple choice: the letter that an answer names, and never mathematics."""

import pytest

from strands_rollout.grading.choices import grade_choice

RIGHT = [
    r"\boxed{C}",
    r"\boxed{c}",
    r"So it is $\boxed{\textbf{(C)}}$.",
    r"\boxed{\text{(C) 5 J}}",
    r"\boxed{C: 5}",
    "Answer: C",
    "**Answer:** (C) 12 m",
    "Answer: Option C",
    "Answer: $C$",
    'Reasons.\n```json\n{"answer": "C"}\n```',
    '{"answer": "A"}, no: {"answer": "(C)"}',
    "The correct answer is (C)",
    "The answer is C",
    "so the answer is **C**.",
    r'{"answer": "A"} \boxed{C}',
    r"\boxed{(C) both (A) and (B)}",
    r"\boxed{(C) (i) and (ii)}",
    r"\boxed{(C), or c.}",
    r"\boxed{C. x}",
    "The answer is (C), (B) is too small.",
    "The answer is (C) or so.",
]
WRONG = [
    (r"\boxed{B}", "B"),
    (r"\boxed{C} or rather \boxed{A}", "A"),
    ('"answer": "D"', "D"),
    *((formula, "") for formula in (r"\boxed{C+0}", r"\boxed{2C/2}", r"\boxed{^\circ C}", r"\boxed{A or C}")),
    *(
        (words, "")
        for words in ("Answer: carbon", "Answer: 5 (C)", "The answer is a carbon.", "the answer is C points")
    ),
    (r"\boxed{A, C}", ""),
    *((rf"\boxed{{{both}}}", "") for both in ("(C) and (B)", "C) or B)", "(C), (B)", "(C)/(D)", "(C)(B)", "C. & D.")),
    *((both, "") for both in (r"\boxed{\text{(C)} and \text{(B)}}", r"\boxed{(C)\text{ and }(B)}")),
    *((f"{said} (C) or (B).", "") for said in ("Answer:", "The answer is")),
    ('{"answer": "(C) and option B"}', ""),
    ("", ""),
]


@pytest.mark.parametrize("text", RIGHT)
def test_grade_choice_reads_the_letter(text: str) -> None:
    grade = grade_choice(text, "C")
    assert (grade.correct, grade.pred, grade.label, grade.method) == (True, "C", "C", "choice")


@pytest.mark.parametrize(("text", "read"), WRONG)
def test_grade_choice_refuses_other_letters_and_formulas(text: str, read: str) -> None:
    grade = grade_choice(text, "C")
    assert (grade.correct, grade.pred, grade.method) == (False, read, "choice" if read else "empty")


@pytest.mark.parametrize("text", ["The answer is A", "Answer: A", r"first \boxed{A}, but \boxed{"])
def test_grade_choice_ignores_an_answer_at_the_end_of_a_cut_text(text: str) -> None:
    assert not grade_choice(text, "A", is_cut=True).correct
    assert grade_choice('{"answer": "A"} since', "A", is_cut=True).correct


def test_grade_choice_needs_a_letter_as_the_label() -> None:
    assert grade_choice(r"\boxed{C}", None).method == "no_label"
    assert grade_choice(r"\boxed{C}", "(c)").correct
    with pytest.raises(ValueError, match="got the label '12'; expected the letter of the right choice"):
        grade_choice(r"\boxed{C}", "12")


def test_grade_choice_is_linear_in_the_text() -> None:
    parts = ('"answer": "', "the answer is ", r"\boxed{", "answer is: * _ ")
    spaces = " " * 200_000
    texts = (f"the answer is{spaces}x", f"the answer is C{spaces}x", f'"answer"{spaces}C', f"the answer{spaces}C")
    for text in (*(part * 20_000 for part in parts), *texts):
        assert not grade_choice(text, "C").correct
