"""Raw system calls and prctl, through the C library that this process already has.

Knows nothing of what the calls mean. Can be imported on every POSIX system; only Linux has the calls.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)
_PRCTL_ARGUMENTS = 5  # prctl refuses some options unless what they don't use is zero


def _called(name: str, result: type[ctypes.c_int] | type[ctypes.c_long], *args: int) -> int:
    """Call a function of the C library with integers as wide as a register.

    Raises:
        OSError: The call returned -1; or ENOSYS, this is not Linux, where the numbers would mean something else.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"{name} was called on {sys.platform}; it needs Linux")
    function = getattr(_LIBC, name)
    function.restype = result
    value: int = function(*map(ctypes.c_long, args))
    if value == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}{args}: {os.strerror(code)}")
    return value


def syscall(number: int, *args: int) -> int:
    """Make a system call; pointers are given as addresses, of memory that the caller keeps alive.

    Raises:
        OSError: The kernel refused; `errno` says why.
    """
    return _called("syscall", ctypes.c_long, number, *args)


def prctl(option: int, *args: int) -> int:
    """Call prctl; arguments that are left out are zero.

    Raises:
        OSError: The kernel refused; `errno` says why.
    """
    padding = (0,) * (_PRCTL_ARGUMENTS - 1 - len(args))
    return _called("prctl", ctypes.c_int, option, *args, *padding)
