"""Measure and delete the working directories of code, and keep the access times of shared files from changing.

The code may change its directory at any moment. Every step therefore uses directory descriptors and follows no links.
Thus only entries of the directory itself are measured or deleted, even if the code renames entries meanwhile. No depth
of nesting, number of files or missing permission stops the deletion.
"""

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

RESERVE_BYTES: Final = 256 * 1024 * 1024  # a disk with fewer free bytes, or fewer free files, counts as full
RESERVE_FILES: Final = 1024
MAX_DEPTH: Final = 32  # nested directories; measuring holds a descriptor for each

_SLICE: Final = 128  # directory entries to measure between two yields: well below a millisecond of work
_UNLIMITED: Final = 1 << 62
_OPEN_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_O_NOATIME: Final[int] = getattr(os, "O_NOATIME", 0)  # only Linux has O_NOATIME and O_PATH
_O_PATH: Final[int] = getattr(os, "O_PATH", 0)
_VANISHED_ERRORS: Final = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}  # the entry was deleted or replaced meanwhile
_RESOURCE_ERRORS: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


@dataclass(slots=True)
class Usage:
    """Disk usage of a directory."""

    disk_bytes: int = 0  # allocated; a file with several names counts once
    entries: int = 0  # files, directories and links
    is_incomplete: bool = False  # an entry vanished during the measurement; another entry may have been missed
    fault: str | None = None  # text for `killed_by` if the code has made the directory unmeasurable
    _seen: set[int] = field(default_factory=set, repr=False)

    def count(self, entry: os.stat_result) -> None:
        """Add one entry."""
        self.entries += 1
        if entry.st_ino not in self._seen:
            self._seen.add(entry.st_ino)
            self.disk_bytes += entry.st_blocks * 512


class _StopMeasuringError(Exception):
    """Ends a measurement early: a limit was exceeded, or the directory can't be measured."""


def free_space(folder: str) -> tuple[int, int]:
    """Return how many bytes and files ordinary users can still add to a directory's file system."""
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize if status.f_blocks else _UNLIMITED  # a tmpfs may have no limit
    return free_bytes, status.f_favail if status.f_files else _UNLIMITED


def is_scarce(free: tuple[int, int]) -> bool:
    """Return whether the disk counts as full; `free` has the numbers of free bytes and free files."""
    return free[0] < RESERVE_BYTES or free[1] < RESERVE_FILES


def measure(folder: str, max_bytes: int, max_entries: int) -> Generator[Usage, None, None]:
    """Measure a directory in slices, and stop soon after a limit is exceeded.

    Yields:
        The same `Usage` after each slice; at the end it is complete, unless `is_incomplete` is set, or a limit or a
        fault stopped the measurement. Close the iterator if it is not exhausted: it holds descriptors.

    Raises:
        OSError: This process lacks descriptors or memory.
    """
    used = Usage()
    with contextlib.suppress(_StopMeasuringError):
        yield from _measure_folder(used, (max_bytes, max_entries), folder, None, 0)
    yield used


def _measure_folder(used: Usage, limits: tuple[int, int], name: str, parent: int | None, depth: int) -> Iterator[Usage]:
    if depth > MAX_DEPTH:
        used.fault = f"more than {MAX_DEPTH} folders inside each other"
        raise _StopMeasuringError
    inner = []
    try:
        with _open_folder(name, parent) as folder:
            with os.scandir(folder) as listing:
                for number, entry in enumerate(listing, 1):
                    try:
                        used.count(entry.stat(follow_symlinks=False))
                        if entry.is_dir(follow_symlinks=False):
                            inner.append(entry.name)
                    except OSError as e:
                        _record_error(used, e)
                    if used.disk_bytes > limits[0] or used.entries > limits[1]:
                        raise _StopMeasuringError
                    if number % _SLICE == 0:
                        yield used
            for inside in inner:
                yield from _measure_folder(used, limits, inside, folder, depth + 1)
    except OSError as e:
        _record_error(used, e)
    yield used


def _record_error(used: Usage, error: OSError) -> None:
    if error.errno in _RESOURCE_ERRORS:  # this process is at fault, not the code
        raise error
    if error.errno not in _VANISHED_ERRORS:
        used.fault = f"a folder that can't be looked into ({error.strerror})"
        raise _StopMeasuringError
    used.is_incomplete = True


@contextlib.contextmanager
def _open_folder(name: str, parent: int | None) -> Iterator[int]:
    """Open a directory, if possible without changing its access time: a change would reveal the measurement."""
    try:
        folder = os.open(name, _OPEN_FLAGS | _O_NOATIME, dir_fd=parent)
    except PermissionError:  # only the owner, and root with CAP_FOWNER, may use O_NOATIME
        folder = os.open(name, _OPEN_FLAGS, dir_fd=parent)
    try:
        yield folder
    finally:
        os.close(folder)


def delete(folder: str) -> bool:
    """Delete a directory with its contents; return False if an entry can't be deleted."""
    try:
        os.rmdir(folder)  # noqa: PTH106 - most directories are empty
    except FileNotFoundError:
        return True
    except OSError:
        try:
            _make_accessible(folder, None)
            with _open_folder(folder, None) as top:
                _empty(top)
            os.rmdir(folder)  # noqa: PTH106
        except OSError:  # in a weaker mode, a process that escaped may still be using it
            return False
    return True


def _empty(top: int) -> None:
    prefix, serial = secrets.token_hex(8), 0
    while names := os.listdir(top):
        for name in names:
            if _try_remove(name, top):
                continue
            _make_accessible(name, top)
            with _open_folder(name, top) as folder:
                for inner in os.listdir(folder):  # noqa: PTH208 - a descriptor
                    if not _try_remove(inner, folder):
                        _make_accessible(inner, folder)  # a rename rewrites its "..", which needs write permission
                        # move it up: in a deep tree, recursion would run out of descriptors or depth
                        serial += 1
                        os.rename(inner, f"{prefix}-{serial}", src_dir_fd=folder, dst_dir_fd=top)
            os.rmdir(name, dir_fd=top)


def _try_remove(name: str, parent: int) -> bool:
    try:
        os.unlink(name, dir_fd=parent)
    except (IsADirectoryError, PermissionError):  # macOS raises PermissionError for a directory
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError:
            return False
    return True


def _make_accessible(name: str, parent: int | None) -> None:
    if not _O_PATH:
        os.chmod(name, 0o700, dir_fd=parent, follow_symlinks=False)
        return
    folder = os.open(name, _OPEN_FLAGS | _O_PATH, dir_fd=parent)
    try:
        if os.fstat(folder).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{folder}", 0o700)  # noqa: PTH101 - fchmod refuses such a descriptor
    finally:
        os.close(folder)


_DAY_S: Final = 24 * 3600
_MIN_WAIT_S: Final = 10.0


def refresh_access_times(paths: Iterable[str]) -> float:
    """Read every file below `paths` whose access time the next read would change.

    A run must not leave a message in the access times of files that all code can read. With `relatime`, Linux's
    default, reading a file changes its access time in two cases only: the access time is a day old, or it is older
    than the file's last change. This function reads all such files. Then no read by code changes an access time until
    the next call is due.

    Args:
        paths: Files and directories.

    Returns:
        Seconds until the next call is due.
    """
    now = time.time()
    oldest = now
    pending = list(paths)
    while pending:
        path = pending.pop()
        with contextlib.suppress(OSError):  # a file that is unreadable here is unreadable for code
            status = os.lstat(path)
            is_due = status.st_atime <= max(status.st_mtime, status.st_ctime) or now - status.st_atime >= _DAY_S
            if stat.S_ISDIR(status.st_mode):
                with os.scandir(path) as listing:  # updates the directory's access time
                    pending += [entry.path for entry in listing]
            elif is_due and stat.S_ISLNK(status.st_mode):
                os.readlink(path)  # noqa: PTH115
            elif is_due and stat.S_ISREG(status.st_mode):
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    os.pread(file, 1, status.st_size)  # at the end: updates the access time, but reads no content
                finally:
                    os.close(file)
            if not is_due:
                oldest = min(oldest, status.st_atime)
    return max(_MIN_WAIT_S, oldest + _DAY_S - time.time())
