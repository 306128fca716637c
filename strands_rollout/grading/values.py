r"""Read the text of a `Notation` as a value: a number, a formula, a group, a matrix, a relation or a combination.

Numbers are exact fractions: 1,234 and \frac{3}{4} and 1 1/2 and 2.5\cdot 10^{3} and 0.\overline{3}. Exponents are
bounded, to keep the time for any text short. (1, 2) and [1, 2) are ordered; \{1, 2\} and a bare "1, 2" are unordered;
a < x \le b is a relation; "x < 1 or x > 3" and unions are combinations. Words, dates and times of day have functions of
their own. `comparison.py` decides which values are equal.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, TypeAlias

from strands_rollout.grading.expression import Expression, NotAnExpressionError, canonical_key, parse

_ONES: Final = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen",
)
_TENS: Final = re.findall(r"\w+", "twenty thirty forty fifty sixty seventy eighty ninety")
_SMALL_NUMBERS: Final = {word: number for number, word in enumerate(_ONES)} | {
    word: 20 + 10 * number for number, word in enumerate(_TENS)
}
_SCALES: Final = {"thousand": 1000, "million": 10**6, "billion": 10**9}
_MONTHS: Final = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_MONTH: Final = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_DAY: Final = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR: Final = r"(?:,?\s+(?P<year>\d{4}))?"
_DATES: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (rf"{_MONTH}\s+{_DAY}{_YEAR}", rf"(?:the\s+)?{_DAY}\s+(?:of\s+)?{_MONTH}{_YEAR}")
)
_CLOCK: Final = re.compile(r"0?(?P<hour>\d{1,2}):(?P<minute>\d\d)(?:\s*(?P<half>[ap])\.?m\.?)?", re.IGNORECASE)
_WORDS: Final = re.compile(r"[^\W\d_]+(?:[ '.-]+[^\W\d_]+)*[.!]?")
_ARTICLE: Final = re.compile(r"^(?:the|an?) (?=\w{2})")
_IN_WORDS: Final = re.compile(r"(?P<number>.+?)\s*\(\s*(?P<words>[A-Za-z -]{3,})\s*\)")


def words_key(text: str) -> Hashable | None:
    """Return a key for a date, a number in words, or other words; None for any other text.

    Equal answers have equal keys. A single letter is not a word.
    """
    for pattern in _DATES:
        if date := pattern.fullmatch(text):
            return "date", _MONTHS.index(date["month"][:3].lower()), int(date["day"]), date["year"]
    if not _WORDS.fullmatch(text) or len(text) == 1:
        return None
    number = number_in_words(text)
    if number is not None:
        return number
    return _ARTICLE.sub("", " ".join(re.findall(r"\w+", text.lower())))


def are_same_time(first: str, second: str) -> bool | None:
    """Return whether two texts may mean the same time of day; None unless both are times.

    Without a.m. or p.m., 3:30 may mean either.
    """
    clocks = _CLOCK.fullmatch(first), _CLOCK.fullmatch(second)
    if clocks[0] is None or clocks[1] is None:
        return None
    return not _minutes(clocks[0]).isdisjoint(_minutes(clocks[1]))


def number_in_words(text: str) -> Fraction | None:
    """Return the value of a number in words, such as "forty-two"; None for other words."""
    words = [word for word in re.split(r"[\s-]+", text.lower()) if word != "and"]
    total = part = 0  # `part` is the value of the words since the last scale, such as "thousand"
    for position, word in enumerate(words):
        if word in _SMALL_NUMBERS:
            follows_tens = part % 100 >= 20 and part % 10 == 0 < _SMALL_NUMBERS[word] < 10
            if position and words[position - 1] in _SMALL_NUMBERS and not follows_tens:
                return None
            part += _SMALL_NUMBERS[word]
        elif word == "hundred" and 0 < part < 10:
            part *= 100
        elif word in _SCALES and part:
            total, part = total + part * _SCALES[word], 0
        else:
            return None
    return Fraction(total + part) if words else None


def split_repetition_in_words(text: str) -> tuple[str, Fraction | None]:
    """Split off a number in words in parentheses: ("5", 5) for "5 (five)"; else the unchanged text and None."""
    match = _IN_WORDS.fullmatch(text)
    number = number_in_words(match["words"].strip()) if match else None
    return (match["number"], number) if match and number is not None else (text, None)


def _minutes(clock: re.Match[str]) -> set[int]:
    """Return the minutes since midnight; for an hour up to 12 without a.m. or p.m., both possible values."""
    hour, minute, half = int(clock["hour"]), int(clock["minute"]), clock["half"]
    if half is None:
        return {hour * 60 + minute, (hour + 12) % 24 * 60 + minute} if hour <= 12 else {hour * 60 + minute}
    return {(hour % 12 + 12 * (half in "pP")) * 60 + minute}


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
_REPEATING: Final = re.compile(
    r"(?P<sign>[+-]?)\s*(?P<whole>\d*)\.(?P<once>\d*)"
    r"(?:\\(?:overline|bar|overbar)\s*\{\s*(?P<lined>\d+)\s*\}|\\(?:dot|bar|overline)\s*\{?\s*(?P<dotted>\d)\s*\}?|\((?P<braced>\d+)\))"
)
_BASED: Final = re.compile(r"\(?(?P<numeral>[0-9A-Fa-f]+)\)?\s*_\s*\{?\s*(?P<base>\d+|[a-z]+)\s*\}?")


def exact_number(text: str) -> Fraction | None:
    """Return the value of a text that is exactly one number; None for any other text, and for a division by zero."""
    text = text.strip()
    while len(text) > 2 and text[0] + text[-1] in ("()", "{}") and not set("(){}") & set(text[1:-1]):
        text = text[1:-1].strip()
    if match := _DECIMAL.fullmatch(text):
        return _power_of_ten(_decimal_value(match["number"]), match["exponent"])
    if match := _SCIENTIFIC.fullmatch(text):
        factor = _decimal_value(match["number"] or f"{match['sign'] or ''}1")
        return _power_of_ten(factor, match["braced"] or match["digit"])
    if match := _FRACTION.fullmatch(text):
        over, under = _decimal_value(match["over"] or match["left"]), _decimal_value(match["under"] or match["right"])
        whole = match["whole"] or match["spaced"]
        if under == 0 or (whole and (over < 0 or under < 0)):
            return None
        value = int(whole or 0) + over / under
    elif match := _REPEATING.fullmatch(text):
        period = match["lined"] or match["dotted"] or match["braced"]
        value = Fraction(f"{match['whole'] or 0}.{match['once'] or 0}")
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(match["once"]))
    else:
        return None
    return -value if match["sign"] == "-" else value


def numeral_in_base(text: str) -> tuple[str, int] | None:
    """Return the digits and base of `101_2`, `101_{2}` or `101_{two}`; None for any other text."""
    match = _BASED.fullmatch(text.strip())
    if match is None:
        return None
    number = Fraction(match["base"]) if match["base"].isdigit() else number_in_words(match["base"])
    if number is None or not 2 <= number <= 36 or not any(map(str.isdigit, match["numeral"])):
        return None
    return match["numeral"].lower(), int(number)


def _decimal_value(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").removesuffix("."))


def _power_of_ten(factor: Fraction, exponent: str | None) -> Fraction:
    return factor * Fraction(10) ** int(exponent or 0)


_MAX_GROUP_DEPTH: Final = 3
_MAX_ITEMS: Final = 64
_OPENING: Final = ("(", "[", r"\{")
_CLOSING: Final = (")", "]", r"\}")
_BRACKET: Final = re.compile(r"\\[{}]|[()\[\]{}]")
_COMMA: Final = re.compile(r"[,;]")
_CONJUNCTION: Final = re.compile(r",?\s+(?:or|and)\s+|;")
_OR: Final = re.compile(r",?\s+or\s+|\\cup(?![A-Za-z])")
_WITHOUT: Final = re.compile(r"\\setminus(?![A-Za-z])|(?<=\\mathbb\{R\})\s*-(?=\s*\\\{)")
_AND: Final = re.compile(r",?\s+and\s+")
_SIGN: Final = re.compile(r"<|>|=|\\(?:le|ge|ne)(?![A-Za-z])")
_INEQUALITY: Final = re.compile(r"<|>|\\(?:le|ge|ne)(?![A-Za-z])")
_NAMED: Final = re.compile(r"(?P<name>\\?[A-Za-z]+(?:_\w|_\{\w+\})?)\s*=\s*(?P<value>[^=]+)")
_BOTH_SIGNS: Final = re.compile(r"\\([pm])[mp](?![A-Za-z])")
_SET_BUILDER: Final = re.compile(
    r"\\\{\s*(?P<name>[A-Za-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?[|:]\s*(?P<condition>.+)\\\}"
)
_MATRIX: Final = re.compile(r"[\[(]?\s*\\begin\{(?P<kind>[pbB]?matrix)\}(?P<body>.*)\\end\{(?P=kind)\}\s*[\])]?")


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula as canonical text; `node` is its tree, or None if the text was not parsed."""

    text: str
    node: Expression | None = field(compare=False, default=None)


@dataclass(frozen=True, slots=True)
class ValueGroup:
    """The values of a list, tuple, interval or set; `brackets` has the opening and closing bracket, "" for a list."""

    brackets: str
    items: tuple[Key, ...]

    @property
    def is_set(self) -> bool:
        """True if the order of the values does not matter."""
        return self.brackets in {"", r"\{\}"}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix as its rows."""

    rows: tuple[tuple[Key, ...], ...]


@dataclass(frozen=True, slots=True)
class Relation:
    r"""Values with a sign between neighbors: "<", ">", "=", "\le", "\ge" or "\ne"."""

    parts: tuple[Key, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Combination:
    """Conditions or sets joined by `kind`.

    Attributes:
        kind: "or" (at least one), "and" (all) or "without" (the first but not the second).
    """

    kind: str
    parts: tuple[Key, ...]


Key: TypeAlias = Fraction | Formula | ValueGroup | Matrix | Relation | Combination
"""The value of an answer."""


def key_of(text: str, depth: int = 0) -> Key:
    """Read the text of a `Notation` as a value."""
    text = text.strip()
    number = exact_number(text)
    if number is not None:
        return number
    if depth > _MAX_GROUP_DEPTH:
        return Formula(canonical_key(text))
    return (
        _read_alternatives(text, depth)
        or _read_matrix(text, depth)
        or _read_relation(text, depth)
        or _read_group(text, depth)
    )


def named_values(group: ValueGroup) -> ValueGroup | None:
    """Return the values of "x = 1, y = 2" in the order of their names; None unless each item has a name of its own.

    The values of numbered names (x_1, x_2) are unordered, since the numbering is arbitrary.
    """
    named = {}
    for item in group.items:
        if not isinstance(item, Relation) or item.signs != ("=",) or not isinstance(item.parts[0], Formula):
            return None
        named[item.parts[0].text] = item.parts[1]
    if len(named) != len(group.items) or not all(re.fullmatch(r"\\?[A-Za-z]+(_\w+)?", name) for name in named):
        return None
    is_numbered = len({name.partition("_")[0] for name in named}) == 1
    return ValueGroup("" if is_numbered else "()", tuple(named[name] for name in sorted(named)))


def split_at(text: str, sign: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Split a text at the signs outside brackets; return the parts and the signs."""
    parts: list[str] = []
    signs: list[str] = []
    depth = start = position = 0
    while position < len(text):
        bracket = _BRACKET.match(text, position)
        found = None if bracket or depth else sign.match(text, position)
        if bracket:
            depth += 1 if bracket[0] in (*_OPENING, "{") else -1
        elif found:
            parts.append(text[start:position].strip())
            signs.append(found[0].strip())
            start = found.end()
        position = (bracket or found).end() if bracket or found else position + 1  # type: ignore[union-attr]
    return [*parts, text[start:].strip()], signs


def _read_alternatives(text: str, depth: int) -> Key | None:
    r"""Read conditions joined by "or" or "and", unions, "\setminus", "\pm", and sets given by a condition.

    Return None for any other text.
    """
    builder = _SET_BUILDER.fullmatch(text)
    if builder:
        return key_of(builder["condition"].strip().removesuffix("\\"), depth + 1)
    if (r"\pm" in text or r"\mp" in text) and not split_at(_replace_conjunctions(text), _COMMA)[1]:
        plus = _BOTH_SIGNS.sub(lambda sign: "+" if sign[1] == "p" else "-", text)
        minus = _BOTH_SIGNS.sub(lambda sign: "-" if sign[1] == "p" else "+", text)
        keys = key_of(plus, depth + 1), key_of(minus, depth + 1)
        return ValueGroup("", tuple(value for key in keys for value in _flatten_bare_list(key)))
    parts, signs = split_at(text, _WITHOUT)
    if signs:
        # without parentheses, "a \setminus b \cup c" is ambiguous
        is_unambiguous = len(parts) == 2 and all(parts) and not split_at(text, _OR)[1]
        return Combination("without", tuple(key_of(part, depth + 1) for part in parts)) if is_unambiguous else None
    is_region = bool(_INEQUALITY.search(text)) or r"\cup" in text
    for kind, sign in (("or", _OR), ("and", _AND)):
        parts, signs = split_at(text, sign)
        if is_region and signs and all(parts):
            return Combination(kind, tuple(key_of(part, depth + 1) for part in parts))
    return None


def _read_matrix(text: str, depth: int) -> Matrix | None:
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    rows = [row for row in match["body"].split(r"\\") if row.strip()]
    return Matrix(tuple(tuple(key_of(cell, depth + 1) for cell in row.split("&")) for row in rows))


def _read_relation(text: str, depth: int) -> Relation | None:
    if split_at(_replace_conjunctions(text), _COMMA)[1]:
        return None
    parts, signs = split_at(text, _SIGN)
    if not signs or not all(parts):
        return None
    return Relation(tuple(key_of(part, depth + 1) for part in parts), tuple(signs))


def _read_group(text: str, depth: int) -> Key:
    brackets, items = _split_items(_replace_conjunctions(text))
    is_group = len(items) > 1 or brackets == r"\{\}"
    if not is_group or len(items) > _MAX_ITEMS:
        with contextlib.suppress(NotAnExpressionError):
            return Formula(canonical_key(text), parse(text))
        return Formula(canonical_key(text))
    keys = [value for item in _drop_common_name(items) for value in _flatten_bare_list(key_of(item, depth + 1))]
    group = ValueGroup(brackets, tuple(keys))
    is_single = len(keys) == 1 and group.is_set and not isinstance(keys[0], ValueGroup)
    return keys[0] if is_single and keys[0] != Formula(r"\emptyset") else group


def _replace_conjunctions(text: str) -> str:
    """Replace the "or", "and" and ";" between values by commas; a text without digits stays unchanged."""
    return _CONJUNCTION.sub(",", text) if any(character.isdigit() for character in text) else text


def _flatten_bare_list(key: Key) -> tuple[Key, ...]:
    r"""Return what a key adds to the group around it: the values of a bare list, such as "\pm 3", else the key."""
    return key.items if isinstance(key, ValueGroup) and not key.brackets else (key,)


def _split_items(text: str) -> tuple[str, list[str]]:
    """Return the brackets around the whole text ("" if there are none) and the items between commas or semicolons.

    A text with unbalanced brackets or an empty item is a single item without brackets.
    """
    marks = list(_BRACKET.finditer(text))
    depths: list[int] = []
    for mark in marks:
        depths.append((depths[-1] if depths else 0) + (1 if mark[0] in (*_OPENING, "{") else -1))
    if depths and depths[-1] != 0:
        return "", [text]
    is_wrapped = marks and marks[0].start() == 0 and marks[-1].end() == len(text) and 0 not in depths[:-1]
    brackets = ""
    if is_wrapped and marks[0][0] in _OPENING and marks[-1][0] in _CLOSING:
        brackets = marks[0][0] + marks[-1][0]
        text = text[marks[0].end() : marks[-1].start()]
    items = split_at(text, _COMMA)[0]
    return (brackets, items) if all(items) else ("", [text])


def _drop_common_name(items: list[str]) -> list[str]:
    """Drop a name that all items share: "x = 1" and "x = 2" become 1 and 2. Otherwise, change nothing."""
    named = [_NAMED.fullmatch(item) for item in items]
    names = {match["name"] if match else None for match in named}
    if len(names) != 1 or None in names:
        return items
    return [match["value"].strip() for match in named if match]
