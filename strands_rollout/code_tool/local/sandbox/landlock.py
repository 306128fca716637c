"""Which files a process may use, whatever its user: a Landlock ruleset.

What no rule admits is refused, with EACCES: nothing may be executed, no TCP port used (from ABI 4 on); and with EPERM
(from ABI 6 on): no abstract Unix socket reached, no process outside signalled. Knows the kernel's interface only, not
what an interpreter needs.
"""

import contextlib
import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterator
from typing import Final

from strands_rollout.code_tool.local.sandbox.kernel import prctl, syscall

WRITE_FILE: Final = 1 << 1
READ_FILE: Final = 1 << 2
READ_DIR: Final = 1 << 3
REMOVE_DIR: Final = 1 << 4
REMOVE_FILE: Final = 1 << 5
MAKE_DIR: Final = 1 << 7
MAKE_REG: Final = 1 << 8
MAKE_SYM: Final = 1 << 12
REFER: Final = 1 << 13  # ABI 2; before it, a rename or link into another directory is always refused
TRUNCATE: Final = 1 << 14  # ABI 3
IOCTL_DEV: Final = 1 << 15  # ABI 5
BIND_TCP: Final = 1 << 0  # ABI 4
CONNECT_TCP: Final = 1 << 1  # ABI 4
ABSTRACT_UNIX_SOCKET: Final = 1 << 0  # ABI 6
SIGNAL: Final = 1 << 1  # ABI 6

NEWEST_ABI: Final = 7
_FILE_RIGHTS: Final = (1 << 13) - 1
_FILE_RIGHTS_SINCE: Final = {2: REFER, 3: TRUNCATE, 5: IOCTL_DEV}
_SCRATCH: Final = (
    READ_FILE | READ_DIR | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SYM | REFER | TRUNCATE
)

# these numbers are the same on every architecture
_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_ASK_VERSION: Final = 1
_PATH_BENEATH: Final = 1
_LOG_SAME_EXEC_OFF: Final = 1  # ABI 7
_PR_SET_NO_NEW_PRIVS: Final = 38
_O_PATH: Final[int] = getattr(os, "O_PATH", 0)  # only Linux has it


def abi_version() -> int:
    """The version of Landlock's interface that the kernel offers; 0 where it has none, or doesn't let us use it."""
    try:
        return syscall(_CREATE_RULESET, 0, 0, _ASK_VERSION)
    except OSError:
        return 0  # ENOSYS, EOPNOTSUPP (not enabled), EPERM (a container's filter): no error makes it usable


class Ruleset:
    """What a process may do with files; made once, then taken on by any number of forked children.

    Handles every right that the ABI knows, so that what no rule admits is refused. The creator's own rights decide
    nothing: rules hold for files and directories as they are found, beneath all names that they have. Without an `abi`
    it is what the kernel offers, at most the newest known; `fd` is closed on exec, and not in forks; -1 if closed.
    """

    def __init__(self, abi: int | None = None) -> None:
        offered = abi_version() if abi is None else abi
        if abi is None and offered == 0:
            raise OSError(errno.EOPNOTSUPP, "the kernel offers no Landlock")
        if offered < 1:
            raise ValueError(f"got Landlock ABI {abi}; expected 1 to {NEWEST_ABI}")
        self.abi = min(offered, NEWEST_ABI)
        self._handled = _FILE_RIGHTS
        for since, right in _FILE_RIGHTS_SINCE.items():
            self._handled |= right if self.abi >= since else 0
        attributes = struct.pack("=Q", self._handled)  # an older kernel refuses what it doesn't know, by its size
        if self.abi >= 4:
            attributes += struct.pack("=Q", BIND_TCP | CONNECT_TCP)
        if self.abi >= 6:
            attributes += struct.pack("=Q", ABSTRACT_UNIX_SOCKET | SIGNAL)
        memory = ctypes.create_string_buffer(attributes, len(attributes))
        self.fd = syscall(_CREATE_RULESET, ctypes.addressof(memory), len(attributes), 0)

    def allow_read(self, path: str) -> None:
        """Admit reading a file, or all that lies beneath a directory; nothing may be executed."""
        with _opened(path) as descriptor:
            is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            self._add(descriptor, READ_FILE | (READ_DIR if is_directory else 0))

    def allow_scratch(self, path: str) -> None:
        """Admit all ordinary work beneath a directory, but no devices, sockets or FIFOs, and no execution."""
        with _opened(path, os.O_DIRECTORY) as descriptor:
            self._add(descriptor, _SCRATCH)

    def allow_device(self, path: str) -> None:
        """Admit reading and writing one node, such as /dev/null."""
        with _opened(path) as descriptor:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise IsADirectoryError(errno.EISDIR, "a device was expected; this is a directory", path)
            self._add(descriptor, READ_FILE | WRITE_FILE)

    def restrict_self(self) -> None:
        """Put the calling thread, and all that it starts from now on, under the rules for good.

        Other threads of the process are left free: the caller should have none. No set-user-id program works
        afterwards. Descriptors that are already open keep their rights. May be called in any number of processes.
        """
        if self.fd < 0:
            raise OSError(errno.EBADF, f"{os.strerror(errno.EBADF)}: the ruleset is closed")
        prctl(_PR_SET_NO_NEW_PRIVS, 1)
        # a refusal is everyday life here, and would fill the machine's audit log
        syscall(_RESTRICT_SELF, self.fd, _LOG_SAME_EXEC_OFF if self.abi >= 7 else 0)

    def close(self) -> None:
        """Close the descriptor; processes that are under the rules stay under them. Safe to call twice."""
        descriptor, self.fd = self.fd, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _add(self, descriptor: int, rights: int) -> None:
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights & self._handled, descriptor), 12)
        syscall(_ADD_RULE, self.fd, _PATH_BENEATH, ctypes.addressof(rule), 0)


@contextlib.contextmanager
def _opened(path: str, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, _O_PATH | os.O_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
