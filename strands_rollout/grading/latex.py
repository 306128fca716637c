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
        **dict.fromkeys("−–—‒﹣－⁻", "-"),
        **dict.fromkeys("×⋅∙·✕", r"\cdot "),
        **{"÷": "/", "⁄": "/", "∕": "/", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "∪": r"\cup ", "°": "", "±": r"\pm "},
        **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}"},
        **{"¾": r"\frac{3}{4}", "，": ",", "（": "(", "）": ")", "€": "", "£": "", "¥": ""},
    }
)
_DELIMITERS: Final = re.compile(
    r"\\[()\[\]$]|\$|\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|boldsymbol)(?![A-Za-z])\.?"
)
_GROUP_SPACE: Final = re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\}|,\\!|~)+(?=\d{3}(?!\d))")
_SPACE: Final = re.compile(r"\\[,!;: ]|\\q?quad(?![A-Za-z])|~|\s+")
_DEGREES: Final = re.compile(r"\^?\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z])|\\degrees?(?![A-Za-z]))")
_TEXT_MACRO: Final = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname)\s*\{([^{}]*)\}")
_FRAC_NAME: Final = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SHORT_FRAC: Final = re.compile(r"\\frac\s*(\{[^{}]*\}|\d)\s*(\{[^{}]*\}|\d)")
_SHORT_SQRT: Final = re.compile(r"\\sqrt\s*([0-9A-Za-z])")
_SHORT_POWER: Final = re.compile(r"\^\s*\{\s*([0-9A-Za-z])\s*\}")
_SYNONYMS: Final = ((r"\leq", r"\le"), (r"\geq", r"\ge"), (r"\neq", r"\ne"), (r"\times", r"\cdot"), ("**", "^"), ("*", r"\cdot "))
_CLOSING: Final = " \t.,;:"

_METRIC: Final = ("mm", "cm", "km", "kg", "mg", "ml", "mL", "ft", "lb", "lbs", "mph", "kph", "sec", "min", "hr", "hrs", "deg", "rad")
_SYMBOLS: Final = frozenset((*_METRIC, "m", "g", "s", "h", "L", "in", "N", "J", "W", "V", "Hz"))
_NOT_UNITS: Final = frozenset(
    "hundred thousand million billion trillion dozen half third quarter quarters thirds halves over times plus minus and or "
    "squared cubed factorial root sqrt mod base percent".split()
)
_UNIT: Final = r"[A-Za-z]+(?:/[A-Za-z]+)?"
_TRAILING_UNITS: Final = re.compile(rf"(?P<rest>.*[\d)}}%])\s*(?P<unit>{_UNIT}(?: {_UNIT}){{0,3}}?)\s*(?:\^\s*\{{?[23]\}}?)?", re.DOTALL)


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
    text = tidy(answer)
    text = _DEGREES.sub("", text)
    text = _TEXT_MACRO.sub(r" \1 ", text)
    text = " ".join(text.split()).strip(_CLOSING)
    text, unit = _split_unit(text)
    bare = re.sub(r"\s*\\?%$", "", text)
    return Notation(bare.strip(_CLOSING), unit, percent=bare != text or unit == "percent")


def tidy(answer: str) -> str:
    r"""The answer as LaTeX without delimiters and spacing commands, in ASCII as far as it goes; words and units stay."""
    text = unicodedata.normalize("NFKC", answer.translate(_UNICODE)).translate(_UNICODE)
    text = _DELIMITERS.sub("", text)
    text = _GROUP_SPACE.sub("", text).replace("{,}", ",")
    text = _SPACE.sub(" ", text)
    text = _FRAC_NAME.sub(r"\\frac", text)
    text = _SHORT_FRAC.sub(_braced_fraction, text)
    text = _SHORT_SQRT.sub(r"\\sqrt{\1}", text)
    return text.strip(_CLOSING)


def canonical(text: str) -> str:
    """A key: two notations with one key are the same answer; case counts except in plain words."""
    for synonym, name in _SYNONYMS:
        text = text.replace(synonym, name)
    key = _SHORT_POWER.sub(r"^\1", text).replace(" ", "")
    while len(key) > 2 and key[0] == "(" and key[-1] == ")" and key[1:-1].isalnum():
        key = key[1:-1]
    return key.lower() if len(key) > 1 and key.isalpha() else key


def _braced_fraction(match: re.Match[str]) -> str:
    over, under = (part if part.startswith("{") else f"{{{part}}}" for part in match.groups())
    return rf"\frac{over}{under}"


def _split_unit(text: str) -> tuple[str, str]:
    """Take the words behind a number off, if they can be nothing but a unit ("5 cm", "12 apples"; not "5 million")."""
    match = _TRAILING_UNITS.fullmatch(text)
    if match is None:
        return text, ""
    words = match["unit"].split()
    if words == ["percent"]:
        return match["rest"], "percent"
    return (match["rest"], match["unit"]) if all(map(_is_unit, words)) else (text, "")


def _is_unit(word: str) -> bool:
    parts = word.split("/")
    return all(part in _SYMBOLS or (len(part) >= 4 and part.lower() not in _NOT_UNITS) for part in parts)
