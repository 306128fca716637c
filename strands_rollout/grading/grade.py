r"""Grades an assistant's words against a label, as far as that needs no algebra. Pure.

Knows answers and labels; must not know samples, scores or processes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from strands_rollout.grading.comparison import Comparison, compare
from strands_rollout.grading.extraction import extract_answer, last_boxed


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one answer.

    Attributes:
        correct: None when only algebra can tell; ask it about each of `formulas`.
        pred: The answer as the assistant wrote it; "" for none.
        label: The label that it was compared with; of several, the one that it equals, else the first.
        method: What decided; see `Comparison.method`.
        formulas: Undecided pairs (prediction, label); one that is equal makes the answer right.
    """

    correct: bool | None
    pred: str
    label: str
    method: str
    formulas: tuple[tuple[str, str], ...] = ()


def grade(text: str, label: object) -> Grade:
    """Extract the answer from what an assistant said and compare it with the label.

    Args:
        text: The assistant's last words, without reasoning and tool output; see `segments`.
        label: Text, a number, or a list of alternatives of which any is right; None or "" makes every answer wrong.
    """
    pred = extract_answer(text)
    labels = label_texts(label) or ("",)
    comparisons: list[Comparison] = []
    for wanted in labels:
        comparison = compare(pred, wanted)
        if comparison.equal:
            return Grade(correct=True, pred=pred, label=wanted, method=comparison.method)
        comparisons.append(comparison)
    formulas = tuple(comparison.formulas for comparison in comparisons if comparison.equal is None)
    method = "algebra" if formulas else comparisons[0].method
    return Grade(None if formulas else False, pred, labels[0], method, formulas)


def label_texts(label: object) -> tuple[str, ...]:
    r"""The answers that a label allows, as text.

    Takes what data sets hold: "42", 42, 42.0, "\boxed{42}", "... #### 42" (GSM8K), ["42", "forty-two"] and '["42"]'.
    """
    if hasattr(label, "tolist"):  # a NumPy scalar or array
        label = label.tolist()
    if isinstance(label, str):
        alternatives = _json_list(label)
        return (_bare_label(label),) if alternatives is None else label_texts(alternatives)
    if isinstance(label, list | tuple | set | frozenset):
        return tuple(text for item in label for text in label_texts(item) if text)
    return () if label is None else (str(label),)


def _json_list(label: str) -> list[object] | None:
    if not label.lstrip().startswith('["'):
        return None
    try:
        found = json.loads(label)
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def _bare_label(label: str) -> str:
    return last_boxed(label) or label.rpartition("####")[2].strip()
