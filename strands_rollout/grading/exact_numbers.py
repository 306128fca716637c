r"""Reads a number as answers write it, exactly: 1,234 and -.5 and \frac{3}{4} and 1 1/2 and 2.5\cdot 10^{3} and 1e-4.

Knows `latex.py`'s common form. Exact fractions, no floats; exponents are bounded, so that no text costs much.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

_GROUPED: Final = r"\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+"
_PLAIN: Final = rf"(?:(?:{_GROUPED}|\d+)(?:\.\d*)?|\.\d+)"
_SIGNED: Final = rf"[+-]?\s*{_PLAIN}"
_TEN_TO: Final = r"10\s*\^\s*(?:\{\s*(?P<braced>[+-]?\d{1,3})\s*\}|(?P<digit>[+-]?\d{1,3}))"

_DECIMAL: Final = re.compile(rf"(?P<number>{_SIGNED})(?:[eE](?P<exponent>[+-]?\d{{1,3}}))?")
_SCIENTIFIC: Final = re.compile(rf"(?:(?P<number>{_SIGNED})\s*(?:\\times|\\cdot|\*|x)\s*|(?P<sign>[+-])?\s*){_TEN_TO}")
_FRACTION: Final = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<whole>\d+)\s*(?=\\frac)|(?P<spaced>\d+)\s+(?=\d+\s*/))?"
    rf"(?:\\frac\s*\{{\s*(?P<over>{_SIGNED})\s*\}}\s*\{{\s*(?P<under>{_SIGNED})\s*\}}"
    rf"|(?P<left>{_PLAIN})\s*/\s*(?P<right>{_PLAIN}))"
)


def exact_number(text: str) -> Fraction | None:
    """The value of a text that is one number and nothing else; None for any other text, and for a division by zero."""
    text = _unwrapped(text.strip())
    if match := _DECIMAL.fullmatch(text):
        return _power_of_ten(_plain(match["number"]), match["exponent"])
    if match := _SCIENTIFIC.fullmatch(text):
        factor = _plain(match["number"] or f"{match['sign'] or ''}1")
        return _power_of_ten(factor, match["braced"] or match["digit"])
    if match := _FRACTION.fullmatch(text):
        return _fraction(match)
    return None


def _unwrapped(text: str) -> str:
    """Without brackets around the whole number."""
    while len(text) > 2 and text[0] + text[-1] in ("()", "{}") and not set("(){}") & set(text[1:-1]):
        text = text[1:-1].strip()
    return text


def _plain(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").removesuffix("."))


def _power_of_ten(factor: Fraction, exponent: str | None) -> Fraction:
    return factor * Fraction(10) ** int(exponent or 0)


def _fraction(match: re.Match[str]) -> Fraction | None:
    over, under = _plain(match["over"] or match["left"]), _plain(match["under"] or match["right"])
    whole = match["whole"] or match["spaced"]
    if under == 0 or (whole and (over < 0 or under < 0)):
        return None
    value = int(whole or 0) + over / under
    return -value if match["sign"] == "-" else value
