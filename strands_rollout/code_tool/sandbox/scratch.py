"""The directories in which code works: measured while it runs, deleted afterwards.

Also the access times of shared files, in which code could leave messages: see `settle`.

The code may change its directory at any moment. Every step therefore goes by directory descriptors and follows no link:
what is measured or deleted lies in the directory, whatever is renamed meanwhile. No depth of nesting, number of files
or missing permission stops the deletion.
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

RESERVE_BYTES: Final = 256 * 1024 * 1024  # a disk with less than this free counts as full
RESERVE_FILES: Final = 1024
MAX_DEPTH: Final = 32  # directories inside each other; while they are measured each costs a descriptor

_SLICE: Final = 128  # entries of one directory between two yields: well below a millisecond
_ENDLESS: Final = 1 << 62
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_O_NOATIME: Final[int] = getattr(os, "O_NOATIME", 0)  # only Linux has these two
_O_PATH: Final[int] = getattr(os, "O_PATH", 0)
_MOVED: Final = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}  # it was there when it was listed
_OUT_OF_MEANS: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


@dataclass(slots=True)
class Usage:
    """What a directory holds."""

    disk_bytes: int = 0  # allocated; a file counts once, whatever number of names it has
    entries: int = 0  # files, directories and links
    moved: bool = False  # something vanished while it was measured, so that something else may have been missed
    fault: str | None = None  # what the code did that keeps the directory from being measured
    _seen: set[int] = field(default_factory=set, repr=False)

    def count(self, entry: os.stat_result) -> None:
        """Add one entry."""
        self.entries += 1
        if entry.st_ino not in self._seen:
            self._seen.add(entry.st_ino)
            self.disk_bytes += entry.st_blocks * 512


class _EnoughError(Exception):
    """Nothing more needs to be measured."""


def free_space(folder: str) -> tuple[int, int]:
    """Bytes and files that ordinary users can still have on a directory's file system."""
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize if status.f_blocks else _ENDLESS  # a tmpfs may have no limit
    return free_bytes, status.f_favail if status.f_files else _ENDLESS


def is_scarce(free: tuple[int, int]) -> bool:
    """Whether this much, as `free_space` gives it, counts as a full disk."""
    return free[0] < RESERVE_BYTES or free[1] < RESERVE_FILES


def measure(folder: str, max_bytes: int, max_entries: int) -> Generator[Usage, None, None]:
    """Measure a directory slice by slice; ends soon after a limit is passed, however much there is.

    Yields:
        The same `Usage` each time, complete when nothing follows. Close the iterator if it is not exhausted: it holds
        descriptors.
    """
    used = Usage()
    with contextlib.suppress(_EnoughError):
        yield from _measured(used, (max_bytes, max_entries), folder, None, 0)
    yield used


def _measured(used: Usage, limits: tuple[int, int], name: str, parent: int | None, depth: int) -> Iterator[Usage]:
    if depth > MAX_DEPTH:
        used.fault = f"more than {MAX_DEPTH} folders inside each other"
        raise _EnoughError
    inner = []
    try:
        with _opened(name, parent) as folder:
            with os.scandir(folder) as listing:
                for number, entry in enumerate(listing, 1):
                    try:
                        used.count(entry.stat(follow_symlinks=False))
                        if entry.is_dir(follow_symlinks=False):
                            inner.append(entry.name)
                    except OSError as e:
                        _note(used, e)
                    if used.disk_bytes > limits[0] or used.entries > limits[1]:
                        raise _EnoughError
                    if number % _SLICE == 0:
                        yield used
            for inside in inner:
                yield from _measured(used, limits, inside, folder, depth + 1)
    except OSError as e:
        _note(used, e)
    yield used


def _note(used: Usage, error: OSError) -> None:
    """Take an error as what it says about the code."""
    if error.errno in _OUT_OF_MEANS:
        raise error
    if error.errno not in _MOVED:
        used.fault = f"a folder that can't be looked into ({error.strerror})"
        raise _EnoughError
    used.moved = True


@contextlib.contextmanager
def _opened(name: str, parent: int | None) -> Iterator[int]:
    """A descriptor of a directory; looking through it leaves no access time, by which the code could see the look."""
    try:
        folder = os.open(name, _OPEN | _O_NOATIME, dir_fd=parent)
    except PermissionError:  # for O_NOATIME one must own it, or be root with CAP_FOWNER
        folder = os.open(name, _OPEN, dir_fd=parent)
    try:
        yield folder
    finally:
        os.close(folder)


def delete(folder: str) -> bool:
    """Delete a directory with all that it holds; False where something can't be deleted.

    Deep trees are flattened level by level instead of being descended: neither descriptors nor recursion run out.
    """
    try:
        os.rmdir(folder)  # noqa: PTH106 - most code leaves nothing there
    except FileNotFoundError:
        return True
    except OSError:
        try:
            _make_accessible(folder, None)
            with _opened(folder, None) as top:
                _empty(top)
            os.rmdir(folder)  # noqa: PTH106
        except OSError:  # in a weaker mode a process that escaped may still be at work in it
            return False
    return True


def _empty(top: int) -> None:
    prefix, serial = secrets.token_hex(8), 0
    while names := os.listdir(top):
        for name in names:
            if _removed(name, top):
                continue
            _make_accessible(name, top)
            with _opened(name, top) as folder:
                for inner in os.listdir(folder):  # noqa: PTH208 - a descriptor
                    if not _removed(inner, folder):
                        _make_accessible(inner, folder)  # moving rewrites its "..", which needs the right to write
                        serial += 1
                        os.rename(inner, f"{prefix}-{serial}", src_dir_fd=folder, dst_dir_fd=top)
            os.rmdir(name, dir_fd=top)


def _removed(name: str, parent: int) -> bool:
    """Delete what is no directory, or an empty one."""
    try:
        os.unlink(name, dir_fd=parent)
    except (IsADirectoryError, PermissionError):  # the latter on macOS
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError:
            return False
    return True


def _make_accessible(name: str, parent: int | None) -> None:
    """Take all rights to a directory; never those of what a link leads to."""
    if not _O_PATH:
        os.chmod(name, 0o700, dir_fd=parent, follow_symlinks=False)
        return
    folder = os.open(name, _OPEN | _O_PATH, dir_fd=parent)
    try:
        if os.fstat(folder).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{folder}", 0o700)  # noqa: PTH101 - fchmod refuses such a descriptor
    finally:
        os.close(folder)


_DAY_S: Final = 24 * 3600
_LEAST_WAIT_S: Final = 10.0


def settle(paths: Iterable[str]) -> float:
    """Read all that would get a new access time when it is read, in files and directories with all that lies beneath.

    No run may leave a message in the times of files that all code may read. With `relatime`, Linux's default, reading a
    file changes its access time only if that is a day old, or older than the file's last change. Whatever is in this
    state is therefore read before code does it; after that nothing that code reads changes any time for a day.

    Returns:
        Seconds after which this should be done again.
    """
    now = time.time()
    oldest = now
    pending = list(paths)
    while pending:
        path = pending.pop()
        with contextlib.suppress(OSError):  # what can't be read here can't be read by code
            status = os.lstat(path)
            is_due = status.st_atime <= max(status.st_mtime, status.st_ctime) or now - status.st_atime >= _DAY_S
            if stat.S_ISDIR(status.st_mode):
                with os.scandir(path) as listing:  # leaves a time
                    pending += [entry.path for entry in listing]
            elif is_due and stat.S_ISLNK(status.st_mode):
                os.readlink(path)  # noqa: PTH115
            elif is_due and stat.S_ISREG(status.st_mode):
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    os.pread(file, 1, status.st_size)  # at the end: leaves the time, and needs none of the content
                finally:
                    os.close(file)
            if not is_due:
                oldest = min(oldest, status.st_atime)
    return max(_LEAST_WAIT_S, oldest + _DAY_S - time.time())
