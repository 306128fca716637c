"""Atomic writes and checksums of files."""

import contextlib
import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from preparation.rows import PreparationError


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces `path` if the block ends without an error.

    Raises:
        PreparationError: The file can't be written.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as e:
        raise PreparationError(f"can't write {path}: {e.strerror}; name another file with --out") from e
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def sha256_of(*paths: Path) -> str:
    """Return the SHA-256 hex digest of a file, or of several files in order."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
