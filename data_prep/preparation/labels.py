r"""Normalize labels, and grade each distinct label as its own answer.

A label is good if the reward accepts `\boxed{label}` and the line `Answer: label`.
"""

import asyncio
import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Final

from preparation.rows import RowError
from strands_rollout.diagnostics.rewards import (
    ANSWER_FORMS,
    LABEL_PLACEHOLDER,
    GroundTruth,
    RewardCall,
    check_ground_truths,
)
from strands_rollout.grading import grade, label_texts
from strands_rollout.grading.comparison import MAX_ANSWER_CHARS
from strands_rollout.grading.expression import notation_of
from strands_rollout.grading.values import Key, ValueGroup, key_of
from strands_rollout.slime_plugin.reward import reward_func

_INTEGER: Final = re.compile(r"(?P<sign>-?)0*(?P<digits>\d+)")
_THOUSANDS: Final = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NOTHING: Final = re.compile(r"(?:null|none|n/?a|nan|nil|undefined|unknown|\?+)\.?", re.IGNORECASE)
_MARKER: Final = "####"
_MARKED_SHARE: Final = 0.5  # if at least this share of rows has the marker, labels without it are rejected
_EXACT_FLOATS: Final = 2**53  # whole floats are exact below this number


@dataclass(frozen=True, slots=True)
class Label:
    """A normalized label, or "" and the reason why it can't be used; `is_marked` if `####` stood before it."""

    text: str
    reason: str = ""
    is_marked: bool = False


def label_of(value: object) -> Label:
    """Return the label for a value of the source's label column."""
    is_marked = isinstance(value, str) and _MARKER in value
    try:
        return Label(normalize(value), is_marked=is_marked)
    except RowError as e:
        return Label("", str(e), is_marked)


def normalize(value: object) -> str:
    r"""Return the label as text: the content of its last box, else the part after `####`, else all of it.

    Removes white space around it, and a number's thousands commas and leading zeros. Several alternatives become a
    JSON list, which the package's grading understands.

    Raises:
        RowError: The label is missing, is a placeholder such as "none", was changed when it was read, or is too long
            for an answer.
    """
    texts = [_tidy_number(text.strip()) for text in label_texts(_as_stored(value)) if text.strip()]
    if not texts:
        raise RowError(f"label: got {value!r:.80}; expected an answer")
    if any(map(_NOTHING.fullmatch, texts)):
        raise RowError(f"label: got {value!r:.80}, which stands for no answer; expected an answer")
    if max(map(len, texts)) > MAX_ANSWER_CHARS:
        raise RowError(f"label: got {len(max(texts, key=len))} characters; expected at most {MAX_ANSWER_CHARS}")
    return texts[0] if len(texts) == 1 else json.dumps(texts, ensure_ascii=False)


def _as_stored(value: object) -> object:
    """Return a value as it was stored, a whole float as an int: 42.0 was 42."""
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta):
        raise RowError(f"label: got {str(value)!r}, which was read as a date or time; store the labels as text")
    if not isinstance(value, float) or not value.is_integer():
        return value
    if abs(value) >= _EXACT_FLOATS:
        raise RowError(f"label: got the float {value!r}, too large to be exact; store the labels as text")
    return int(value)


def _tidy_number(text: str) -> str:
    """Remove thousands commas and leading zeros of a number; return any other text unchanged."""
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    integer = _INTEGER.fullmatch(text)
    return integer["sign"] + integer["digits"] if integer else text


def rejection_reasons(rows: Mapping[Label, int]) -> dict[Label, str]:
    """Return the reason why each label can't be used, "" if it can; `rows` has the number of rows of each label.

    Each label is graded as an answer to itself. If at least half of the rows have the marker `####`, labels without
    it are rejected.
    """
    reasons = {label: label.reason for label in rows}
    if sum(count for label, count in rows.items() if label.is_marked) >= max(1, _MARKED_SHARE * sum(rows.values())):
        for label in rows:
            if not label.is_marked and not label.reason:
                reasons[label] = f"label: has no {_MARKER}, which at least half of the rows have"
    unchecked = [label for label, reason in reasons.items() if not reason]
    ground_truths = [GroundTruth("", label.text, (label_texts(label.text)[0],)) for label in unchecked]
    reward = RewardCall(reward_func, SimpleNamespace(), ("acc",))
    for label, fault in zip(unchecked, asyncio.run(check_ground_truths(ground_truths, reward)), strict=True):
        reasons[label] = fault and f"label: {fault}"
    return reasons


def are_equal(first: Label, second: Label) -> bool:
    """Return whether grading accepts one label for the other."""
    return bool(grade(ANSWER_FORMS[0].replace(LABEL_PLACEHOLDER, first.text), second.text).correct)


def is_number(text: str) -> bool:
    """Return whether grading reads a normalized label, or one of its alternatives, as numbers only."""
    return any(_has_numbers_only(key_of(notation_of(alternative).text)) for alternative in label_texts(text))


def _has_numbers_only(key: Key) -> bool:
    return all(map(_has_numbers_only, key.items)) if isinstance(key, ValueGroup) else isinstance(key, Fraction)
