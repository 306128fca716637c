"""Rewards for question answering: `reward: strands_rollout.environments.question_answering.exact_match`, or `f1`."""

import contextlib
import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from strands_rollout.environments.final_answer import final_answer

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


def exact_match(sample: Any) -> dict[str, float | str]:  # noqa: ANN401 - slime's Sample
    """Score 1 if the final answer equals one of the label's answers after normalization, else 0.

    The result has the score under three keys (`score`, `acc` and `em`), the F1 as `f1`, and the final answer as `pred`.
    See `label_answers` for the accepted labels, and `final_answer` for how the final answer is found.

    Raises:
        ValueError: See `label_answers`.
    """
    return _compare(sample, "em")


def f1(sample: Any) -> dict[str, float | str]:  # noqa: ANN401 - slime's Sample
    """Score the final answer by its highest word F1 with any of the label's answers.

    The result has the same keys as the result of `exact_match`, but `score` is the F1.

    Raises:
        ValueError: See `label_answers`.
    """
    return _compare(sample, "f1")


def _compare(sample: Any, scored: Literal["em", "f1"]) -> dict[str, float | str]:  # noqa: ANN401 - slime's Sample
    answers, answer = label_answers(sample.label), final_answer(sample)
    em = float(any(normalize_answer(answer) == normalize_answer(truth) for truth in answers)) if answer else 0.0
    best = max(word_f1(answer, truth) for truth in answers)
    return {"score": em if scored == "em" else best, "acc": em, "em": em, "f1": best, "pred": answer}


def label_answers(label: object) -> list[str]:
    """Return the right answers of a label: a text, a list of texts, or a mapping whose `target` is a text or list.

    A list or mapping may also be given as a JSON text.

    Raises:
        ValueError: The label has no answer, or an answer that is not a text.
    """
    if isinstance(label, str) and label.lstrip().startswith(("[", "{")):
        with contextlib.suppress(ValueError):
            label = json.loads(label)
    found = label.get("target") if isinstance(label, Mapping) else label
    answers = [found] if isinstance(found, str) else list(found) if isinstance(found, Sequence) else []
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f'got the label {label!r:.200}; expected a text, a list of texts, or {{"target": [...]}}')
    return answers


def normalize_answer(text: str) -> str:
    """Return a text as SQuAD's evaluation compares it: lower case, without punctuation, articles or double spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def word_f1(answer: str, truth: str) -> float:
    """Return the harmonic mean of precision and recall of an answer's normalized words; 0 if they share none.

    As in HotpotQA's evaluation, the result is also 0 if the texts differ and one of them is "yes", "no" or "noanswer".
    """
    given, expected = normalize_answer(answer), normalize_answer(truth)
    if given != expected and {given, expected} & {"yes", "no", "noanswer"}:
        return 0.0
    shared = (Counter(given.split()) & Counter(expected.split())).total()
    return 2 * shared / (len(given.split()) + len(expected.split())) if shared else 0.0
