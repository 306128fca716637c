"""Exact match and F1 of question answering, compared with the published normalization."""

from typing import Any

import pytest

from strands_rollout import Sample
from strands_rollout.environments.question_answering import (
    exact_match,
    f1,
    label_answers,
    normalize_answer,
    word_f1,
)


def answered(text: str, label: Any) -> Sample:
    sample = Sample(prompt="q", label=label)
    sample.response = text
    return sample


@pytest.mark.parametrize(
    ("text", "normalized"),
    [("The  Eiffel Tower!", "eiffel tower"), ("a an the", ""), ("U.S.A.", "usa"), ("Theatre", "theatre")],
)
def test_normalize_answer_follows_squad(text: str, normalized: str) -> None:
    assert normalize_answer(text) == normalized


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("Paris", "Paris", 1.0),
        ("in Paris", "Paris", 2 / 3),
        ("Paris Paris", "Paris", 2 / 3),
        ("London", "Paris", 0.0),
        ("yes", "yes it is", 0.0),
        ("", "Paris", 0.0),
    ],
)
def test_word_f1(answer: str, gold: str, expected: float) -> None:
    assert word_f1(answer, gold) == pytest.approx(expected)


@pytest.mark.parametrize(
    "label", ["Paris", ["Paris"], {"target": ["Paris"]}, {"target": "Paris"}, '["Paris"]', '{"target": ["Paris"]}']
)
def test_label_answers_forms(label: Any) -> None:
    assert label_answers(label) == ["Paris"]


@pytest.mark.parametrize("label", [None, [], [3], {"target": []}, 3])
def test_label_answers_refuses_other_labels(label: Any) -> None:
    with pytest.raises(ValueError, match="expected a text, a list of texts"):
        label_answers(label)


def test_label_answers_keeps_a_text_in_brackets() -> None:
    assert label_answers("[sic]") == ["[sic]"]


@pytest.mark.parametrize(
    ("text", "em"),
    [
        ("<answer>the Paris</answer>", 1.0),
        ("<answer>London</answer> no, <answer>\nParis.\n</answer>", 1.0),
        (r"It is \boxed{Paris}.", 1.0),
        ("Answer: Paris", 1.0),
        ("Paris", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>Paris", 0.0),
        ("<answer>Rome</answer>", 0.0),
    ],
)
def test_exact_match_reads_the_final_answer(text: str, em: float) -> None:
    assert exact_match(answered(text, ["Paris", "City of Light"]))["score"] == em


def test_f1_takes_the_nearest_answer() -> None:
    result = f1(answered("<answer>light city</answer>", ["Paris", "City of Light"]))
    assert (result["score"], result["acc"], result["pred"]) == (pytest.approx(0.8), 0.0, "light city")
