"""The lines of a text file, plain or compressed by gzip, that may still be written to.

Knows bytes; nothing of what a line says.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from strands_rollout.errors import DumpError

_CHUNK_BYTES: Final = 1 << 18
_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS


def read_lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Each line that is not blank, one at a time.

    Yields:
        Its number from 1, the line without its end, and whether its end is there: the last one of a run that writes, or
        was killed, may be half a line.

    Raises:
        DumpError: The file can't be read, or is damaged.
    """
    number = 0
    begun: list[bytes] = []  # a line may be far longer than a chunk
    for chunk in _unpacked(path):
        if b"\n" not in chunk:
            begun.append(chunk)
            continue
        *whole, rest = b"".join([*begun, chunk]).split(b"\n")
        begun = [rest]
        for line in whole:
            number += 1
            if line.strip():
                yield number, line, True
    rest = b"".join(begun)
    if rest.strip():
        yield number + 1, rest, False


def _unpacked(path: Path) -> Iterator[bytes]:
    if path.suffix != ".gz":
        yield from _chunks(path)
        return
    unpack = zlib.decompressobj(_GZIP_WINDOW)
    try:
        for chunk in _chunks(path):
            packed = chunk
            while packed:
                yield unpack.decompress(packed)
                packed = unpack.unused_data
                if unpack.eof:
                    unpack = zlib.decompressobj(_GZIP_WINDOW)  # files put one behind the other
    except zlib.error as e:
        raise DumpError(f"{path} is damaged: {e}; expected gzip, as its name ends in .gz") from e


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except OSError as e:
        raise DumpError(f"can't read {path}: {e.strerror}") from e
