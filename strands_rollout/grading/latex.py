r"""Brings an answer's notation to one form: delimiters, spacing, fractions, units, Unicode. Text in, text out.

Knows how people write answers in LaTeX and in plain text; must not know what is equal to what.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Final

_UNICODE: Final = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\u2014\u2012\ufe63\uff0d\u207b", "-"),  # minus signs and dashes
        **dict.fromkeys("\u00d7\u22c5\u2219\u00b7\u2715", r"\cdot "),
        **dict.fromkeys("\u00f7\u2044\u2215", "/"),
        **dict.fromkeys("°€£¥", ""),
        "\u222a": r"\cup ",
        "\u221e": r"\infty ",
        "π": r"\pi ",
        "√": r"\sqrt ",
        "±": r"\pm ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "²": "^2",
        "³": "^3",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
    }
)
_UNICODE_ROOT: Final = re.compile(r"√\s*(\d+)")
_DELIMITERS: Final = re.compile(
    r"(?<!\\)\\[()\[\]$]|\$|\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|boldsymbol)(?![A-Za-z])\.?"
)
_GROUP_SPACE: Final = re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\}|,\\!|~)+(?=\d{3}(?!\d))")
_SPACE: Final = re.compile(r"(?<!\\)\\[,!;: ]|\\q?quad(?![A-Za-z])|~|\s+")
_DEGREES: Final = re.compile(r"\^?\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z])|\\degrees?(?![A-Za-z]))")
_TEXT_NAME: Final = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname)\s*"
_TEXT_MACRO: Final = re.compile(_TEXT_NAME + r"\{([^{}]*)\}")
_FRAC_NAME: Final = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SHORT_FRAC: Final = re.compile(r"\\frac\s*(\{[^{}]*\}|\d)\s*(\{[^{}]*\}|\d)")
_SHORT_SQRT: Final = re.compile(r"\\sqrt\s*([0-9A-Za-z])")
_CALLED_SQRT: Final = re.compile(r"\\?\bsqrt\s*\(([^()]*)\)")
_SHORT_SCRIPT: Final = re.compile(r"([\^_])\s*\{\s*([0-9A-Za-z])\s*\}")
_SYNONYMS: Final = (
    *((r"\leq", r"\le"), (r"\geq", r"\ge"), (r"\neq", r"\ne")),
    *((r"\times", r"\cdot"), ("**", "^"), ("*", r"\cdot ")),
)
_CLOSING: Final = " \t.,;:"

_UNIT_POWER: Final = r"\s*(?:\^\s*\{?[23]\}?)?"
_WORD: Final = r"[A-Za-z]+(?:/[A-Za-z]+)?"
_BARE_UNIT: Final = re.compile(
    rf"(?P<rest>.*[\d)}}%])(?P<space>\s*)(?P<unit>{_WORD}(?: {_WORD}){{0,3}}){_UNIT_POWER}", re.DOTALL
)
_TEXT_UNIT: Final = re.compile(
    rf"(?P<rest>.*[\d)}}%])\s*{_TEXT_NAME}\{{\s*(?P<unit>[A-Za-z/][A-Za-z/. ]*?)\s*\}}{_UNIT_POWER}", re.DOTALL
)
_LETTER_UNITS: Final = frozenset({"m", "g", "s", "h", "l"})  # after a space only: 5m is an expression
_SHORT_UNITS: Final = frozenset(
    {"mm", "cm", "km", "kg", "mg", "ml", "ft", "lb", "lbs", "oz", "in", "mph", "kph", "sec", "min", "hr", "hrs", "deg"}
    | {"rad", "per", "th", "st", "nd", "rd", "cm/s", "km/h", "m/s"}
)
_NOT_UNITS: Final = frozenset(
    {"hundred", "thousand", "million", "billion", "trillion", "dozen", "half", "halves", "third", "thirds", "quarter"}
    | {"quarters", "over", "times", "plus", "minus", "and", "or", "to", "squared", "cubed", "factorial", "root", "sqrt"}
    | {"mod", "base", "pi", "i", "e", "x", "y", "n"}
)


@dataclass(frozen=True, slots=True)
class Notation:
    """One answer in the common form.

    Attributes:
        text: Without delimiters, units, percent sign and final punctuation; single spaces between words.
        unit: The unit that stood behind a number, as written; "" for none.
        percent: A percent sign stood behind it.
    """

    text: str
    unit: str = ""
    percent: bool = False


def notation_of(answer: str) -> Notation:
    """The answer in the common form. Meant for short texts: the caller bounds the length."""
    text, unit = _split_unit(_DEGREES.sub("", tidy(answer)).rstrip(_CLOSING).lstrip())
    text = " ".join(_TEXT_MACRO.sub(r" \1 ", text).split()).rstrip(_CLOSING).lstrip()
    bare = text.removesuffix("%").removesuffix("\\")
    return Notation(bare.rstrip(_CLOSING).lstrip(), unit, percent=bare != text or unit == "percent")


def tidy(answer: str) -> str:
    r"""The answer as LaTeX without delimiters and spacing commands, mostly in ASCII; words and units stay."""
    text = _UNICODE_ROOT.sub(r"\\sqrt{\1}", answer).translate(_UNICODE)
    text = unicodedata.normalize("NFKC", text).translate(_UNICODE)
    text = _DELIMITERS.sub("", text)
    text = _GROUP_SPACE.sub("", text).replace("{,}", ",")
    text = _SPACE.sub(" ", text)
    text = _FRAC_NAME.sub(r"\\frac", text)
    text = _SHORT_FRAC.sub(_braced_fraction, text)
    text = _CALLED_SQRT.sub(r"\\sqrt{\1}", text)
    text = _SHORT_SQRT.sub(r"\\sqrt{\1}", text)
    return text.rstrip(_CLOSING).lstrip()


def canonical(text: str) -> str:
    """A key: two notations with one key are the same answer; case counts except in plain words."""
    for synonym, name in _SYNONYMS:
        text = text.replace(synonym, name)
    key = _SHORT_SCRIPT.sub(r"\1\2", text).replace(" ", "")
    while len(key) > 2 and key[0] == "(" and key[-1] == ")" and key[1:-1].isalnum():
        key = key[1:-1]
    return key.lower() if len(key) > 1 and key.isalpha() else key


def _braced_fraction(match: re.Match[str]) -> str:
    over, under = (part if part.startswith("{") else f"{{{part}}}" for part in match.groups())
    return rf"\frac{over}{under}"


def _split_unit(text: str) -> tuple[str, str]:
    r"""Take a unit off a number: any word in `\text{}` ("5\text{ m}"), outside it a known or long one ("12 apples")."""
    in_text = _TEXT_UNIT.fullmatch(text)
    match = in_text or _BARE_UNIT.fullmatch(text)
    if match is None:
        return text, ""
    words = match["unit"].lower().split()
    is_unit = not any(word in _NOT_UNITS for word in words)
    if in_text is None:
        known = _SHORT_UNITS | _LETTER_UNITS if match["space"] else _SHORT_UNITS
        is_unit = is_unit and all(word in known or len(word) >= 4 for word in words)
    return (match["rest"].strip(), match["unit"]) if is_unit else (text, "")
