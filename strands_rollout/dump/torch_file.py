"""slime's `--save-debug-rollout-data` files, read without torch, and without running anything that they hold.

`torch.save` writes a zip of stored members: one pickle, and the bytes of each storage (torch/serialization.py). slime
puts `{"rollout_id": ..., "samples": [Sample.to_dict()]}` there (slime/observability/rollout_data_utils.py). The pickle
may name the few things below and nothing else: each is a function of this file that makes plain values or NumPy arrays.
A file by a stranger can't run code, read memory that is not its own, or stand for far more values than it has bytes.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from strands_rollout.errors import DumpError, foreign_code
from strands_rollout.files import Json, expanded_size, open_regular

_STORAGE_DTYPES: Final = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
} | {"ShortStorage": "<i2", "CharStorage": "<i1", "ByteStorage": "<u1", "BoolStorage": "?"}
_NUMBERS: Final = "biufc"
_MAX_DIMENSIONS: Final = 32
_MAX_CODE_CHARS: Final = 16
_MAX_EMPTY_ROWS: Final = 1 << 20
# Values that a file may stand for, and bytes of arrays made of it, per byte: samples of one row share some of theirs.
_MAX_EXPANSION: Final = 100
_MAX_COPIES: Final = 8
_SMALL_BYTES: Final = 1 << 20
_LEGACY: Final = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # torch/serialization.py's MAGIC_NUMBER
_CONTAINERS: Final = (list, tuple, dict, set, frozenset)
_ATOMS: Final = frozenset({str, int, float, bool, type(None), bytes})
_ATOM_RUN: Final = re.compile(rb"(?:K.|M..|J.{4}|G.{8}|[N\x88\x89])++", re.DOTALL)
_LEAST_RUN_BYTES: Final = 32
_OPCODES: Final = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.STACK_GLOBAL),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINBYTES, pickle.SHORT_BINBYTES),
    *(pickle.BINUNICODE8, pickle.BINBYTES8, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.REDUCE, pickle.BUILD, pickle.BINPERSID),
)
_LOAD_MARK: Final[Callable[[Any], None]] = pickle._Unpickler.dispatch[pickle.MARK[0]]
_CORES: Final = ("numpy.core.multiarray", "numpy._core.multiarray")


def read_torch_file(path: Path) -> list[Any]:
    """The samples of such a file, as `Sample.to_dict` gave them, tensors as arrays; DumpError where it has none."""
    with foreign_code("a damaged pickle raises anything") as outcome, open_regular(path) as file:
        if file.read(len(_LEGACY)) == _LEGACY:
            raise DumpError(
                f"{path} is of torch's old format, before its zip files, which is not read; write it anew with torch: "
                f"torch.save(torch.load({str(path)!r}, weights_only=False), 'new.pt')"
            )
        with zipfile.ZipFile(file) as archive:
            content = _content(archive, path.stat().st_size)
    if outcome.error is not None:
        raise _readable(outcome.error, path) from outcome.error
    samples = content.get("samples") if isinstance(content, Mapping) else None
    if not isinstance(samples, list):
        raise DumpError(f"{path} holds no samples; expected slime's --save-debug-rollout-data")
    return samples


def _readable(error: Exception, path: Path) -> DumpError:
    if isinstance(error, DumpError):
        return error
    if isinstance(error, OSError):
        return DumpError(f"can't read {path}: {error.strerror}")
    if isinstance(error, zipfile.BadZipFile):
        expected = "expected slime's --save-debug-rollout-data, or a .jsonl dump"
        return DumpError(f"{path} is no file of torch.save: {error}; {expected}")
    if isinstance(error, _RefusedError):
        return DumpError(f"{path}: {error}")
    return DumpError(f"{path} is damaged: {type(error).__name__}: {error}")


class _RefusedError(Exception):
    """The file holds what is not read."""


def _content(archive: zipfile.ZipFile, file_bytes: int) -> object:
    if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
        raise _RefusedError("it is compressed, which torch.save never does; it is not read")
    pickles = [name for name in archive.namelist() if name.endswith("data.pkl") and name.count("/") <= 1]
    if len(pickles) != 1:
        raise _RefusedError(f"got {len(pickles)} members named data.pkl; expected one, as torch.save writes")
    folder = pickles[0].removesuffix("data.pkl")
    if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
        raise _RefusedError("its numbers are big-endian; expected little")
    size = max(file_bytes, _SMALL_BYTES)
    content = _PlainUnpickler(archive, folder, archive.read(pickles[0]), _MAX_COPIES * size).load()
    try:
        count = expanded_size(content, _parts)
    except ValueError as e:
        raise _RefusedError(f"{e}; expected plain samples") from e
    if count > _MAX_EXPANSION * size:
        raise _RefusedError(f"its {file_bytes} bytes stand for {count} values, by parts in parts that are shared")
    return content


def _parts(value: Json) -> tuple[int, list[Any]]:
    if isinstance(value, np.ndarray):
        return value.size, []
    items = [*value, *value.values()] if isinstance(value, dict) else value
    # most lists hold numbers alone
    if not isinstance(items, _CONTAINERS) or set(map(type, items)) <= _ATOMS:
        return len(items) if isinstance(items, _CONTAINERS) else 0, []
    return len(items), [item for item in items if isinstance(item, (*_CONTAINERS, np.ndarray))]


class _Opcodes(dict[int, Callable[[Any], None]]):
    """What is done at each opcode that samples need."""

    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise _RefusedError(f"its pickle has the opcode {bytes([code])!r}, which is not read")


class _PlainUnpickler(pickle._Unpickler):
    """Makes plain values and arrays; refuses whatever else a pickle asks for.

    The one that Python has in Python: the one in C takes any index of its memo as the size of a table, and overflows
    the stack where a key is a tuple in a tuple in a tuple... Runs of numbers, which are nearly all of a file, are given
    to C nevertheless.
    """

    dispatch = _Opcodes({code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES})

    # the base class sets these while it loads
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    _unframer: Any

    def __init__(self, archive: zipfile.ZipFile, folder: str, data: bytes, spare_bytes: int) -> None:
        self._data = data
        self._buffer = io.BytesIO(data)
        super().__init__(self._buffer)
        self._archive = archive
        self._folder = folder
        self._spare_bytes = spare_bytes
        self._storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and name in _STORAGE_DTYPES:
            return np.dtype(_STORAGE_DTYPES[name])
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._tensor
        if (module, name) not in _ALLOWED:
            expected = "samples hold plain values, tensors and NumPy arrays"
            raise _RefusedError(f"it asks for {module}.{name}, which is not read: {expected}")
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Json) -> _Storage:
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, np.dtype) or not str(key).isalnum():
            raise _RefusedError(f"got the storage {pid!r:.80}; expected one of {', '.join(_STORAGE_DTYPES)}")
        found = self._storages.get(str(key))
        if found is None or found.numbers.dtype != dtype:
            member = self._archive.getinfo(f"{self._folder}data/{key}")
            self._spend(member.file_size)
            found = _Storage(np.frombuffer(self._archive.read(member), dtype=dtype))
            self._storages[str(key)] = found
        if len(found.numbers) != count:
            raise _RefusedError(f"got a storage of {len(found.numbers)} numbers; expected {count!r:.40}")
        return found

    def _tensor(
        self, storage: object, offset: object, size: object, stride: object, *_: object
    ) -> np.ndarray[Any, Any]:
        """A copied view of a storage, as `torch._utils._rebuild_tensor_v2` makes one."""
        if not isinstance(storage, _Storage):
            raise _RefusedError(f"got a tensor in {type(storage).__name__}; expected a storage")
        numbers = storage.numbers
        sizes, strides, (start,) = _lengths(size), _lengths(stride), _lengths((offset,))
        got = f"got a tensor of size {sizes!r:.80}"
        if len(sizes) != len(strides):
            raise _RefusedError(f"{got} with stride {strides!r:.80}")
        count = math.prod(sizes)
        last = start + sum((length - 1) * step for length, step in zip(sizes, strides, strict=True))
        if count > len(numbers) or (count and last >= len(numbers)):
            raise _RefusedError(f"{got} and stride {strides!r:.80} in a storage of {len(numbers)} numbers")
        if not count:
            return np.empty(sizes, numbers.dtype)
        self._spend(count * numbers.itemsize)
        steps = tuple(step * numbers.itemsize for step in strides)
        return np.lib.stride_tricks.as_strided(numbers[start:], sizes, steps).copy()

    def _spend(self, count: int) -> None:
        self._spare_bytes -= count
        if self._spare_bytes < 0:
            raise _RefusedError("its tensors are far larger than the file")

    def load_mark(self) -> None:
        """Take the numbers that follow the mark at once."""
        _LOAD_MARK(self)
        if self._unframer.current_frame is None:
            run = _ATOM_RUN.match(self._data, self._buffer.tell())
            if run and run.end() - run.start() >= _LEAST_RUN_BYTES:
                self.stack.extend(pickle.loads(b"](" + run[0] + b"e."))  # noqa: S301 - it holds numbers only
                self._buffer.seek(run.end())

    def load_build(self) -> None:
        """Give an array or its type its state; what is set on an OrderedDict beside its items is left out."""
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, _Array | _Dtype):
            made.__setstate__(state)
        elif not isinstance(made, OrderedDict):
            raise _RefusedError(f"it changes a {type(made).__name__}; expected an array")

    def load_setitem(self) -> None:
        self._set_items([self.stack.pop(-2), self.stack.pop()])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        mapping = self.stack[-1]
        if not isinstance(mapping, dict):
            raise _RefusedError(f"it sets items of a {type(mapping).__name__}; expected a mapping")
        mapping.update(zip(_keys(items[::2]), items[1::2], strict=True))

    def load_additems(self) -> None:
        members = _keys(self.pop_mark())
        self.stack[-1].update(members)

    def load_frozenset(self) -> None:
        self.append(frozenset(_keys(self.pop_mark())))

    for _code, _load in (
        (pickle.MARK, load_mark),
        (pickle.BUILD, load_build),
        (pickle.SETITEM, load_setitem),
        (pickle.SETITEMS, load_setitems),
        (pickle.ADDITEMS, load_additems),
        (pickle.FROZENSET, load_frozenset),
    ):
        dispatch[_code[0]] = _load


def _keys(values: list[Any]) -> list[Any]:
    """The values, where each can be a key and is quick to hash."""
    for value in values:
        is_flat = type(value) in _ATOMS or (type(value) is tuple and set(map(type, value)) <= _ATOMS)
        if not is_flat and not isinstance(value, np.generic):
            raise _RefusedError(f"it has a {type(value).__name__} as a key; expected text, a number or a plain tuple")
    return values


def _lengths(value: object) -> tuple[int, ...]:
    """A shape, strides or an offset: whole numbers that are not negative, and make no list of a billion empty ones."""
    if not isinstance(value, tuple | list) or len(value) > _MAX_DIMENSIONS:
        raise _RefusedError(f"got {value!r:.80}; expected the lengths of at most {_MAX_DIMENSIONS} dimensions")
    if any(type(length) is not int or length < 0 for length in value):
        raise _RefusedError(f"got the lengths {value!r:.80}; expected whole numbers from 0")
    if 0 in value and math.prod(filter(None, value)) > _MAX_EMPTY_ROWS:
        raise _RefusedError(f"got the lengths {value!r:.80} of an array that holds nothing")
    return tuple(value)


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """The numbers that tensors are views of; nothing else can stand for it."""

    numbers: np.ndarray[Any, Any]


class _Dtype:
    """A NumPy type as a pickle builds it: made, then given its byte order."""

    def __init__(self, code: str, *_: object) -> None:
        if not isinstance(code, str) or len(code) > _MAX_CODE_CHARS or np.dtype(code).kind not in _NUMBERS:
            raise _RefusedError(f"it holds an array of {code!r:.40}; expected numbers")
        self.dtype: np.dtype[Any] = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class _Array(np.ndarray[Any, Any]):
    """A NumPy array as a pickle builds it: made empty, then given its shape and bytes."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, is_fortran, data = state
        is_whole = isinstance(kind, _Dtype) and type(data) is bytes
        if not is_whole or math.prod(_lengths(shape)) * kind.dtype.itemsize != len(data):
            raise _RefusedError(f"got an array of shape {shape!r:.40} whose bytes don't fit it")
        super().__setstate__((1, tuple(shape), kind.dtype, bool(is_fortran), data))  # type: ignore[arg-type]


def _empty_array(*_: object) -> _Array:
    return _Array((0,))


def _number(dtype: _Dtype, data: bytes) -> np.generic:
    if not isinstance(dtype, _Dtype) or type(data) is not bytes or len(data) != dtype.dtype.itemsize:
        raise _RefusedError(f"got a number in {data!r:.40}; expected the bytes of one")
    number: np.generic = np.frombuffer(data, dtype=dtype.dtype)[0]
    return number


def _latin1(text: str, encoding: str) -> bytes:
    """How pickles of protocol 2 write bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise _RefusedError(f"got bytes in {encoding!r:.40}; expected latin1")
    return text.encode("latin-1")


def _ordered(pairs: Json = ()) -> OrderedDict[Any, Any]:
    """How Python 2 wrote one with items."""
    return OrderedDict(zip(_keys([key for key, _ in pairs]), (item for _, item in pairs), strict=True))


_BUILTINS: Final[Mapping[str, Callable[..., Any]]] = {
    "bytes": lambda: b"",
    "set": lambda items=(): set(_keys(items)),
    "frozenset": lambda items=(): frozenset(_keys(items)),
    "complex": lambda real=0.0, imag=0.0: complex(real, imag),
}
_ALLOWED: Final[Mapping[tuple[str, str], Callable[..., Any]]] = {
    ("collections", "OrderedDict"): _ordered,
    ("_codecs", "encode"): _latin1,
    ("numpy", "ndarray"): _empty_array,
    ("numpy", "dtype"): _Dtype,
    **{(module, "_reconstruct"): _empty_array for module in _CORES},
    **{(module, "scalar"): _number for module in _CORES},
    **{(module, name): make for module in ("builtins", "__builtin__") for name, make in _BUILTINS.items()},
}
