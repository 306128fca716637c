"""Journal records of unfinished episodes in a folder of append-only files; one process writes to each file.

Each record is written by one system call, so it survives the death of its process. Only a crash of the machine may lose
records, if its kernel had not written them to disk. A process keeps its files locked (`flock`) while it lives. A file
without a lock was left by a dead process, and belongs to the next process that opens the folder. All records of an
episode are in one file, so no two processes continue the same episode.

A file begins with a line that names the format. Frames follow, with little-endian numbers:

    checksum (CRC-32 of the rest), kind, length of the key, length of the record; the episode's key; the record

Reading stops at the first cut or damaged frame. When a file reaches `MAX_FILE_BYTES`, new episodes go to a new file.
When the last unfinished episode of a file ends, the file is removed, or only emptied if new episodes still go to it.
Some episodes are never continued, since their samples were dropped or their settings have changed. So the total size of
a process's files has a limit (`MAX_BYTES`). Above this limit, the process ends the records of episodes that are not
running, starting with the oldest files.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import struct
import threading
import uuid
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from strands_rollout.log_once import log_once

logger = logging.getLogger(__name__)

MAX_FILE_BYTES: Final = 64 * 2**20
"""Size of a file at which new episodes go to a new file."""
MAX_BYTES: Final = 4 * 2**30
"""Limit of the total size of a process's files. Above it, the process ends records of episodes that are not running."""
_SUFFIX: Final = ".records"
_FORMAT: Final = b"strands-rollout records 1\n"
_CHECKSUM: Final = struct.Struct("<I")
_LENGTHS: Final = struct.Struct("<BHI")
_HEAD_BYTES: Final = _CHECKSUM.size + _LENGTHS.size
_FIRST, _LATER, _ENDED = 1, 2, 3


class RecordStore:
    """The journal records of this process's episodes in a folder, and the records left there by dead processes.

    Several threads may share a store, and several processes may share a folder.

    Raises:
        OSError: The folder can't be created or listed.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = threading.Lock()
        self._files: list[_File] = []  # the last file takes new episodes
        self._file_of: dict[bytes, _File] = {}  # file of each unfinished episode, by the key of the episode
        self._running: set[bytes] = set()
        self._leftover_records: dict[bytes, list[bytes]] = {}  # records of dead processes, by episode key
        for file, found in _take_over(folder):
            self._files.append(file)
            for key in found:
                self._end(key)  # an older file may have records of an earlier attempt
                self._file_of[key] = file
            self._leftover_records |= found

    def open(self, name: str) -> EpisodeRecords:
        """Open the records of an episode.

        Raises:
            OSError: An episode with this name is running.
        """
        key = name.encode()
        with self._lock:
            if key in self._running:
                raise OSError(f"an episode named {name!r} is running already")
            self._running.add(key)
            return EpisodeRecords(self, key, self._leftover_records.pop(key, ()))

    def end_others(self, prefix: str, name: str) -> None:
        """End the records of all episodes whose names begin with `prefix`, except `name` and running episodes."""
        with self._lock:
            for key in self._file_of.keys() - self._running - {name.encode()}:
                if key.startswith(prefix.encode()):
                    self._end(key)

    def append(self, key: bytes, record: bytes, *, is_first: bool) -> bool:
        """Append a record; if `is_first` is true, it replaces all earlier records of the episode.

        Returns:
            False if the record can't be written. The failure is logged once, and ends the episode's records: an episode
            that was continued from them would repeat the unwritten steps.
        """
        with self._lock:
            try:
                self._file_for(key).append(_FIRST if is_first else _LATER, key, record)
            except OSError as e:
                self._end(key)
                message = "can't write records to %s: %s; the episodes can't be continued if their process dies"
                log_once(logger, logging.WARNING, message, self._folder, e, key=self._folder)
                return False
            return True

    def release(self, key: bytes, *, keep: bool) -> None:
        """Mark an episode as no longer running; end its records, or `keep` them so that it can be continued."""
        with self._lock:
            self._running.discard(key)
            if not keep:
                self._end(key)

    def _file_for(self, key: bytes) -> _File:
        if key not in self._file_of:
            if not self._files or self._files[-1].size >= MAX_FILE_BYTES:
                self._files.append(_File.create(self._folder))
                for file in self._files[:-1]:
                    if sum(each.size for each in self._files) > MAX_BYTES:
                        for idle in file.unfinished - self._running:
                            self._end(idle)
            self._file_of[key] = self._files[-1]
            self._files[-1].unfinished.add(key)
        return self._file_of[key]

    def _end(self, key: bytes) -> None:
        self._leftover_records.pop(key, None)
        file = self._file_of.pop(key, None)
        if file is None:
            return
        file.unfinished.discard(key)
        with suppress(OSError):  # on a full disk, the next process may read the episode as unfinished
            if file.unfinished:
                file.append(_ENDED, key, b"")
            elif file is self._files[-1]:
                file.empty()
            else:
                self._files.remove(file)
                file.remove()


class EpisodeRecords:
    """The journal records of one episode; see `slime_plugin.journal.RecordSink`.

    Attributes:
        records: Records of the episode from a dead process.
    """

    is_latest = False
    may_have_acted = True

    def __init__(self, store: RecordStore, key: bytes, records: Sequence[bytes]) -> None:
        self._store = store
        self._key = key
        self.records = records
        self._is_first = True
        self._is_lost = False

    def begin(self) -> None:
        """Begin an attempt, whose first record replaces all earlier records."""
        self._is_first = True

    def write(self, record: bytes) -> None:
        """Write a record; after a failure the episode writes no more records."""
        if not self._is_lost:
            self._is_lost = not self._store.append(self._key, record, is_first=self._is_first)
            self._is_first = False

    async def write_before_tools(self, record: bytes) -> None:
        """Write a record; once this returns, the record outlives the process, unless writing has failed."""
        self.write(record)

    def close(self, *, keep: bool) -> None:
        """End the episode's records, or `keep` them so that the episode can be continued."""
        self._store.release(self._key, keep=keep)


def take_leftover_records(folder: Path) -> dict[str, list[bytes]]:
    """Return the records left in a folder by dead processes, by the name of their episode; remove the folder."""
    found: dict[str, list[bytes]] = {}
    for file, records in _take_over(folder):
        found |= {key.decode(): episode_records for key, episode_records in records.items()}
        file.close()
    shutil.rmtree(folder, ignore_errors=True)
    return found


class _File:
    """A file of journal records that this process has locked; `size` is the end of its last whole frame."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self.size = 0
        self.unfinished: set[bytes] = set()

    @classmethod
    def create(cls, folder: Path) -> Self:
        while True:
            path = folder / f"{os.getpid()}-{uuid.uuid4().hex}{_SUFFIX}"
            file = cls(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
            if file.lock():
                break
            file.close()  # another process took the empty file for a dead process's file
        try:
            file._write(_FORMAT)
        except OSError:
            file.remove()
            raise
        return file

    def lock(self) -> bool:
        """Lock the file; return False if another process has locked or removed it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return os.fstat(self._descriptor).st_nlink > 0

    def append(self, kind: int, key: bytes, record: bytes) -> None:
        head = _LENGTHS.pack(kind, len(key), len(record)) + key
        checksum = zlib.crc32(record, zlib.crc32(head))
        self._write(_CHECKSUM.pack(checksum) + head, record)

    def _write(self, head: bytes, record: bytes = b"") -> None:
        length, written = len(head) + len(record), 0
        try:
            written = os.pwritev(self._descriptor, (head, record), self.size)
        finally:
            if written < length:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self.size)
        if written < length:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.size += length

    def read(self) -> dict[bytes, list[bytes]]:
        """Return the records of unfinished episodes by their keys, and cut the file after the last whole frame."""
        found: dict[bytes, list[bytes]] = {}
        size = os.fstat(self._descriptor).st_size
        with os.fdopen(self._descriptor, "rb", closefd=False) as file:
            start = file.read(len(_FORMAT))
            if not _FORMAT.startswith(start):
                raise ValueError("the file is damaged, or was written by another version of strands-rollout")
            self.size = len(start)
            while len(head := file.read(_HEAD_BYTES)) == _HEAD_BYTES:
                kind, key_length, length = _LENGTHS.unpack_from(head, _CHECKSUM.size)
                end = self.size + _HEAD_BYTES + key_length + length
                if end > size:
                    break
                body = file.read(key_length + length)
                if zlib.crc32(body, zlib.crc32(head[_CHECKSUM.size :])) != _CHECKSUM.unpack_from(head)[0]:
                    break
                self.size, key = end, body[:key_length]
                if kind != _LATER:
                    found.pop(key, None)
                if kind != _ENDED:
                    found.setdefault(key, []).append(body[key_length:])
        if self.size < size:
            os.ftruncate(self._descriptor, self.size)
        self.unfinished |= found.keys()
        return found

    def empty(self) -> None:
        os.ftruncate(self._descriptor, len(_FORMAT))
        self.size = len(_FORMAT)

    def remove(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)


def _take_over(folder: Path) -> list[tuple[_File, dict[bytes, list[bytes]]]]:
    """Lock and read the files of dead processes, oldest first; remove files without unfinished episodes."""
    taken = []
    for path in sorted(folder.glob(f"*{_SUFFIX}"), key=_changed_at_ns):
        file = None
        try:
            file = _File(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))
            if not file.lock():
                file.close()
            elif records := file.read():
                taken.append((file, records))
            else:
                file.remove()
        except FileNotFoundError:  # removed meanwhile by its process
            pass
        except (OSError, ValueError) as e:
            logger.warning("can't read %s: %s; its episodes start from scratch. Remove the file", path, e)
            if file is not None:
                file.close()
    return taken


def _changed_at_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # removed meanwhile
        return 0
