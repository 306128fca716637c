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
from typing import Final

from strands_rollout.sandbox.inside.libc import syscall
from strands_rollout.sandbox.inside.syscalls import syscall_numbers

_MAX_MAPS_BYTES: Final = 1 << 20  # ten times what numpy and sympy come to


class TooManyMappingsError(Exception):
    """A process has mapped more pieces of memory than anybody needs."""


def unnamed_bytes(pid: int, user: int | None, mapped_file_bytes: int) -> int:
    """Bytes on disk in a process's unnamed files; 0 where that can't be seen.

    Args:
        pid: The process.
        user: Its user; None where that is ours.
        mapped_file_bytes: What a file that is mapped and no longer open counts: its size can't be seen.

    Raises:
        TooManyMappingsError: To look through its memory would take too long.
    """
    if sys.platform != "linux":
        return 0
    with contextlib.suppress(OSError), _files_as(user):
        thread = _living_thread(pid)
        held = _open_files(thread)
        mapped = _mapped_files(thread) - held.keys()
        return sum(held.values()) + len(mapped) * mapped_file_bytes
    return 0


def _living_thread(pid: int) -> str:
    """The folder in /proc of a thread that has not ended: the first one may, and the others go on."""
    for number in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - each 50 ms for each child
        folder = f"/proc/{pid}/task/{number}"
        with contextlib.suppress(OSError):
            if os.listdir(f"{folder}/fd"):  # noqa: PTH208
                return folder
    raise ProcessLookupError(f"process {pid} has no thread left")


def _open_files(thread: str) -> dict[tuple[int, int], int]:
    """Unnamed files behind a process's descriptors: (device, inode) -> bytes."""
    found = {}
    for number in os.listdir(f"{thread}/fd"):  # noqa: PTH208
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(f"{thread}/fd/{number}")  # noqa: PTH116
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return found


def _mapped_files(thread: str) -> set[tuple[int, int]]:
    """Unnamed files in a process's memory: (device, inode)."""
    found = set()
    with open(f"{thread}/maps", "rb") as maps:  # noqa: PTH123
        listing = maps.read(_MAX_MAPS_BYTES)
    if len(listing) == _MAX_MAPS_BYTES:
        raise TooManyMappingsError
    for line in listing.splitlines():
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
