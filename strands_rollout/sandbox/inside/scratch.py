"""The directories in which code works: measured while it runs, emptied afterwards.

Nothing here follows a symbolic link out of them, and no depth of nesting, number of files or missing permission stops
the emptying.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from dataclasses import dataclass
from typing import Final

RESERVE_BYTES: Final = 256 * 1024 * 1024  # with less than this free nothing is run


_HIDDEN: Final = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP}  # what lies there could be anything


@dataclass(frozen=True, slots=True)
class Usage:
    """What a directory holds.

    Attributes:
        disk_bytes: Allocated bytes.
        entries: Files, directories and links; too many, where a part of the directory can't be looked into.
    """

    disk_bytes: int
    entries: int


def free_bytes(folder: str) -> int:
    """Bytes that are free to ordinary users on a directory's file system."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def usage(folder: str, max_entries: int) -> Usage:
    """Measure a directory; counting stops soon after `max_entries`, so that it is quick whatever was made there."""
    disk_bytes = entries = 0
    pending = [folder]
    while pending and entries <= max_entries:
        try:
            with os.scandir(pending.pop()) as listing:
                for entry in listing:
                    entries += 1
                    status = entry.stat(follow_symlinks=False)
                    disk_bytes += status.st_blocks * 512
                    if stat.S_ISDIR(status.st_mode):
                        pending.append(entry.path)
                    if entries > max_entries:
                        break
        except (FileNotFoundError, NotADirectoryError):
            continue  # the code has just deleted it
        except OSError as e:
            if e.errno not in _HIDDEN:
                raise
            entries = max_entries + 1
    return Usage(disk_bytes, entries)


def empty(folder: str) -> None:
    """Delete all that a directory holds, and keep the directory itself; no process may be at work in it.

    Deep trees are flattened level by level instead of being descended: neither descriptors nor recursion run out.

    Raises:
        OSError: Something can't be deleted.
    """
    prefix = os.path.join(folder, secrets.token_hex(8))  # noqa: PTH118 - plain strings: it runs after each call
    serial = 0
    while names := os.listdir(folder):  # noqa: PTH208
        for name in names:
            path = os.path.join(folder, name)  # noqa: PTH118
            for inner in _unlink_files(path):
                serial += 1
                os.rename(inner, f"{prefix}-{serial}")  # noqa: PTH104
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(path)  # noqa: PTH106


def delete(folder: str) -> None:
    """Delete a directory with all that it holds, as far as that is possible; it may be gone already."""
    with contextlib.suppress(OSError):  # a process that escaped in a weaker mode may still be at work in it
        empty(folder)
        os.rmdir(folder)  # noqa: PTH106


def _unlink_files(path: str) -> list[str]:
    """Delete a file, or the files of a directory; return the directories in it, ready to be moved."""
    if not _is_directory(path):
        os.unlink(path)  # noqa: PTH108
        return []
    os.chmod(path, 0o700)  # noqa: PTH101
    folders = []
    for name in os.listdir(path):  # noqa: PTH208
        inner = os.path.join(path, name)  # noqa: PTH118
        if _is_directory(inner):
            os.chmod(inner, 0o700)  # noqa: PTH101 - moving rewrites its "..", which needs the right to write
            folders.append(inner)
        else:
            os.unlink(inner)  # noqa: PTH108
    return folders


def _is_directory(path: str) -> bool:
    return stat.S_ISDIR(os.lstat(path).st_mode)
