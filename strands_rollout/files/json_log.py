"""Logs with one JSON value per line; a log can be read while it grows, and continued after its writer was killed."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.files.safe_files import open_exclusive, write_all


class JsonLog:
    """An append-only file with one writing process at a time; each line is written with one call.

    A partial last line, left by a killed writer or a full disk, is dropped when the file is opened.

    Args:
        path: The file, created if missing.
        remedy: Advice at the end of the message if a line can't be written.

    Attributes:
        dropped_bytes: Bytes of the dropped partial last line; 0 if there was none.

    Raises:
        ConfigError: The file can't be opened or written to, or another process has it open.
    """

    def __init__(self, path: Path, *, remedy: str) -> None:
        self.path = path
        self._remedy = remedy
        with ExitStack() as stack:
            self._file = stack.enter_context(os.fdopen(open_exclusive(path), "ab", buffering=0))
            self.dropped_bytes = self._drop_partial_line()
            stack.pop_all()

    def close(self) -> None:
        """Close the file, so that another process can open it."""
        self._file.close()

    @property
    def is_empty(self) -> bool:
        """True if the file is empty."""
        return not os.fstat(self._file.fileno()).st_size

    def append(self, line: bytes) -> None:
        """Write a line, which must end with a line feed.

        Raises:
            RolloutError: The line can't be written completely.
        """
        try:
            write_all(self._file, line)
        except OSError as e:
            raise RolloutError(f"can't write to {self.path}: {e.strerror}; {self._remedy}") from e

    def keep_first(self, count: int) -> None:
        """Drop all lines after the first `count`.

        Raises:
            ConfigError: The file can't be written to.
        """
        self._truncate(sum(map(len, islice(complete_lines(self.path), count))))

    def _drop_partial_line(self) -> int:
        if self.is_empty:
            return 0
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            size, complete = len(content), content.rfind(b"\n") + 1
        self._truncate(complete)
        return size - complete

    def _truncate(self, size: int) -> None:
        try:
            self._file.truncate(size)
        except OSError as e:
            raise ConfigError(f"can't write {self.path}: {e.strerror}; choose another folder with --out") from e


def complete_lines(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a log, which may be growing; a partial last line is left out.

    Raises:
        OSError: The file can't be read.
    """
    with path.open("rb") as lines:
        yield from (line for line in lines if line.endswith(b"\n"))
