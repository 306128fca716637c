"""Disk space that a process holds in files without a name: deleted ones that are still open or mapped.

No look into its directory finds them. /proc/PID/fd and maps show them to whoever is of the process's own user
(proc(5), ptrace(2): PTRACE_MODE_READ_FSCREDS), so that is what the calling thread is for a moment (setfsuid(2)).
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from strands_rollout.sandbox.inside.libc import syscall
from strands_rollout.sandbox.inside.syscalls import syscall_numbers


def unnamed_bytes(pid: int, user: int | None, mapped_file_bytes: int) -> int:
    """Bytes on disk in a process's unnamed files; 0 where that can't be seen.

    Args:
        pid: The process.
        user: Its user; None where that is ours.
        mapped_file_bytes: What a file that is mapped and no longer open counts: its size can't be seen.
    """
    if sys.platform != "linux":
        return 0
    with contextlib.suppress(OSError), _files_as(user):
        held = _open_files(pid)
        mapped = _mapped_files(pid) - held.keys()
        return sum(held.values()) + len(mapped) * mapped_file_bytes
    return 0


def _open_files(pid: int) -> dict[tuple[int, int], int]:
    """Unnamed files behind a process's descriptors: (device, inode) -> bytes."""
    found = {}
    folder = f"/proc/{pid}/fd"
    for number in os.listdir(folder):  # noqa: PTH208 - each 50 ms for each child
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(f"{folder}/{number}")  # noqa: PTH116
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return found


def _mapped_files(pid: int) -> set[tuple[int, int]]:
    """Unnamed files in a process's memory: (device, inode)."""
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
        if line.endswith(b" (deleted)"):
            _, _, _, device, inode, *_ = line.split(maxsplit=5)
            major, minor = device.split(b":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return found


@contextlib.contextmanager
def _files_as(user: int | None) -> Iterator[None]:
    """Be another user and group to the file system, in this thread alone; what is called must not wait."""
    if user is None:
        yield
        return
    numbers = syscall_numbers(os.uname().machine)
    user_before = syscall(numbers["setfsuid"], user)
    group_before = syscall(numbers["setfsgid"], user)
    try:
        yield
    finally:
        syscall(numbers["setfsuid"], user_before)
        syscall(numbers["setfsgid"], group_before)
