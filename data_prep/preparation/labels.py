r"""Labels: brought to one form, and each different one graded once as the policy would say it.

A label is good if the reward is right for `\boxed{label}` and for a line `Answer: label`.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import orjson

from preparation.rows import RowError
from strands_rollout.diagnostics.rewards import PLACE, SAYINGS, GoldAnswer, gold_refusals, own_reward
from strands_rollout.grading import grade, label_texts
from strands_rollout.grading.comparison import LONGEST_ANSWER
from strands_rollout.grading.notation import notation_of
from strands_rollout.grading.values import is_decided, key_of

_INTEGER: Final = re.compile(r"(?P<sign>-?)0*(?P<digits>\d+)")
_THOUSANDS: Final = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NOTHING: Final = re.compile(r"(?:null|none|n/?a|nan|nil|undefined|unknown|\?+)\.?", re.IGNORECASE)
_MARKER: Final = "####"
_MARKED_SHARE: Final = 0.5  # of the rows, from which on a label without the marker is a solution without its answer
_EXACT_FLOATS: Final = 2**53
_GRADED_AT_ONCE: Final = 500


def normalised(label: object) -> str:
    r"""The label as text: what follows `####` or stands in a box, without leading zeros, thousands commas and spaces.

    Several alternatives become a JSON list, which the package's grading understands.

    Raises:
        RowError: There is no label, one that says so, that reading changed, or that is too long to be an answer.
    """
    texts = [_number(text.strip()) for text in label_texts(_plain(label)) if text.strip()]
    if not texts:
        raise RowError(f"label: got {label!r:.80}; expected an answer")
    if any(map(_NOTHING.fullmatch, texts)):
        raise RowError(f"label: got {label!r:.80}, which says that there is none; expected an answer")
    if max(map(len, texts)) > LONGEST_ANSWER:
        raise RowError(f"label: got {len(max(texts, key=len))} characters; expected at most {LONGEST_ANSWER}")
    return texts[0] if len(texts) == 1 else json.dumps(texts, ensure_ascii=False)


def is_number(text: str) -> bool:
    """Whether grading reads a normalised label, or one of its alternatives, as a number or several."""
    return any(is_decided(key_of(notation_of(one).text)) for one in label_texts(text))


@dataclass(slots=True, eq=False)
class Label:
    """One label of a data set: its normalised text, "" for one that is none, and why it can't be used, else ""."""

    text: str
    reason: str
    is_marked: bool

    def equals(self, other: Label) -> bool:
        """Whether grading takes one label for the other."""
        return bool(grade(SAYINGS[0].replace(PLACE, self.text), other.text).correct)


class Labels:
    """All different labels of a data set."""

    def __init__(self) -> None:
        self._by_value: dict[object, Label] = {}
        self._by_text: dict[tuple[str, str, bool], Label] = {}
        self._rows = self._rows_marked = 0

    def label_of(self, value: object) -> Label:
        """A row's label; one for all that are the same when normalised, with or without `####`."""
        key = value if isinstance(value, str) else orjson.dumps(value, default=str)
        label = self._by_value.get(key)
        if label is None:
            label = self._by_value[key] = self._read(value)
        self._rows += 1
        self._rows_marked += label.is_marked
        return label

    def check(self) -> None:
        """Grade each label as an answer to itself; where most have the marker, refuse those that have not."""
        labels = list(self._by_text.values())
        if self._rows_marked >= max(1, _MARKED_SHARE * self._rows):
            for label in labels:
                if not label.is_marked and not label.reason:
                    label.reason = f"label: got none after {_MARKER}, which the other rows of the column have"
        unchecked = [label for label in labels if not label.reason]
        for start in range(0, len(unchecked), _GRADED_AT_ONCE):
            some = unchecked[start : start + _GRADED_AT_ONCE]
            for label, refusal in zip(some, _refusals([label.text for label in some]), strict=True):
                label.reason = refusal

    def _read(self, value: object) -> Label:
        text, reason = "", ""
        try:
            text = normalised(value)
        except RowError as e:
            reason = str(e)
        is_marked = isinstance(value, str) and _MARKER in value
        return self._by_text.setdefault((text, reason, is_marked), Label(text, reason, is_marked))


def _refusals(texts: Sequence[str]) -> list[str]:
    """For each label why grading would not give the point for it, "" where it does."""
    golds = [GoldAnswer("", text, (label_texts(text)[0],)) for text in texts]
    return [f"label: {reason}" if reason else "" for reason in asyncio.run(gold_refusals(golds, own_reward()))]


def _plain(label: object) -> object:
    """Whole numbers without a point: 42.0 is 42.

    Raises:
        RowError: Reading made something else of the label, so that what the source says is lost.
    """
    if isinstance(label, datetime.date | datetime.time | datetime.timedelta):
        raise RowError(f"label: got {str(label)!r}, which was read as a date or time; store the labels as text")
    if not isinstance(label, float) or not label.is_integer():
        return label
    if abs(label) >= _EXACT_FLOATS:
        raise RowError(f"label: got the float {label!r}, too large to be exact; store the labels as text")
    return int(label)


def _number(text: str) -> str:
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    integer = _INTEGER.fullmatch(text)
    return integer["sign"] + integer["digits"] if integer else text


def first_difference(labels: Sequence[object], others: Sequence[object]) -> tuple[str, str] | None:
    """The first values of two columns that are different labels: 0 and 1 beside the answer are no labels."""
    texts = ((_text(label), _text(other)) for label, other in zip(labels, others, strict=True))
    return next(((label, other) for label, other in texts if label and other and label != other), None)


def _text(label: object) -> str:
    """The normalised label; "" for what is none."""
    try:
        return normalised(label)
    except RowError:
        return ""
