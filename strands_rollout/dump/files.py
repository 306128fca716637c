"""The files of dumps: samples are read one after the other, and written one at a time.

A file may still be written to while it is read, and each sample is on its way to the disk before the next one comes.
"""

import gzip
import hashlib
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, Self

from strands_rollout.dump.record import HEAD_KEY, DumpRecord, read_line, record_line, slime_record
from strands_rollout.dump.torch_file import read_torch_file
from strands_rollout.errors import ConfigError, DumpError
from strands_rollout.files import open_regular
from strands_rollout.samples import SampleLike
from strands_rollout.secret_mask import secret_values

# No sample is so long, and gzip makes one of a thousandth of its bytes.
_MAX_LINE_BYTES: Final = 1 << 28
_LINES: Final = (".jsonl", ".jsonl.gz")
_TORCH: Final = (".pt", ".pth")
_FIRST: Final = 16
_KINDS: Final = ", ".join([*_LINES, *_TORCH])


def read_lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Each line that is not blank: its number from 1, the line, and whether its end is there.

    The last line of a run that writes, or was killed, may be half a line. DumpError where the file can't be read.
    """
    number = 0
    try:
        with open_regular(path) as packed:
            file = gzip.GzipFile(fileobj=packed) if path.suffix == ".gz" else packed
            while line := file.readline(_MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > _MAX_LINE_BYTES:
                    raise DumpError(f"{path}:{number} has more than {_MAX_LINE_BYTES} bytes; expected one sample")
                if line.strip():
                    yield number, line, line.endswith(b"\n")
    except EOFError:
        return  # the end of a gzip file that is still written, or was cut
    except (zlib.error, gzip.BadGzipFile) as e:
        raise DumpError(f"{path} is damaged: {e}; expected gzip, as its name ends in .gz") from e
    except OSError as e:
        raise DumpError(f"can't read {path}: {e.strerror}") from e


@dataclass(frozen=True, slots=True)
class UnreadSample:
    """A sample of a dump before anything of it is parsed.

    Its key is its place and its content. `read` gives the record, None of a last line that is half written, or raises
    DumpError.
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
        if record := sample.read():
            yield record


def recorded_tokenizer(path: Path) -> Path:
    """The folder of the tokenizer that a dump's first samples name; ConfigError where there is none on this machine."""
    found = next((record.tokenizer for record in islice(read_dump(path), _FIRST) if record.tokenizer), None)
    if found is not None and (folder := found.folder):
        return folder
    got = "no tokenizer" if found is None else f"the tokenizer {found.name}, which is no folder on this machine"
    raise ConfigError(f"{path} names {got}; pass that of the policy with --tokenizer DIR")


def unread_samples(path: Path) -> Iterator[UnreadSample]:
    """What `read_dump` reads, for readers that have seen most of it already; broken lines raise when they are read."""
    files = dump_files(path)
    if not files:
        raise DumpError(f"{path} holds no dump; expected files that end in {_KINDS}")
    for file in files:
        if file.name.endswith(_LINES):
            for number, line, is_whole in read_lines(file):
                where = f"{file}:{number}"
                key = where, hashlib.blake2b(line, digest_size=16).digest()
                yield UnreadSample(key, partial(_read_line, line, where, is_whole=is_whole))
        else:
            samples, now = read_torch_file(file), str(file.stat().st_mtime_ns).encode()
            for position, values in enumerate(samples):
                where = f"{file}[{position}]"
                yield UnreadSample((where, now), partial(slime_record, values, where))


def _read_line(line: bytes, where: str, *, is_whole: bool) -> DumpRecord | None:
    try:
        return read_line(line, where)
    except DumpError:
        if is_whole:
            raise
        return None


def dump_files(path: Path) -> list[Path]:
    """The files that `read_dump` reads, in order; of a folder those that hold samples, rollout 2 before rollout 10."""
    if not path.is_dir():
        return [path]
    named = [file for file in path.iterdir() if file.name.endswith((*_LINES, *_TORCH)) and file.is_file()]

    def in_order(path: Path) -> list[tuple[bool, int, str]]:
        parts = re.split(r"(\d+)", path.name)
        return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]

    return sorted((file for file in named if _begins_with_a_sample(file)), key=in_order)


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


class DumpWriter:
    """A new dump, open for writing; a context manager.

    Args:
        path: Ends in `.jsonl`, or in `.jsonl.gz` for a compressed one; must not be there. Its folder is made.
        secrets: Texts that are masked wherever they stand in a sample's texts; default: those of the environment.

    Raises:
        DumpError: It has another ending, is there, or can't be written.
    """

    def __init__(self, path: Path, secrets: Collection[str] | None = None) -> None:
        self._secrets = secret_values(os.environ) if secrets is None else secrets
        if not path.name.endswith(_LINES):
            raise DumpError(f"got the dump {path}; expected a name that ends in .jsonl or .jsonl.gz")
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = gzip.open(path, "xb") if path.suffix == ".gz" else path.open("xb", buffering=0)  # noqa: SIM115
        except OSError as e:
            raise DumpError(f"can't write the dump to {path}: {e.strerror}; choose another place") from e

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, sample: SampleLike | DumpRecord, token_texts: Mapping[int, bytes] | None = None) -> None:
        """Write one sample, slime's, ours, or a record of another dump.

        Args:
            sample: Finished or not.
            token_texts: Bytes of token ids, for readers without the tokenizer; see `TokenTexts`.

        Raises:
            DumpError: It holds what has no form in JSON, or can't be written; whole lines before it are kept.
        """
        record = sample if isinstance(sample, DumpRecord) else DumpRecord.from_sample(sample, token_texts)
        line = record_line(record, self._secrets)
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as e:
            raise DumpError(f"can't write to {self.path}: {e.strerror}; what is there is kept") from e


def write_dump(
    path: Path,
    samples: Iterable[SampleLike | DumpRecord],
    token_texts: Mapping[int, bytes] | None = None,
    secrets: Collection[str] | None = None,
) -> None:
    """Write a new dump of these samples; see `DumpWriter`."""
    with DumpWriter(path, secrets) as writer:
        for sample in samples:
            writer.write(sample, token_texts)
