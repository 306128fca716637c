r"""Labels: brought to one form, and each different one graded once as the policy would say it.

A label is good if the reward is right for `\boxed{label}` and for a line `Answer: label`. Knows the package's reward;
must not know rows.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import re
from collections.abc import Sequence
from typing import Final

import orjson

from preparation.errors import RowError
from strands_rollout.grading import grade, label_texts
from strands_rollout.grading.answer_keys import is_decided, key_of
from strands_rollout.grading.comparison import LONGEST_ANSWER
from strands_rollout.grading.latex import notation_of
from strands_rollout.inspection.gold_answers import PLACE, SAYINGS, GoldAnswer, gold_refusals
from strands_rollout.inspection.reward_call import own_reward

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


class Labels:
    """All different labels of a data set, each known by a number."""

    def __init__(self) -> None:
        self._by_value: dict[object, int] = {}
        self._by_text: dict[tuple[str, str, bool], int] = {}
        self._texts: list[str] = []
        self._reasons: list[str] = []
        self._marked: list[bool] = []
        self._rows = 0
        self._rows_marked = 0

    def number_of(self, label: object) -> int:
        """The number of a row's label; equal for labels that are the same when normalised, with or without `####`."""
        key = label if isinstance(label, str) else orjson.dumps(label, default=str)
        known = self._by_value.get(key)
        if known is None:
            known = self._by_value[key] = self._add(label)
        self._rows += 1
        self._rows_marked += self._marked[known]
        return known

    def text(self, number: int) -> str:
        """The normalised label, "" for one that is none."""
        return self._texts[number]

    def reason(self, number: int) -> str:
        """Why the label can't be used; "" for a good one. What grading finds is known after `check`."""
        return self._reasons[number]

    def are_equal(self, one: int, other: int) -> bool:
        """Whether grading takes one label for the other."""
        return bool(grade(SAYINGS[0].replace(PLACE, self._texts[one]), self._texts[other]).correct)

    def check(self) -> None:
        """Grade each label as an answer to itself; where most have the marker, refuse those that have not."""
        if self._rows_marked >= max(1, _MARKED_SHARE * self._rows):
            for number, is_marked in enumerate(self._marked):
                if not is_marked and not self._reasons[number]:
                    self._reasons[number] = f"label: got none after {_MARKER}, which the other rows of the column have"
        unchecked = [number for number, reason in enumerate(self._reasons) if not reason]
        for start in range(0, len(unchecked), _GRADED_AT_ONCE):
            numbers = unchecked[start : start + _GRADED_AT_ONCE]
            refusals = _refusals([self._texts[number] for number in numbers])
            for number, refusal in zip(numbers, refusals, strict=True):
                self._reasons[number] = refusal

    def _add(self, label: object) -> int:
        text, reason = "", ""
        try:
            text = normalised(label)
        except RowError as e:
            reason = str(e)
        is_marked = isinstance(label, str) and _MARKER in label
        number = self._by_text.setdefault((text, reason, is_marked), len(self._texts))
        if number == len(self._texts):
            self._marked.append(is_marked)
            self._texts.append(text)
            self._reasons.append(reason)
        return number


def _refusals(texts: Sequence[str]) -> list[str]:
    """For each label why grading would not give the point for it, "" where it does."""
    golds = [GoldAnswer("", text, (_first(text),)) for text in texts]
    return [f"label: {reason}" if reason else "" for reason in asyncio.run(gold_refusals(golds, own_reward()))]


def _first(text: str) -> str:
    return label_texts(text)[0]


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
