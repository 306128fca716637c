"""slime's `--save-debug-rollout-data` files, read without torch, and without running anything that they hold.

`torch.save` writes a zip of stored members: one pickle, and the bytes of each storage (torch/serialization.py). slime
puts `{"rollout_id": ..., "samples": [Sample.to_dict()]}` there (slime/observability/rollout_data_utils.py). The pickle
may name the few things below and nothing else: each makes plain values or NumPy arrays. A file by a stranger can't run
code or read memory that is not its own.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from strands_rollout.errors import DumpError, foreign_code
from strands_rollout.files import Json, open_regular

_STORAGE_DTYPES: Final = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
} | {"ShortStorage": "<i2", "CharStorage": "<i1", "ByteStorage": "<u1", "BoolStorage": "?"}
_NUMBERS: Final = "biufc"
_MAX_CODE_CHARS: Final = 16
_LEGACY: Final = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # torch/serialization.py's MAGIC_NUMBER
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
            content = _content(archive)
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


def _content(archive: zipfile.ZipFile) -> object:
    if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
        raise _RefusedError("it is compressed, which torch.save never does; it is not read")
    pickles = [name for name in archive.namelist() if name.endswith("data.pkl") and name.count("/") <= 1]
    if len(pickles) != 1:
        raise _RefusedError(f"got {len(pickles)} members named data.pkl; expected one, as torch.save writes")
    folder = pickles[0].removesuffix("data.pkl")
    if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
        raise _RefusedError("its numbers are big-endian; expected little")
    return _PlainUnpickler(archive, folder, archive.read(pickles[0])).load()


class _PlainUnpickler(pickle.Unpickler):
    """Makes plain values and arrays; refuses whatever else a pickle asks for."""

    def __init__(self, archive: zipfile.ZipFile, folder: str, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._archive = archive
        self._folder = folder
        self._storages: dict[tuple[str, str], _Storage] = {}

    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and name in _STORAGE_DTYPES:
            return _Maker(name)
        if (module, name) not in _ALLOWED:
            expected = "samples hold plain values, tensors and NumPy arrays"
            raise _RefusedError(f"it asks for {module}.{name}, which is not read: {expected}")
        return _Maker(_ALLOWED[module, name])

    def persistent_load(self, pid: Json) -> _Storage:
        kind, maker, key, _, count = pid
        dtype = maker.make if isinstance(maker, _Maker) else None
        if kind != "storage" or dtype not in _STORAGE_DTYPES or not str(key).isalnum():
            raise _RefusedError(f"got the storage {pid!r:.80}; expected one of {', '.join(_STORAGE_DTYPES)}")
        if (dtype, key) not in self._storages:
            data = self._archive.read(f"{self._folder}data/{key}")
            self._storages[dtype, key] = _Storage(np.frombuffer(data, dtype=_STORAGE_DTYPES[dtype]))
        found = self._storages[dtype, key]
        if len(found.numbers) != count:
            raise _RefusedError(f"got a storage of {len(found.numbers)} numbers; expected {count!r:.40}")
        return found


class _Built:
    """What a pickle may make: it can't be given attributes, other than by a `__setstate__` of its own."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise _RefusedError(f"it changes a {type(self).__name__}; expected an array")


class _Maker(_Built):
    """What a pickle gets for a name: the kind of a storage, or a function that it may call."""

    __slots__ = ("make",)

    def __init__(self, make: str | Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, *args: object) -> object:
        if isinstance(self.make, str):
            raise _RefusedError(f"it calls {self.make}; expected the storage of a tensor")
        return self.make(*args)


class _Storage(_Built):
    """The numbers that tensors are views of; nothing else can stand for it."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: np.ndarray[Any, Any]) -> None:
        self.numbers = numbers


def _tensor(storage: object, offset: object, size: object, stride: object, *_: object) -> np.ndarray[Any, Any]:
    """A copied view of a storage, as `torch._utils._rebuild_tensor_v2` makes one."""
    if not isinstance(storage, _Storage):
        raise _RefusedError(f"got a tensor in {type(storage).__name__}; expected a storage")
    numbers = storage.numbers
    sizes, strides, (start,) = _lengths(size), _lengths(stride), _lengths((offset,))
    count = math.prod(sizes)
    last = start + sum((length - 1) * step for length, step in zip(sizes, strides, strict=True))
    if count > len(numbers) or (count and last >= len(numbers)):
        got = f"got a tensor of size {sizes!r:.80} and stride {strides!r:.80}"
        raise _RefusedError(f"{got} in a storage of {len(numbers)} numbers")
    if not count:
        return np.empty(sizes, numbers.dtype)
    steps = tuple(step * numbers.itemsize for step in strides)
    return np.lib.stride_tricks.as_strided(numbers[start:], sizes, steps).copy()


def _lengths(value: object) -> tuple[int, ...]:
    """A shape, strides or an offset."""
    if not isinstance(value, tuple | list) or any(type(length) is not int or length < 0 for length in value):
        raise _RefusedError(f"got the lengths {value!r:.80}; expected whole numbers from 0")
    return tuple(value)


class _Dtype(_Built):
    """A NumPy type as a pickle builds it: made, then given its byte order."""

    __slots__ = ("dtype",)

    def __init__(self, code: str, *_: object) -> None:
        if not isinstance(code, str) or len(code) > _MAX_CODE_CHARS or np.dtype(code).kind not in _NUMBERS:
            raise _RefusedError(f"it holds an array of {code!r:.40}; expected numbers")
        self.dtype: np.dtype[Any] = np.dtype(code)

    def __setstate__(self, state: Json) -> None:
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


def _latin1(text: str, _encoding: str) -> bytes:
    """How pickles of protocol 2 write bytes."""
    return text.encode("latin-1")


_BUILTINS: Final[Mapping[str, Callable[..., Any]]] = {
    "bytes": lambda: b"",
    "set": set,
    "frozenset": frozenset,
    "complex": complex,
}
_ALLOWED: Final[Mapping[tuple[str, str], Callable[..., Any]]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("collections", "OrderedDict"): dict,
    ("_codecs", "encode"): _latin1,
    ("numpy", "ndarray"): _empty_array,
    ("numpy", "dtype"): _Dtype,
    **{(module, "_reconstruct"): _empty_array for module in _CORES},
    **{(module, "scalar"): _number for module in _CORES},
    **{(module, name): make for module in ("builtins", "__builtin__") for name, make in _BUILTINS.items()},
}
