"""Plain values <-> JSON without a loss, where JSON has no form of its own for them.

An object with one key that begins with `$` stands for: `$tuple` (its items), `$bytes` (base64), `$float` ("nan", "inf",
"-inf"), `$int` (decimal digits of one beyond 64 bits), `$text` (base64 of UTF-8 with lone surrogates), `$array` (dtype,
shape, base64 of the items in C order; also of tensors, and with no shape a NumPy number), `$image` (base64 of a PNG, of
a PIL image) and `$map` (pairs of key and value, for keys that are no text, or a mapping that looks like one of these).
"""

import base64
import binascii
import io
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from strands_rollout.errors import DumpError
from strands_rollout.files import Json

_INT64_MIN: Final = -(2**63)
_UINT64_MAX: Final = 2**64 - 1
_ARRAY_KINDS: Final = "biufc"
_MAX_DTYPE_CHARS: Final = 16
_MAX_EMPTY_ROWS: Final = 1 << 20
_PNG_MODES: Final = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_BARE: Final = frozenset({int, float, str, bool, type(None)})


def to_json(value: object, where: str) -> Json:
    """A value of JSON that `from_json` makes the same value of; a tensor comes back as a NumPy array.

    Only plain values, NumPy's, tensors and PIL images have a form: of anything else, and of what holds itself, the
    DumpError says that it is `where`.
    """
    try:
        return _encoded(value)
    except _FormlessError as e:
        raise DumpError(
            f"{where} holds {e}; expected plain values (numbers, text, lists, mappings, arrays): convert it first"
        ) from None
    except RecursionError as e:
        raise DumpError(f"{where} holds itself, or is nested too deeply; expected plain values") from e


def from_json(value: Json) -> Json:
    """The value that `to_json` made this of; ValueError where it is damaged."""
    if isinstance(value, list):
        # lists of numbers are nearly all of a dump
        return value if set(map(type, value)) <= _BARE else [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (key := next(iter(value))).startswith("$"):
        return {key: from_json(item) for key, item in value.items()}
    decode = _DECODERS.get(key)
    if decode is None:
        raise ValueError(f"got the key {key!r:.40}; expected one of {', '.join(_DECODERS)}")
    try:
        return decode(value[key])
    except (TypeError, ValueError, LookupError, binascii.Error) as e:
        raise ValueError(f"got a damaged {key}: {e}") from e


class _FormlessError(Exception):
    """A value of this type has no form in JSON."""


def _encoded(value: Json) -> Json:
    encode = _ENCODERS.get(type(value))
    if encode is not None:
        return encode(value)
    if isinstance(value, Mapping):
        return _mapping(value)
    if all(hasattr(value, name) for name in ("detach", "cpu", "numpy")):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _ARRAY_KINDS:
        little = np.asarray(value, dtype=value.dtype.newbyteorder("<"))
        return {"$array": [little.dtype.str, list(value.shape), _base64(little.tobytes())]}
    if getattr(value, "mode", None) in _PNG_MODES and type(value).__module__.startswith("PIL."):
        png = io.BytesIO()
        value.save(png, format="PNG")
        return {"$image": _base64(png.getvalue())}
    raise _FormlessError(f"{type(value).__module__}.{type(value).__qualname__}")


def _list(values: list[Any]) -> list[Any]:
    kinds = set(map(type, values))
    if kinds == {int} and min(values) >= _INT64_MIN and max(values) <= _UINT64_MAX:
        return values
    if kinds == {float} and all(map(math.isfinite, values)):
        return values
    return [_encoded(value) for value in values]


def _mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    looks_tagged = len(value) == 1 and str(next(iter(value))).startswith("$")
    if looks_tagged or not all(type(key) is str and _is_text(key) for key in value):
        return {"$map": [[_encoded(key), _encoded(item)] for key, item in value.items()]}
    return {key: _encoded(item) for key, item in value.items()}


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _bytes_of(held: Json) -> bytes:
    return base64.b64decode(held, validate=True)


_ENCODERS: Final[Mapping[type, Callable[[Any], Any]]] = {
    bool: lambda value: value,
    type(None): lambda value: value,
    int: lambda value: value if _INT64_MIN <= value <= _UINT64_MAX else {"$int": str(value)},
    float: lambda value: value if math.isfinite(value) else {"$float": str(value)},
    str: lambda value: value if _is_text(value) else {"$text": _base64(value.encode("utf-8", "surrogatepass"))},
    list: _list,
    tuple: lambda value: {"$tuple": _list(list(value))},
    dict: _mapping,
    bytes: lambda value: {"$bytes": _base64(value)},
}


def _array_of(held: Json) -> np.ndarray[Any, Any]:
    name, shape, data = held
    dtype = np.dtype(name) if isinstance(name, str) and len(name) <= _MAX_DTYPE_CHARS else None
    if dtype is None or dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"got an array of {name!r:.40}; expected numbers")
    if 0 in shape and math.prod(filter(None, shape)) > _MAX_EMPTY_ROWS:
        raise ValueError(f"got the shape {shape!r:.80} of an array that holds nothing")
    return np.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape).copy()[()]


def _image_of(held: Json) -> object:
    """The PIL image; its PNG where Pillow is not installed, which is read as an image wherever one is expected."""
    png = _bytes_of(held)
    try:
        from PIL import Image
    except ImportError:
        return png
    try:
        image = Image.open(io.BytesIO(png), formats=["PNG"])
        image.load()
    except (OSError, SyntaxError, Image.DecompressionBombError) as e:
        raise ValueError(str(e)) from e
    return image.copy()


_DECODERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "$tuple": lambda held: tuple(from_json(list(held))),
    "$bytes": _bytes_of,
    "$float": lambda held: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[held],
    "$int": int,
    "$text": lambda held: _bytes_of(held).decode("utf-8", "surrogatepass"),
    "$array": _array_of,
    "$image": _image_of,
    "$map": lambda held: {from_json(name): from_json(item) for name, item in held},
}
