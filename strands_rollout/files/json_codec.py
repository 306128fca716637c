"""Encode and decode JSON, with integers of up to 4,300 digits and lone surrogates."""

from __future__ import annotations

import dataclasses
import json
import math
from contextlib import suppress
from typing import Any, Final, TypeAlias

Json: TypeAlias = Any
"""Any value of JSON: None, a bool, int, float or str, a list of values, or a dict from str to values."""

_AS_ZEROS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_INTEGER: Final = b"0" * 19  # shorter numbers have no more than 64 bits


def encode_json(value: Json) -> bytes:
    """Return the JSON text of a value or dataclass; integers may exceed 64 bits, strings may have lone surrogates.

    NaN and infinite numbers are written as null.

    Raises:
        TypeError, ValueError: JSON can't express the value, or the value is nested too deeply or has an integer of more
            than 4,300 digits.
    """
    import orjson  # imported on use: the local executor imports this module, and must not need third-party libraries

    try:
        return orjson.dumps(value)
    except TypeError:  # orjson refuses integers above 64 bits and lone surrogates
        try:
            text = json.dumps(value, separators=(",", ":"), default=dataclasses.asdict)
            if "NaN" in text or "Infinity" in text:  # perhaps only in a string
                text = json.dumps(json.loads(text, parse_constant=lambda _: None), separators=(",", ":"))
            return text.encode()
        except RecursionError as e:
            raise ValueError("values are nested too deeply") from e


def decode_json(text: bytes | str, *, is_finite: bool = True) -> Json:
    """Return the value of a JSON text; integers may exceed 64 bits, strings may have lone surrogates.

    Args:
        text: The JSON text; bytes are UTF-8.
        is_finite: True to refuse NaN and Infinity, which Python's `json` writes, and numbers too large for a float.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or has an integer of more than 4,300 digits or a number
            that `is_finite` refuses.
    """
    import orjson  # imported on use: the local executor imports this module, and must not need third-party libraries

    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if _LONG_INTEGER not in raw.translate(_AS_ZEROS):  # orjson would convert long integers to floats
        with suppress(orjson.JSONDecodeError):
            return orjson.loads(raw)
    try:
        return (_FINITE if is_finite else _DECODER).decode(str(text, "utf-8") if isinstance(text, bytes) else text)
    except RecursionError as e:
        raise ValueError("values are nested too deeply") from e


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"the number {number:.40} is not finite")
    return value


_DECODER: Final = json.JSONDecoder()
_FINITE: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
