"""slime's `--save-debug-rollout-data` files, read without torch, and without running anything that they hold.

Knows what `torch.save` writes (a zip of stored members: one pickle, and the bytes of each storage;
torch/serialization.py) and what slime puts there (`{"rollout_id": ..., "samples": [Sample.to_dict()]}`,
slime/observability/rollout_data_utils.py). The pickle may name the few things below and nothing else: each is a
function of this file that makes plain values or NumPy arrays. A file by a stranger can waste memory; it can't run code.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from strands_rollout.errors import DumpError

_STORAGE_DTYPES: Final = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "?",
}
_NUMBERS: Final = "biufc"
_LEGACY: Final = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # torch/serialization.py's MAGIC_NUMBER


def read_torch_file(path: Path) -> list[Any]:
    """The samples of such a file, as `Sample.to_dict` gave them; tensors as NumPy arrays.

    Raises:
        DumpError: It can't be read, is another file, or names something that is not read.
    """
    try:
        _refuse_legacy(path)
        with zipfile.ZipFile(path) as archive:
            content = _content(archive)
    except OSError as e:
        raise DumpError(f"can't read {path}: {e.strerror}") from e
    except zipfile.BadZipFile as e:
        raise DumpError(
            f"{path} is no file of torch.save: {e}; expected slime's --save-debug-rollout-data, or a .jsonl dump"
        ) from e
    except _RefusedError as e:
        raise DumpError(f"{path}: {e}") from e
    except DumpError:
        raise
    except Exception as e:  # a damaged pickle raises anything
        raise DumpError(f"{path} is damaged: {type(e).__name__}: {e}") from e
    samples = content.get("samples") if isinstance(content, Mapping) else None
    if not isinstance(samples, list):
        raise DumpError(f"{path} holds no samples; expected slime's --save-debug-rollout-data")
    return samples


def _refuse_legacy(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_LEGACY)) == _LEGACY:
            raise DumpError(
                f"{path} is of torch's old format, before its zip files, which is not read; write it anew with torch: "
                f"torch.save(torch.load({str(path)!r}, weights_only=False), 'new.pt')"
            )


class _RefusedError(Exception):
    """The file holds what is not read."""


def _content(archive: zipfile.ZipFile) -> Any:  # noqa: ANN401
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

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        """What stands for a name that is allowed."""
        if module == "torch" and name in _STORAGE_DTYPES:
            return _StorageKind(_STORAGE_DTYPES[name])
        found = _ALLOWED.get((module, name))
        if found is None:
            raise _RefusedError(
                f"it asks for {module}.{name}, which is not read: samples hold plain values, tensors and NumPy arrays"
            )
        return found

    def persistent_load(self, pid: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401
        """The storage that `torch.save` wrote beside the pickle."""
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, _StorageKind) or not str(key).isalnum():
            raise _RefusedError(f"got the storage {pid!r:.80}; expected one of {', '.join(_STORAGE_DTYPES)}")
        storage = np.frombuffer(self._archive.read(f"{self._folder}data/{key}"), dtype=dtype.dtype)
        if len(storage) != count:
            raise _RefusedError(f"got a storage of {len(storage)} numbers; expected {count}")
        return storage


class _StorageKind:
    """Which numbers a storage holds."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype)

    def __setstate__(self, state: object) -> None:
        raise _RefusedError("it changes a storage's type")


class _Maker:
    """What a pickle may call; as an object that it can't change."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401
        return self._make(*args)

    def __setstate__(self, state: object) -> None:
        raise _RefusedError("it changes what makes its values")


class _Dtype:
    """A NumPy type as a pickle builds it: made, then told its byte order."""

    def __init__(self, code: str, *_: object) -> None:
        if not isinstance(code, str) or np.dtype(code).kind not in _NUMBERS:
            raise _RefusedError(f"it holds an array of {code!r:.40}; expected numbers")
        self.dtype: np.dtype[Any] = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class _Array(np.ndarray[Any, Any]):
    """A NumPy array as a pickle builds it: made empty, then told its shape and bytes."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, is_fortran, data = state
        if (
            not isinstance(kind, _Dtype)
            or type(data) is not bytes
            or math.prod(shape) * kind.dtype.itemsize != len(data)
        ):
            raise _RefusedError(f"got an array of shape {shape!r:.40} whose bytes don't fit it")
        super().__setstate__((1, tuple(shape), kind.dtype, bool(is_fortran), data))  # type: ignore[arg-type]


def _empty_array(*_: object) -> _Array:
    return _Array((0,))


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *_: object) -> np.ndarray[Any, Any]:  # noqa: ANN401
    """A view of a storage, as `torch._utils._rebuild_tensor_v2` makes one; copied."""
    size, stride = tuple(size), tuple(stride)
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    is_inside = offset >= 0 and all(length >= 0 and step >= 0 for length, step in zip(size, stride, strict=True))
    count = math.prod(size)
    if not is_inside or count > len(storage) or (count and last >= len(storage)):
        raise _RefusedError(f"got a tensor of size {size} and stride {stride} in a storage of {len(storage)} numbers")
    steps = tuple(step * storage.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], size, steps).copy()


def _number(dtype: _Dtype, data: bytes) -> Any:  # noqa: ANN401
    return np.frombuffer(data, dtype=dtype.dtype)[0]


def _latin1(text: str, encoding: str) -> bytes:
    """How pickles of protocol 2 write bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise _RefusedError(f"got bytes in {encoding!r:.40}; expected latin1")
    return text.encode("latin-1")


def _no_bytes() -> bytes:
    return b""


_BUILTINS: Final[Mapping[str, Callable[..., Any]]] = {
    "bytes": _no_bytes,
    "set": set,
    "frozenset": frozenset,
    "complex": complex,
}
_CORES: Final = ("numpy.core.multiarray", "numpy._core.multiarray")
_ALLOWED: Final = {
    ("collections", "OrderedDict"): _Maker(OrderedDict),
    ("torch._utils", "_rebuild_tensor_v2"): _Maker(_tensor),
    ("_codecs", "encode"): _Maker(_latin1),
    ("numpy", "ndarray"): _Maker(_empty_array),
    ("numpy", "dtype"): _Maker(_Dtype),
    **{(module, "_reconstruct"): _Maker(_empty_array) for module in _CORES},
    **{(module, "scalar"): _Maker(_number) for module in _CORES},
    **{(module, name): _Maker(make) for module in ("builtins", "__builtin__") for name, make in _BUILTINS.items()},
}
