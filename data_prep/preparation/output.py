"""Files that are either whole or not there: written beside their place, synced, then renamed."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from preparation.rows import PreparationError


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A new file in the folder of `path`, hidden and named `.partial`, which is gone afterwards unless `finish`ed.

    What a killed run left of the same file is removed first: its lock is free.

    Raises:
        PreparationError: The folder or the file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    except OSError as e:
        raise PreparationError(f"can't write in {path.parent}: {e.strerror}; name another file with --out") from e
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks; then nothing is cleaned up there
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield Path(name)
    except OSError as e:
        raise PreparationError(f"can't write {path}: {e.strerror}") from e
    finally:
        Path(name).unlink(missing_ok=True)
        os.close(handle)


def finish(written: Path, path: Path) -> None:
    """Bring the file to the disk and to its name, in one step for whoever looks."""
    written.chmod(0o644)
    with written.open("rb") as file:
        os.fsync(file.fileno())
    written.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_whole(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file in one step."""
    with unfinished(path) as partial:
        with partial.open("wb") as file:
            file.writelines(lines)
        finish(partial, path)


def sha256_of(*paths: Path) -> str:
    """Hex digest of the bytes of a file, or of several in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def _remove_abandoned(path: Path) -> None:
    for stale in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        with contextlib.suppress(OSError), stale.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its writer lives
            stale.unlink()
