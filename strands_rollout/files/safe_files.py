"""Safe access to files that others may have created or opened.

The functions check that a file is regular, read it up to a maximum size, lock it, or replace it atomically.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from strands_rollout.errors import ConfigError

_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (lambda _: True, "a device"),
)


def open_regular(path: Path | str) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Named pipes and devices are not opened: opening a pipe would wait for a writer, and some devices never end.

    Raises:
        OSError: The file can't be opened or is not a regular file, or the path is invalid; `strerror` is the reason.
    """
    try:
        _check_regular(Path(path).stat(), path)
        # Open without blocking: the path may have become a pipe after the check
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
    """Return the content of a regular file of at most `max_bytes` bytes.

    Raises:
        OSError: As in `open_regular`, or the file is larger than `max_bytes`.
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


def open_exclusive(path: Path) -> int:
    """Open or create a file for reading and appending, with a lock until the file is closed.

    Returns:
        The file's descriptor.

    Raises:
        ConfigError: The file can't be opened or locked, or another process holds its lock.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as e:
        raise ConfigError(f"can't open {path}: {e.strerror}; choose another folder with --out") from e
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(file)
        if e.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            raise ConfigError(f"{path} is in use by another run ({e.strerror}); wait, or choose another --out") from e
        raise ConfigError(
            f"can't lock {path}: {e.strerror}; choose an --out on a file system that supports locks"
        ) from e
    return file


def write_all(file: io.RawIOBase | io.BufferedIOBase, data: bytes) -> None:
    """Write data with one call and check that all of it was written.

    Raises:
        OSError: The data can't be written completely.
    """
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def atomic_replacement(path: Path) -> Iterator[Path]:
    """Yield the path for a temporary file, which replaces `path` after the block, or is removed after an error."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:  # remove the incomplete file, whatever ended the block
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
