"""Files that are there whole or not at all, and their checksums."""

import contextlib
import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from preparation.rows import PreparationError


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A hidden file beside `path`, which takes its name when the block ends without an error.

    Raises:
        PreparationError: It can't be written.
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
    """Hex digest of the bytes of a file, or of several in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
