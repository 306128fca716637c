"""Writes dumps, a sample at a time: each is on its way to the disk before the next one comes.

Knows files; the form of a line is the record's.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from strands_rollout.dump.record import DumpRecord, record_line
from strands_rollout.errors import DumpError
from strands_rollout.secret_mask import secret_values


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
        if not path.name.endswith((".jsonl", ".jsonl.gz")):
            raise DumpError(f"got the dump {path}; expected a name that ends in .jsonl or .jsonl.gz")
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("xb", buffering=0)
        except OSError as e:
            raise DumpError(f"can't write the dump to {path}: {e.strerror}; choose another place") from e
        self._packed = gzip.GzipFile(fileobj=self._file, mode="wb", filename="") if path.suffix == ".gz" else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._packed is not None:
            self._packed.close()
        self._file.close()

    def write(self, sample: Any, token_texts: Mapping[int, bytes] | None = None) -> None:  # noqa: ANN401
        """Write one sample, slime's, ours, or a record of another dump.

        Args:
            sample: Finished or not.
            token_texts: Bytes of token ids, for readers without the tokenizer; see `token_texts.TokenTexts`.

        Raises:
            DumpError: It holds what has no form in JSON, or can't be written; whole lines before it are kept.
        """
        record = sample if isinstance(sample, DumpRecord) else DumpRecord.from_sample(sample, token_texts)
        line = record_line(record, self._secrets)
        target: BinaryIO | gzip.GzipFile = self._packed or self._file
        try:
            target.write(line)
            target.flush()
        except OSError as e:
            raise DumpError(f"can't write to {self.path}: {e.strerror}; what is there is kept") from e


def write_dump(
    path: Path,
    samples: Iterable[Any],
    token_texts: Mapping[int, bytes] | None = None,
    secrets: Collection[str] | None = None,
) -> None:
    """Write a new dump of these samples; see `DumpWriter`."""
    with DumpWriter(path, secrets) as writer:
        for sample in samples:
            writer.write(sample, token_texts)
