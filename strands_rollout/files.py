"""Files: untrusted paths, JSON written whole or not at all, bounds of size, YAML, locks, records that outlive us."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import math
import mmap
import os
import shutil
import stat
import struct
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeAlias, TypeVar

from strands_rollout.errors import ConfigError
from strands_rollout.log_once import log_once

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


logger = logging.getLogger(__name__)
_FILE_BYTES: Final = 8 * 2**20
_NUMBER: Final = struct.Struct("<Q")  # of the file's use, which its records have too: older ones follow them
_HEAD: Final = struct.Struct("<QIHB")  # that number, bytes of key and record together, bytes of the key, kind
_MOST_SPARE: Final = 8
_FURTHER, _FIRST, _ENDED = 1, 2, 3
_SUFFIX: Final = ".records"


class RecordLog:
    """Records of one process in one folder, by episode, and those that dead processes left there.

    They are in memory-mapped files, so that to keep one is to copy it: a killed process leaves them to the next one,
    and only a machine that goes down may lose what the kernel had not yet written. A file is removed, or used again,
    when all episodes that have records in it are over. Threads of several rollouts may use it.

    Raises:
        OSError: The folder can't be made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = threading.Lock()
        self._file: _File | None = None
        self._spare: list[_File] = []  # to write to a page that is there already costs less than a tenth
        self._files: defaultdict[bytes, list[_File]] = defaultdict(list)  # of this process, by the episodes in them
        self._left: dict[bytes, list[bytes]] = {}
        self._held: set[bytes] = set()
        found = _read(folder, self._left)
        for file in found:
            file.keys &= self._left.keys()
            for key in file.keys:
                self._files[key].append(file)
            self._dispose(file)

    def open(self, name: str) -> EpisodeRecords:
        """The records of an episode.

        Raises:
            OSError: Another one has this name and is not over.
        """
        key = name.encode()
        with self._lock:
            if key in self._held:
                raise OSError(f"two episodes at once are {name!r}")
            self._held.add(key)
            return EpisodeRecords(self, key, self._left.pop(key, ()))

    def end_others(self, prefix: str, name: str) -> None:
        """End what is left under names with this prefix, but for this name's and those of running episodes."""
        with self._lock:
            known = self._files.keys() | self._left.keys()
            others = [key for key in known - self._held - {name.encode()} if key.startswith(prefix.encode())]
            for key in others:
                self._left.pop(key, None)
        for key in others:
            self.release(key, keep=False)

    def append(self, key: bytes, record: bytes, *, is_first: bool = False) -> None:
        """Keep a record; the first of an attempt takes the place of all earlier ones.

        Raises:
            OSError: There is no room.
        """
        with self._lock:
            earlier = self._files.pop(key, []) if is_first else []
            self._write(key, record, _FIRST if is_first else _FURTHER)
            self._let_go(key, earlier)

    def release(self, key: bytes, *, keep: bool) -> None:
        """An episode is over, or will be continued later."""
        with self._lock:
            self._held.discard(key)
            files = self._files.pop(key, [])
            if keep:
                self._files[key] = files
            elif files:
                with suppress(OSError):
                    self._write(key, b"", _ENDED)
                self._let_go(key, [*files, *self._files.pop(key, [])])

    def _write(self, key: bytes, record: bytes, kind: int) -> None:
        if self._file is None or not self._file.fits(len(key) + len(record)):
            full, self._file = self._file, self._next_file(len(key) + len(record))
            if full is not None:
                full.is_full = True
                self._dispose(full)
        self._file.write(key, record, kind)
        if self._file not in self._files[key]:
            self._file.keys.add(key)
            self._files[key].append(self._file)

    def _let_go(self, key: bytes, files: Sequence[_File]) -> None:
        for file in files:
            if file not in self._files.get(key, ()):
                file.keys.discard(key)
                self._dispose(file)

    def _dispose(self, file: _File) -> None:
        """Use a file again, or remove it, that is full and all of whose episodes are over."""
        if file.is_over and file not in self._spare:
            if len(self._spare) < _MOST_SPARE and file.size == _FILE_BYTES:
                self._spare.append(file)
            else:
                file.remove()

    def _next_file(self, length: int) -> _File:
        if self._spare and length + _NUMBER.size + _HEAD.size <= _FILE_BYTES:
            file = self._spare.pop()
            file.begin()
            return file
        return _File.made(self._folder, length)


class EpisodeRecords:
    """The records of one episode; see `journal.Kept`.

    Attributes:
        records: What a process left that died while it played the episode.
    """

    is_certain = False
    may_have_acted = True

    def __init__(self, log: RecordLog, key: bytes, records: Sequence[bytes]) -> None:
        self._log = log
        self._key = key
        self.records = records
        self._is_first = True
        self._is_lost = False

    def begin(self) -> None:
        """Begin an attempt."""
        self._is_first = True

    def write(self, record: bytes) -> None:
        """Keep a record; one that has no room is reported, and the episode has no more of them."""
        if self._is_lost:
            return
        try:
            self._log.append(self._key, record, is_first=self._is_first)
            self._is_first = False
        except OSError as e:
            self._is_lost = True
            words = "episodes have no further records, and can't be continued after their process dies: %s"
            log_once(logger, logging.WARNING, words, e)

    async def write_before_tools(self, record: bytes) -> None:
        """Keep a record; there is nothing to wait for."""
        self.write(record)

    def close(self, *, keep: bool) -> None:
        """The episode is over; `keep` says whether it will be continued later."""
        self._log.release(self._key, keep=keep)


class _File:
    """One file, which a lock keeps to this process.

    Attributes:
        keys: Episodes with records in it that are not over.
        is_full: Whether no further record goes there.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.size)
        self.number: int = _NUMBER.unpack_from(self._map)[0]
        self._end = 0
        self.keys: set[bytes] = set()
        self.is_full = True

    @property
    def is_over(self) -> bool:
        """Whether nothing in it counts any more, and nothing will follow."""
        return self.is_full and not self.keys

    def begin(self) -> None:
        """Forget what is in the file."""
        self.number, self._end, self.is_full = time.time_ns(), _NUMBER.size, False
        self._map[: _NUMBER.size] = _NUMBER.pack(self.number)

    @classmethod
    def made(cls, folder: Path, length: int) -> _File:
        """A new file, with room for a record of this length at least."""
        path = folder / f"{os.getpid()}-{uuid.uuid4().hex}{_SUFFIX}"
        try:
            descriptor = open_alone(path)
        except ConfigError as e:
            raise OSError(str(e)) from e
        size = max(_FILE_BYTES, length + _NUMBER.size + _HEAD.size)
        try:
            if hasattr(os, "posix_fallocate"):  # a disk that is full would else end the process when it writes
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.ftruncate(descriptor, size)
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        made = cls(path, descriptor)
        made.begin()
        return made

    def fits(self, length: int) -> bool:
        """Whether a record of this length has room."""
        return self._end + _HEAD.size + length <= self.size

    def write(self, key: bytes, record: bytes, kind: int) -> None:
        """Append a record; its head last, which makes it count."""
        start = self._end + _HEAD.size
        middle = start + len(key)
        end = middle + len(record)
        self._map[start:middle] = key
        self._map[middle:end] = record
        self._map[self._end : start] = _HEAD.pack(self.number, end - start, len(key), kind)
        self._end = end

    def read_into(self, found: dict[bytes, list[bytes]]) -> None:
        """Add the records of episodes that are not over."""
        for key, record, kind in self._frames():
            if kind == _ENDED:
                found.pop(key, None)
                continue
            if kind == _FIRST:
                found[key] = []
            self.keys.add(key)
            found.setdefault(key, []).append(record)

    def _frames(self) -> Iterator[tuple[bytes, bytes, int]]:
        at = _NUMBER.size
        while at + _HEAD.size <= self.size:
            number, length, key_length, kind = _HEAD.unpack_from(self._map, at)
            start = at + _HEAD.size
            at = start + length
            if not kind or number != self.number or at > self.size or key_length > length:
                return
            yield self._map[start : start + key_length], self._map[start + key_length : at], kind

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let another process have the file."""
        if self._descriptor >= 0:
            self._map.close()
            os.close(self._descriptor)
            self._descriptor = -1


def _read(folder: Path, records: dict[bytes, list[bytes]]) -> list[_File]:
    """Read the files that dead processes have left, in their order."""
    files = []
    for path in folder.glob(f"*{_SUFFIX}"):
        with suppress(ConfigError):  # of a process that lives
            descriptor = open_alone(path)
            if os.fstat(descriptor).st_size > _NUMBER.size:
                files.append(_File(path, descriptor))
            else:  # its process died before it had a size
                path.unlink(missing_ok=True)
                os.close(descriptor)
    files.sort(key=lambda file: file.number)
    for file in files:
        file.read_into(records)
    return files


def left_in(folder: Path) -> dict[str, list[bytes]]:
    """The records of unfinished episodes that a dead process left in a folder, which is removed."""
    found: dict[bytes, list[bytes]] = {}
    for file in _read(folder, found):
        file.close()
    shutil.rmtree(folder, ignore_errors=True)
    return {key.decode(): records for key, records in found.items()}


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
