r"""Turns one answer into a value that can be compared: a fraction, a group of values, or an opaque piece of notation.

Groups are what brackets and commas make: (1, 2) and [1, 2) are ordered, \{1, 2\} and a bare "1, 2" are sets.
Knows notation and numbers; must not know what is done with the values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, TypeAlias

from strands_rollout.grading.exact_numbers import exact_number
from strands_rollout.grading.latex import canonical

_DEEPEST_GROUP: Final = 3
_MOST_ITEMS: Final = 64
_OPENING: Final = ("(", "[", r"\{")
_CLOSING: Final = (")", "]", r"\}")
_PUNCTUATION: Final = re.compile(r"\\[{}]|[()\[\]{},]")
_NAMED: Final = re.compile(r"(?P<name>[A-Za-z](?:_\w|_\{\w+\})?)\s*=\s*(?P<value>[^=]+)")
_PLUS_MINUS: Final = re.compile(r"\\pm\s*(?P<value>[^,]+)")


@dataclass(frozen=True, slots=True)
class Group:
    """Several values.

    Attributes:
        brackets: The opening and the closing one; "" for a bare list.
        items: In the order written.
    """

    brackets: str
    items: tuple[Key, ...]

    @property
    def is_set(self) -> bool:
        """Whether the order means nothing."""
        return self.brackets in {"", r"\{\}"}


Key: TypeAlias = Fraction | str | Group
"""A number, notation in canonical form that only equality or algebra can judge, or several keys."""


def key_of(text: str, depth: int = 0) -> Key:
    """The key of an answer in `latex.Notation`'s form; linear in its length."""
    number = exact_number(text)
    if number is not None:
        return number
    either = _PLUS_MINUS.fullmatch(text.strip())
    value = exact_number(either["value"]) if either else None
    if value is not None:
        return Group("", (value, -value))
    brackets, items = _items_of(text)
    is_group = len(items) > 1 or brackets == r"\{\}"
    if not is_group or depth == _DEEPEST_GROUP or len(items) > _MOST_ITEMS:
        return canonical(text)
    keys = [part for item in _without_common_name(items) for part in _parts(key_of(item, depth + 1))]
    group = Group(brackets, tuple(keys))
    return keys[0] if len(keys) == 1 and group.is_set else group


def is_decided(key: Key) -> bool:
    """Whether the key holds numbers only, so that another such key is either equal or different."""
    return all(map(is_decided, key.items)) if isinstance(key, Group) else isinstance(key, Fraction)


def _parts(key: Key) -> tuple[Key, ...]:
    r"""What an item adds to its group: a bare list, as "\pm 3" makes, dissolves in it."""
    return key.items if isinstance(key, Group) and not key.brackets else (key,)


def _items_of(text: str) -> tuple[str, list[str]]:
    """The brackets around the whole text, "" for none, and what stands between its commas; or "" and the text."""
    text = text.strip()
    marks = list(_PUNCTUATION.finditer(text))
    depths = _depths(marks)
    if not marks or depths[-1] != 0:
        return "", [text]
    first, last = marks[0], marks[-1]
    is_wrapped = first.start() == 0 and last.end() == len(text) and 0 not in depths[:-1]
    if is_wrapped and first[0] in _OPENING and last[0] in _CLOSING:
        brackets, level, start, end = first[0] + last[0], 1, first.end(), last.start()
    else:
        brackets, level, start, end = "", 0, 0, len(text)
    items: list[str] = []
    for mark, depth in zip(marks, depths, strict=True):
        if mark[0] == "," and depth == level:
            items.append(text[start : mark.start()].strip())
            start = mark.end()
    items.append(text[start:end].strip())
    return (brackets, items) if all(items) else ("", [text])


def _depths(marks: list[re.Match[str]]) -> list[int]:
    """How deep in brackets of any kind the text is after each mark."""
    depths: list[int] = []
    depth = 0
    for mark in marks:
        depth += (mark[0] in (*_OPENING, "{")) - (mark[0] in (*_CLOSING, "}"))
        depths.append(depth)
    return depths


def _without_common_name(items: list[str]) -> list[str]:
    """The values where all items name the same: x = 1 and x = 2 are 1 and 2, but x = 1 and y = 2 stay as they are."""
    named = [_NAMED.fullmatch(item) for item in items]
    names = {match["name"] if match else None for match in named}
    if len(names) != 1 or None in names:
        return items
    return [match["value"].strip() for match in named if match]
