"""Giving up root: another user, and no capabilities."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final

from strands_rollout.sandbox.inside.libc import prctl, syscall
from strands_rollout.sandbox.inside.syscalls import syscall_numbers

_CAPABILITY_VERSION_3: Final = 0x20080522
_CAP_SETUID: Final = 7
_PR_SET_KEEPCAPS: Final = 8


def can_become(user: int) -> bool:
    """Whether a child of this process can change its user to this number; tried in one."""
    child = os.fork()
    if child == 0:
        try:
            become(user)
            os._exit(0)
        finally:  # this fork must not return, whatever was raised
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def become(user: int) -> None:
    """Change user and group for good, and leave all other groups; as root this drops all capabilities as well.

    Raises:
        OSError: It is not allowed, or the user namespace has no such user.
    """
    os.setgroups([])
    os.setgid(user)  # for root these change the real, the effective and the saved one
    os.setuid(user)


def become_reading_as_root(user: int) -> None:
    """Change the user for good, but for the right to files, which stays root's; for use under Landlock alone.

    For a Python whose files only root may read. File access goes by a user of its own (setfsuid(2)); signals, limits
    and everything else go by the new one, and no capability is left.

    Raises:
        OSError: The kernel refuses.
    """
    numbers = syscall_numbers(os.uname().machine)
    prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    _set_capabilities(1 << _CAP_SETUID)
    syscall(numbers["setfsuid"], 0)
    if syscall(numbers["setfsuid"], 0) != 0:  # it returns the one before, and no errors
        raise PermissionError("setfsuid(0) had no effect")
    _set_capabilities(0)


def drop_capabilities() -> None:
    """Give up all capabilities of the calling process, whose user stays what it is.

    Raises:
        OSError: The kernel refuses.
    """
    _set_capabilities(0)


def _set_capabilities(mask: int) -> None:
    """Make these the effective and the permitted capabilities; capabilities(7) of up to 32."""
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    sets = ctypes.create_string_buffer(struct.pack("6I", mask, mask, 0, 0, 0, 0))
    number = syscall_numbers(os.uname().machine)["capset"]
    syscall(number, ctypes.addressof(header), ctypes.addressof(sets))
