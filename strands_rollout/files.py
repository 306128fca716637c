"""Files: untrusted paths, JSON written whole or not at all, bounds of size, YAML, locks."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeAlias, TypeVar

from strands_rollout.errors import ConfigError

if TYPE_CHECKING:
    import yaml

Json: TypeAlias = Any
"""Any value of JSON: None, a bool, int, float or str, a list of values, or a dict of them by str."""

MAX_JSON_BYTES: Final = 200_000_000
"""No JSON file of a model, a tokenizer or a report is larger."""
_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (lambda _: True, "a device"),
)


def open_regular(path: Path | str) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Opening a named pipe would wait for a writer, and some devices never end: neither is opened.

    Raises:
        OSError: It can't be opened, or is no regular file; `strerror` says which. Also for paths that no file can have.
    """
    try:
        _check_regular(Path(path).stat(), path)
        # what the path names may have changed since: a pipe must not block here either
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as e:  # a NUL or a lone surrogate
        raise OSError(errno.EINVAL, f"not a valid path: {e}", str(path)) from e
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        _check_regular(os.fstat(descriptor), path)
        file = os.fdopen(descriptor, "rb")
        stack.pop_all()
    return file


def read_regular(path: Path | str, max_bytes: int) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: As `open_regular`, or it is larger than `max_bytes`.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1) if os.fstat(file.fileno()).st_size <= max_bytes else None
    if content is None or len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes / 1e6:g} MB", str(path))
    return content


def _check_regular(status: os.stat_result, path: Path | str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next(name for is_kind, name in _KINDS if is_kind(status.st_mode))
        raise OSError(errno.EINVAL, f"it is {kind}; expected a regular file", str(path))


_AS_ZEROS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_INTEGER: Final = b"0" * 19  # shorter ones have no more than 64 bits


def encode_json(value: Json) -> bytes:
    """A value of JSON, or of dataclasses, as its text, also with integers of any size and halves of surrogate pairs.

    Raises:
        TypeError, ValueError: It is no value of JSON, nested too deeply, or has an integer of more than 4,300 digits.
    """
    import orjson  # the sandbox, whose code imports this module, may run where it is not installed

    try:
        return orjson.dumps(value)
    except TypeError:  # orjson knows no integers above 64 bits, and no halves
        return json.dumps(value, separators=(",", ":"), default=dataclasses.asdict).encode()


def decode_json(text: bytes | str, *, is_finite: bool = True) -> Json:
    """The value of a JSON text, with integers of any size and halves of surrogate pairs as they are.

    Args:
        text: In UTF-8, where it is bytes.
        is_finite: Refuse NaN, Infinity and numbers that are too large for a float, which Python's `json` writes.

    Raises:
        ValueError: It is no JSON, nested too deeply, or has an integer of more than 4,300 digits.
    """
    import orjson  # as above

    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if _LONG_INTEGER not in raw.translate(_AS_ZEROS):  # of which orjson makes floats
        with suppress(orjson.JSONDecodeError):
            return orjson.loads(raw)
    try:
        return (_FINITE if is_finite else _DECODER).decode(str(text, "utf-8") if isinstance(text, bytes) else text)
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"the number {number:.40} is not finite")
    return value


_DECODER: Final = json.JSONDecoder()
_FINITE: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file that is there whole or not at all.

    Raises:
        ConfigError: It can't be written.
    """
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as e:
        raise ConfigError(f"can't write {path}: {e.strerror}; choose another folder with --out") from e


def read_json(path: Path, *, advice: str = "choose another folder with --out") -> dict[str, Any]:
    """The object in a file; `advice`, what to do where it can't be read, ends the message.

    Raises:
        ConfigError: It can't be read, or holds no JSON object.
    """
    try:
        value = json.loads(read_regular(path, MAX_JSON_BYTES))
    except OSError as e:
        raise ConfigError(f"can't read {path}: {e.strerror}; {advice}") from e
    except ValueError as e:
        raise ConfigError(f"{path} is no JSON: {e}; {advice}") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}; expected an object; {advice}")
    return value


def differences(there: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """The first 10 differences of what a file has and of what would be written to it, as text; "" for none."""
    found = list(_differences(there, json.loads(json.dumps(asked)), ""))
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    return "; ".join(found[:10]) + more


def _differences(there: Mapping[str, Any], asked: Mapping[str, Any], where: str) -> Iterator[str]:
    for key in dict.fromkeys([*there, *asked]):
        first, second = there.get(key, "nothing"), asked.get(key, "nothing")
        if isinstance(first, dict) and isinstance(second, dict):
            yield from _differences(first, second, f"{where}{key}.")
        elif first != second:
            yield f"{where}{key} was {first!r:.120} and is {second!r:.120}"


def open_alone(path: Path) -> int:
    """Open a file to read and append to, and make it if it is not there; the lock ends when it is closed.

    Returns:
        The file's descriptor.

    Raises:
        ConfigError: It can't be opened, or another process has it.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as e:
        raise ConfigError(f"can't open {path}: {e.strerror}; choose another folder with --out") from e
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(file)
        raise ConfigError(f"{path} is in use by another run ({e.strerror}); wait, or choose another --out") from e
    return file


MAX_DEPTH: Final = 100
Value = TypeVar("Value")


def expanded_size(root: Value, parts: Callable[[Value], tuple[int, Iterable[Value]]]) -> int:
    """How many values there are where each shared part counts as often as it is referred to.

    Each part is visited once, so that this is quick even where visiting every reference would not end.

    Args:
        root: The value.
        parts: Gives the number of values that a container holds directly, and those of them that are containers.

    Raises:
        ValueError: A container holds itself, or they are nested deeper than MAX_DEPTH.
    """
    sizes: dict[int, int] = {}
    entered: set[int] = set()

    def size(container: Value) -> int:
        key = id(container)
        if key in sizes:
            return sizes[key]
        if key in entered:
            raise ValueError("it holds itself")
        if len(entered) >= MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        entered.add(key)
        count, containers = parts(container)
        sizes[key] = 1 + count + sum(map(size, containers))
        entered.discard(key)
        return sizes[key]

    return size(root)


_MAX_YAML_BYTES: Final = 1_000_000
_MAX_YAML_VALUES: Final = 100_000


def yaml_text(path: Path) -> str:
    """The text of a YAML file, which must have a config's size even with each alias (`*name`) written out.

    Raises:
        ConfigError: It can't be read, or is no YAML, or far larger than a config.
    """
    import yaml  # this module is the code tool's too, which runs without libraries

    try:
        text = read_regular(path, _MAX_YAML_BYTES).decode("utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        count = 0 if root is None else expanded_size(root, _nodes)
    except OSError as e:
        raise ConfigError(f"can't read {path}: {e.strerror}") from e
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is no YAML: {e}") from e
    if count > _MAX_YAML_VALUES:
        raise ConfigError(f"{path} stands for {count} values, with its aliases written out; expected a config")
    return text


def _nodes(node: yaml.Node) -> tuple[int, list[yaml.Node]]:
    if isinstance(node.value, str):
        return 0, []
    # a mapping's are pairs
    parts = [part for value in node.value for part in (value if isinstance(value, tuple) else (value,))]
    return len(parts), parts
