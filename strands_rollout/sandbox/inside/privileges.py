"""Giving up root: another user, and no capabilities."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final

from strands_rollout.sandbox.inside.libc import syscall
from strands_rollout.sandbox.inside.syscalls import syscall_numbers

_CAPABILITY_VERSION_3: Final = 0x20080522


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


def drop_capabilities() -> None:
    """Give up all capabilities of the calling process, whose user stays what it is.

    Raises:
        OSError: The kernel refuses.
    """
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    none = ctypes.create_string_buffer(24)  # effective, permitted and inheritable, 32 bits each, twice
    number = syscall_numbers(os.uname().machine)["capset"]
    syscall(number, ctypes.addressof(header), ctypes.addressof(none))
