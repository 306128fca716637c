"""One JSON value at a place in a text, exactly as RFC 8259 and nothing looser.

Knows nothing of tools. Stricter than Python's `json` where that would hand on what no receiver can use: NaN, Infinity,
numbers that overflow, duplicate keys, lone surrogates, nesting beyond 100 levels.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, Final

MAX_DEPTH: Final = 100
_WHITE_SPACE: Final = re.compile(r"[ \t\n\r]*")


class StrictJSONError(ValueError):
    """The text at this place is not such a value; the message says what was expected."""


class JSONSource(str):
    """A text to decode many objects from.

    `json` counts the lines up to each error, which makes many errors in one text quadratic; here a text has one line.
    """

    __slots__ = ()

    def count(self, *_: object) -> int:
        """No lines."""
        return 0

    def rfind(self, *_: object) -> int:
        """No line break."""
        return -1

    rindex = rfind


def skip_white_space(text: str, start: int) -> int:
    """The first position from `start` on that is not JSON white space."""
    match = _WHITE_SPACE.match(text, start)
    return match.end() if match else start


def decode_object(text: JSONSource, start: int, *, origin: int) -> tuple[dict[str, Any], int]:
    """Decode the object that begins at `start`; return it and the position after it.

    Args:
        text: May go on after the object.
        start: Where its `{` is expected.
        origin: Positions in messages count from here.

    Raises:
        StrictJSONError: There is no such object.
    """
    if text[start : start + 1] != "{":
        got = repr(text[start : start + 20]) if start < len(text) else "the end of the text"
        raise StrictJSONError(f"expected a JSON object, which begins with '{{', at offset {start - origin}; got {got}")
    return decode_value(text, start, origin=origin)


def whole_value(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """The value that is all of a text, but for white space around it.

    Raises:
        StrictJSONError: It is not one.
    """
    value, end = decode_value(JSONSource(text), skip_white_space(text, 0), origin=0)
    if skip_white_space(text, end) < len(text):
        raise StrictJSONError(f"expected nothing after the value, at offset {end}; got {text[end : end + 20]!r}")
    return value


def decode_value(text: JSONSource, start: int, *, origin: int) -> tuple[Any, int]:
    """Decode the value that begins at `start`; see `decode_object`."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as e:
        raise StrictJSONError(f"not valid JSON at offset {e.pos - origin}: {e.msg}") from e
    except RecursionError as e:
        raise StrictJSONError(_TOO_DEEP) from e
    except StrictJSONError:
        raise
    except ValueError as e:  # Python's limit on the digits of an int
        raise StrictJSONError(f"a number can't be read: {e}") from e
    _check_depth(value)
    _check_surrogates(value, text, start, end)
    return value, end


_TOO_DEEP: Final = f"nested deeper than the {MAX_DEPTH} levels that are allowed"


def _check_depth(value: object) -> None:
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise StrictJSONError(_TOO_DEEP)


def _check_surrogates(value: object, text: str, start: int, end: int) -> None:
    if text.find("\\ud", start, end) < 0 and text.find("\\uD", start, end) < 0:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise StrictJSONError("a string has half of a surrogate pair (\\ud800-\\udfff), which is no character") from e


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise StrictJSONError(f"the key {twice!r} stands twice in one object")
    return value


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise StrictJSONError(f"the number {number[:40]} is too large for a float")
    return value


def _refuse_constant(name: str) -> None:
    raise StrictJSONError(f"{name} is not JSON; numbers are finite")


_DECODER: Final = json.JSONDecoder(
    strict=True, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant
)
