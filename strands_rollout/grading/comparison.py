r"""Decides, in well under a millisecond, whether two answers are equal, or says that only algebra can tell.

Exact: numbers are fractions, so 0.333 is not 1/3. Sets ignore order, tuples and intervals don't.
Knows notation and keys; must not know sympy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from strands_rollout.grading.answer_keys import Group, Key, is_decided, key_of
from strands_rollout.grading.exact_numbers import exact_number
from strands_rollout.grading.latex import Notation, canonical, notation_of

LONGEST_ANSWER: Final = 600
"""Characters; a longer prediction is wrong unread."""

_CONJUNCTION: Final = re.compile(r",?\s+(?:or|and)\s+|;")
_NAMES: Final = re.compile(
    r"(?P<name>\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?(?:\([A-Za-z]\))?|\([A-Za-z](?:\s*,\s*[A-Za-z])+\))\s*(?:=|\\in(?![A-Za-z]))\s*"
)
_NOT_ONE_EQUATION: Final = re.compile(r"[<>!,;:]|\\(?:le|ge|ne|lt|gt|approx|equiv|sim|in|pm)(?![A-Za-z])")
_LETTERS: Final = re.compile(r"[A-Za-z' .-]+")
_WORDS: Final = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z' .-]+|[A-Za-z]")
_PASSED_OVER: Final = re.compile(r":|'|\\[lc]?dots(?![A-Za-z])|\.\.\.|\d\s*_\s*\{?\s*\w+")
_NUMERAL_IN_BASE: Final = re.compile(r"(?P<numeral>[0-9A-Fa-f]+)\s*_\s*\{?\s*\d+\s*\}?")
_MEASURES: Final = frozenset({"mm", "cm", "km", "m", "ft", "in", "kg", "g", "mg", "lb", "oz"})


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether two answers are equal.

    Attributes:
        equal: None when these means can't tell; algebra may.
        method: What decided: "exact" (the same notation), "number", "collection", "words", "unit", "notation" (of
            two kinds, as 42:1 and 42), "empty", "no_label", "too_long"; "algebra" if nothing did.
        formulas: Of an undecided comparison, the prediction and the label as algebra should read them; else ("", "").
    """

    equal: bool | None
    method: str
    formulas: tuple[str, str] = ("", "")


def compare(prediction: str, label: str) -> Comparison:
    """Compare an extracted answer with a label, both as written."""
    if not label.strip():
        return Comparison(equal=False, method="no_label")
    if not prediction.strip():
        return Comparison(equal=False, method="empty")
    if prediction.strip() == label.strip():
        return Comparison(equal=True, method="exact")
    if max(len(prediction), len(label)) > LONGEST_ANSWER:
        return Comparison(equal=False, method="too_long")
    notations = _without_names(notation_of(prediction), notation_of(label))
    verdict = _compare_notations(*notations)
    return verdict if verdict.equal is not None else replace(verdict, formulas=(notations[0].text, notations[1].text))


def _compare_notations(prediction: Notation, label: Notation) -> Comparison:
    if {prediction.unit, label.unit} <= _MEASURES and prediction.unit != label.unit:
        return Comparison(equal=False, method="unit")
    base = _NUMERAL_IN_BASE.fullmatch(label.text)
    if base and "_" not in prediction.text:  # the question asked for the base, so that an answer may leave it out
        label = replace(label, text=base["numeral"])
    first, second = exact_number(prediction.text), exact_number(label.text)
    if first is not None and second is not None:
        return Comparison(_equal_values(first, prediction, second, label), method="number")
    if canonical(prediction.text) == canonical(label.text):
        return Comparison(equal=True, method="exact")
    if _telling(prediction.text) != _telling(label.text):
        return Comparison(equal=False, method="notation")
    keys = key_of(_with_commas(prediction.text)), key_of(_with_commas(label.text))
    if keys[0] == keys[1] or any(isinstance(key, Group) for key in keys):
        equal = _equal_keys(*keys)
        return Comparison(equal, method="algebra" if equal is None else "collection")
    return _compare_words(*keys)


def _telling(text: str) -> set[str]:
    """The marks in a text that change its meaning and that parsers of LaTeX pass over."""
    return {mark.replace(" ", "").replace("{", "") for mark in _PASSED_OVER.findall(text)}


def _equal_values(first: Fraction, prediction: Notation, second: Fraction, label: Notation) -> bool:
    """Equal as written; where only one has a percent sign, 50% is both 50 and 0.5."""
    if first == second or prediction.percent == label.percent:
        return first == second
    return first == 100 * second if prediction.percent else 100 * first == second


def _compare_words(prediction: Key, label: Key) -> Comparison:
    """Letters never equal a number, and plain words only themselves; but "ab" or "xyz" may be a product."""
    sides = (prediction, label)
    if any(isinstance(side, Fraction) for side in sides):
        differ = all(isinstance(side, Fraction) or _LETTERS.fullmatch(str(side)) for side in sides)
    else:
        differ = all(_WORDS.fullmatch(str(side)) for side in sides) and sorted(str(prediction)) != sorted(str(label))
    return Comparison(equal=False, method="words") if differ else Comparison(equal=None, method="algebra")


def _equal_keys(first: Key, second: Key) -> bool | None:
    if first == second:
        return True
    if isinstance(first, Group) and isinstance(second, Group) and not (first.is_set and second.is_set):
        if "" not in (first.brackets, second.brackets) and first.brackets != second.brackets:
            return False
        if len(first.items) != len(second.items):
            return False
        verdicts = [_equal_keys(*pair) for pair in zip(first.items, second.items, strict=True)]
        return False if False in verdicts else None if None in verdicts else True
    if isinstance(first, Group) and isinstance(second, Group) and frozenset(first.items) == frozenset(second.items):
        return True
    return False if is_decided(first) and is_decided(second) else None


def _with_commas(text: str) -> str:
    """Write "1 or 2" and "1; 2" as "1, 2"; words without digits keep their "and"."""
    return _CONJUNCTION.sub(",", text) if any(character.isdigit() for character in text) else text


def _without_names(prediction: Notation, label: Notation) -> tuple[Notation, Notation]:
    r"""Take "x =" off both, unless they name different things; a prediction "6 \cdot 7 = 42" is its last part."""
    names = _NAMES.match(prediction.text), _NAMES.match(label.text)
    if names[0] and names[1] and canonical(names[0]["name"]) != canonical(names[1]["name"]):
        return prediction, label
    label = _without_first_name(label)
    prediction = _without_first_name(prediction)
    if "=" not in label.text and not _NOT_ONE_EQUATION.search(prediction.text):
        prediction = replace(prediction, text=prediction.text.rpartition("=")[2].strip())
    return prediction, label


def _without_first_name(notation: Notation) -> Notation:
    match = _NAMES.match(notation.text)
    rest = notation.text[match.end() :] if match else ""
    return replace(notation, text=rest) if rest and "=" not in rest else notation
