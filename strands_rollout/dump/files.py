"""The samples of a dump, one after the other.

Knows which kinds of files there are; of each, only who reads it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from strands_rollout.dump.lines import read_lines
from strands_rollout.dump.record import HEAD_KEY, DumpRecord, read_line, slime_record
from strands_rollout.dump.torch_file import read_torch_file
from strands_rollout.errors import DumpError

_LINES: Final = (".jsonl", ".jsonl.gz")
_TORCH: Final = (".pt", ".pth")
_KINDS: Final = ", ".join([*_LINES, *_TORCH])


@dataclass(frozen=True, slots=True)
class UnreadSample:
    """A sample of a dump before anything of it is parsed.

    Attributes:
        key: Its place and its content: equal where both are.
        read: The record; None of the last line of a file where it is half written. Raises DumpError.
    """

    key: tuple[str, bytes]
    read: Callable[[], DumpRecord | None]


def read_dump(path: Path) -> Iterator[DumpRecord]:
    """The samples of a file, or of all dumps in a folder, as they come; memory is one sample's, but for slime's files.

    The last line of a file is left out where it is half written. In a folder, a file whose first line is no sample is
    another kind of log and is left out.

    Args:
        path: A file of this package's (`.jsonl`, `.jsonl.gz`) or slime's (any other name), or a folder.

    Raises:
        DumpError: There is none, a line is broken (it is named), or slime's file holds what is not read.
    """
    for sample in unread_samples(path):
        record = sample.read()
        if record is not None:
            yield record


def unread_samples(path: Path) -> Iterator[UnreadSample]:
    """What `read_dump` reads, for whoever knows most of it already.

    Raises:
        DumpError: As `read_dump`, but for broken lines.
    """
    files = dump_files(path)
    if not files:
        raise DumpError(f"{path} holds no dump; expected files that end in {_KINDS}")
    for file in files:
        yield from _lines_of(file) if file.name.endswith(_LINES) else _torch_samples(file)


def dump_files(path: Path) -> list[Path]:
    """The files that `read_dump` reads, in order; of a folder those that hold samples, rollout 2 before rollout 10."""
    if not path.is_dir():
        return [path]
    named = [file for file in path.iterdir() if file.name.endswith((*_LINES, *_TORCH)) and file.is_file()]
    return sorted((file for file in named if _begins_with_a_sample(file)), key=_in_order)


def _in_order(path: Path) -> list[tuple[bool, int, str]]:
    parts = re.split(r"(\d+)", path.name)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def _begins_with_a_sample(path: Path) -> bool:
    if not path.name.endswith(_LINES):
        return True
    for number, line, is_whole in read_lines(path):
        try:
            read_line(line, f"{path}:{number}")
        except DumpError:
            # one of a newer version is a dump, and must not be left out in silence
            return is_whole and HEAD_KEY.encode() in line
        return True
    return False


def _lines_of(path: Path) -> Iterator[UnreadSample]:
    for number, line, is_whole in read_lines(path):
        where = f"{path}:{number}"
        key = where, hashlib.blake2b(line, digest_size=16).digest()
        yield UnreadSample(key, partial(_read_whole, line, where, is_whole=is_whole))


def _read_whole(line: bytes, where: str, *, is_whole: bool) -> DumpRecord | None:
    try:
        return read_line(line, where)
    except DumpError:
        if is_whole:
            raise
        return None


def _torch_samples(path: Path) -> Iterator[UnreadSample]:
    samples = read_torch_file(path)
    now = str(path.stat().st_mtime_ns).encode()
    for position, values in enumerate(samples):
        where = f"{path}[{position}]"
        yield UnreadSample((where, now), partial(slime_record, values, where))
