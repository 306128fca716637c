"""Seccomp filters: the system calls that sandboxed code may make.

`WITHOUT_PROGRAMS`, for code that can't start programs, lists the allowed system calls; `WITH_PROGRAMS`, for code that
can, lists the refused system calls.

`WITHOUT_PROGRAMS` refuses an unlisted system call with EPERM. Numbers above the last known one get ENOSYS, and so do
calls that C libraries try first and replace by an older call on ENOSYS. Calls missing in some file systems or older
kernels get the error of such a file system or kernel. Byte-range locks and advice about the page cache succeed without
effect. A call in another architecture's convention ends the process.
"""

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple, Self

from strands_rollout.code_tool.sandbox.kernel import PR_SET_NO_NEW_PRIVS, prctl, syscall_numbers

_ALLOWED_NAMES: Final = """
    read write readv writev pread64 pwrite64 preadv pwritev close lseek
    creat stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2
    getdents64 getcwd chdir fchdir umask
    mkdir mkdirat rmdir unlink unlinkat rename renameat link linkat symlink symlinkat
    ftruncate flock fsync fdatasync
    dup dup2 dup3 pipe pipe2 eventfd eventfd2 timerfd_create timerfd_settime timerfd_gettime
    select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
    mprotect munmap mremap msync brk membarrier
    set_robust_list rseq set_tid_address exit exit_group
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack restart_syscall
    pause alarm getitimer setitimer nanosleep gettimeofday time times
    getpid getppid gettid getuid geteuid getgid getegid getgroups getresuid getresgid getpgrp
    getrlimit getrusage sysinfo uname getrandom getcpu wait4 waitid
    sched_yield sched_get_priority_max sched_get_priority_min shutdown getsockname getpeername
"""
ALLOWED: Final = frozenset(_ALLOWED_NAMES.split())
ANSWERS: Final[dict[str, int]] = {
    # links must not reveal their targets: the error means that the file is not a link
    **dict.fromkeys(("readlink", "readlinkat"), errno.EINVAL),
    # a filter can't read the arguments of clone3 and openat2, which are in memory; libraries do without futex_*
    **dict.fromkeys(("clone3", "openat2", "futex_waitv", "futex_wait", "futex_wake", "futex_requeue"), errno.ENOSYS),
    # fallocate takes space faster than the space is measured; extended attributes would reveal something about files
    # that code may not read
    **dict.fromkeys(
        ("fallocate", "getxattr", "lgetxattr", "fgetxattr", "listxattr", "llistxattr", "flistxattr"), errno.EOPNOTSUPP
    ),
    # These move pages by reference. A byte that waits in a socket or a pipe then keeps up to 2 MiB of the page cache in
    # memory, even after the file is deleted. No process is charged for this memory. On these errors, Python copies by
    # read and write instead.
    "sendfile": errno.ENOTSOCK,
    "copy_file_range": errno.EXDEV,
}

_OWN_PID: Final = -1  # stands for the process's own id, which `SyscallFilter.program` fills in
_LOW: Final = 0xFFFF_FFFF
_CLONE_FILES: Final = 0x400
_CLONE_THREAD: Final = 0x1_0000
_THREAD: Final = 0xB00 | _CLONE_FILES | _CLONE_THREAD  # 0xB00: VM, FS, SIGHAND. One descriptor table for all threads
# PTRACE, PARENT, PIDFD, UNTRACED, and NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_CLONE_REFUSED: Final = 0x2000 | 0x8000 | 0x1000 | 0x80_0000 | 0x7E02_0000


class Condition(NamedTuple):
    """A condition on a 32-bit half of an argument: `half & mask` must be in `values`, or the call gets `error`."""

    argument: int  # index
    values: tuple[int, ...]
    mask: int = _LOW
    high: bool = False  # compare the upper half
    error: int = errno.EPERM  # returned instead of making the call; 0 pretends success
    refuses: bool = False  # inverted: `half & mask` must not be in `values`


_SUCCESS: Final = 0
_SELF: Final = Condition(0, (_OWN_PID,))
_SELF_OR_ZERO: Final = Condition(0, (0, _OWN_PID))
# a negative clock id means the CPU time of a thread (allowed) or of any process (refused)
_CLOCKS: Final = Condition(0, (0, 4, 0x8000_0004), 0x8000_0004, error=errno.EINVAL)
# MSG_PEEK, MSG_TRUNC, MSG_DONTWAIT, MSG_EOR, MSG_WAITALL, MSG_NOSIGNAL, MSG_MORE. Not MSG_OOB: it is of no use on
# these sockets, and its implementation in the kernel has had vulnerabilities.
_MESSAGE_FLAGS: Final = 0x2 | 0x20 | 0x40 | 0x80 | 0x100 | 0x4000 | 0x8000
_MESSAGES: Final = Condition(3, (0,), _LOW & ~_MESSAGE_FLAGS, error=errno.EOPNOTSUPP)
# O_TRUNC only with O_WRONLY or O_RDWR: before its ABI 3, Landlock does not protect a read-only file from truncation.
# No __O_TMPFILE, whose files have no name; libraries then use a named file, as on a file system without it.
_OPENS: Final = ((0, 1, 2, 3, 0x201, 0x202), 0x203 | 0x40_0000)
_FICLONE: Final = 0x4004_9409
CONDITIONAL: Final[dict[str, tuple[Condition, ...]]] = {
    "clone": (Condition(0, (_THREAD,), _THREAD | _CLONE_REFUSED),),
    "close_range": (Condition(2, (0, 4)),),  # not CLOSE_RANGE_UNSHARE
    # no sendmsg and recvmsg: a file descriptor in transit in a socket is in no process's table, and would not be found.
    # SOL_SOCKET: SO_TYPE, SO_ERROR, SO_SNDBUF, SO_RCVBUF, SO_PROTOCOL, SO_DOMAIN. No option can be set: the kernel
    # charges no process for the buffers, and a machine may allow megabytes for each.
    "getsockopt": (Condition(1, (1,)), Condition(2, (3, 4, 7, 8, 38, 39))),
    "sendto": (_MESSAGES,),
    "recvfrom": (_MESSAGES,),
    # AF_UNIX, SOCK_STREAM. Not SOCK_DGRAM: such a socket can also send to other sockets than its peer.
    "socketpair": (Condition(0, (1,)), Condition(1, (1,), 0xF)),
    "open": (Condition(1, *_OPENS),),
    "openat": (Condition(2, *_OPENS),),
    "kill": (_SELF,),
    "tgkill": (_SELF,),
    # C libraries ask for a thread's affinity by the thread's id, which the filter can't know; they accept ENOSYS
    "sched_getaffinity": (_SELF_OR_ZERO._replace(error=errno.ENOSYS),),
    "sched_setaffinity": (_SELF_OR_ZERO,),
    "sched_getparam": (_SELF_OR_ZERO,),
    "sched_getscheduler": (_SELF_OR_ZERO,),
    "getpgid": (_SELF_OR_ZERO,),
    "getsid": (_SELF_OR_ZERO,),
    "getpriority": (Condition(0, (0,)), Condition(1, (0, _OWN_PID))),
    "clock_gettime": (_CLOCKS,),
    "clock_getres": (_CLOCKS,),
    "clock_nanosleep": (_CLOCKS,),
    # WAIT, WAKE, REQUEUE, CMP_REQUEUE, WAKE_OP, WAIT_BITSET, WAKE_BITSET; no operation with priority inheritance
    "futex": (Condition(1, (0, 1, 3, 4, 5, 9, 10), _LOW & ~0x180, error=errno.ENOSYS),),
    # No MAP_HUGETLB: that pool is reserved for other programs. Files may be mapped with MAP_SHARED, MAP_PRIVATE or
    # MAP_SHARED_VALIDATE. Anonymous memory may be mapped with MAP_PRIVATE only. The kernel keeps all of a shared
    # mapping while one of its pages is mapped, but charges the process for that page only.
    "mmap": (
        Condition(3, (0,), 0x4_0000, error=errno.ENOMEM),
        Condition(3, (0x1, 0x2, 0x3, 0x22), 0x2F, error=errno.ENOMEM),
    ),
    # NORMAL to DONTNEED, FREE, DONTFORK, DOFORK, HUGEPAGE to KEEPONFORK, POPULATE_*, GUARD_*. Not MERGEABLE. Not
    # PAGEOUT, COLD and COLLAPSE: they change the page cache of files that all runs read.
    "madvise": (Condition(2, (*range(5), 8, 10, 11, *range(14, 20), 22, 23, 102, 103), error=errno.EINVAL),),
    # A run could pass information to later runs by choosing which pages of a shared file are cached. Therefore: no flag
    # to query the cache (RWF_NOWAIT) or to read without caching (RWF_DONTCACHE), and no advice to drop pages. Writes
    # may have RWF_DSYNC, RWF_SYNC and RWF_APPEND.
    "preadv2": (Condition(5, (0,), error=errno.EOPNOTSUPP),),
    "pwritev2": (Condition(5, (0,), _LOW & ~0x16, error=errno.EOPNOTSUPP),),
    "fadvise64": (Condition(3, (0, 1, 2, 3), error=_SUCCESS),),
    "renameat2": (Condition(4, (0, 1, 2), error=errno.EINVAL),),  # NOREPLACE, EXCHANGE; no WHITEOUT
    "prctl": (Condition(0, (15, 16)),),  # PR_SET_NAME, PR_GET_NAME
    "prlimit64": (_SELF_OR_ZERO, Condition(2, (0,)), Condition(2, (0,), high=True)),  # to read, not to set
    # TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; FICLONE fails as on the many file systems without it
    "ioctl": (
        Condition(1, (0x5401, 0x541B, 0x5421, 0x5450, 0x5451, _FICLONE)),
        Condition(1, (_FICLONE,), error=errno.EOPNOTSUPP, refuses=True),
    ),
    # F_DUPFD to F_SETLKW, F_DUPFD_CLOEXEC, F_GETPIPE_SZ. Not F_SETOWN and F_SETSIG, which make the kernel send any
    # signal to any process of the same user. F_SETLK and F_SETLKW succeed without taking a lock: locks occupy kernel
    # memory without a limit. SQLite needs no locks here: locks of one process never exclude each other.
    "fcntl": (Condition(1, (*range(8), 1030, 1032)), Condition(1, (*range(6), 1030, 1032), error=_SUCCESS)),
}

# Neither Landlock nor a separate user covers these:
# - sockets: Landlock checks TCP bind and connect only, not MSG_FASTOPEN, MPTCP or Unix sockets with a path
# - watching files without opening them, and attributes of files
# - memory and messages that outlive their creator
# - io_uring, which can do all of this itself
_UNAVAILABLE: Final = """
    io_uring_setup io_uring_enter io_uring_register io_setup io_submit clone3
    inotify_init inotify_init1 inotify_add_watch fanotify_init fanotify_mark
    shmget shmat shmctl shmdt msgget msgsnd msgrcv msgctl semget semop semctl semtimedop
    mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
    add_key request_key keyctl bpf perf_event_open userfaultfd memfd_secret name_to_handle_at open_by_handle_at
"""
_ATTRIBUTES: Final = """
    getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr getxattrat listxattrat setxattr lsetxattr fsetxattr
    removexattr lremovexattr fremovexattr setxattrat removexattrat file_getattr file_setattr
"""
# sendmsg and sendmmsg: a file descriptor in transit in a socket is in no process's table, so that its file would not be
# measured
_FORBIDDEN: Final = """
    sendmsg sendmmsg setns mount umount2 pivot_root move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick
    mount_setattr migrate_pages move_pages quotactl quotactl_fd syslog
"""
_OWNERSHIP: Final = """
    chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat
"""
_NEW_NAMESPACES: Final = 0x7E02_0000
_NEW_TIME_NAMESPACE: Final = 0x80
_PROGRAMS_ANSWERS: Final[dict[str, int]] = {
    **dict.fromkeys(_UNAVAILABLE.split(), errno.ENOSYS),
    **dict.fromkeys(_ATTRIBUTES.split(), errno.EOPNOTSUPP),
    **dict.fromkeys(_FORBIDDEN.split(), errno.EPERM),
    # these move pages by reference, as `ANSWERS` explains; EINVAL is their error for unsupported descriptors
    **dict.fromkeys(("sendfile", "splice", "tee", "vmsplice"), errno.EINVAL),
    "socket": errno.EAFNOSUPPORT,
}
_SELF_AS_ZERO: Final = Condition(0, (0,))
_PROGRAMS_CONDITIONS: Final[dict[str, tuple[Condition, ...]]] = {
    # all threads of a process must share a table of descriptors, since only one thread's table is read
    "clone": (
        Condition(0, (0,), _NEW_NAMESPACES),
        Condition(0, (0, _CLONE_FILES, _CLONE_FILES | _CLONE_THREAD), _CLONE_FILES | _CLONE_THREAD),
    ),
    "unshare": (Condition(0, (0,), _NEW_NAMESPACES | _NEW_TIME_NAMESPACE | _CLONE_FILES),),
    "close_range": CONDITIONAL["close_range"],
    # AF_UNIX, SOCK_STREAM and SOCK_SEQPACKET. Not SOCK_DGRAM, as in `CONDITIONAL`.
    "socketpair": (Condition(0, (1,), error=errno.EAFNOSUPPORT), Condition(1, (1, 5), 0xF, error=errno.EOPNOTSUPP)),
    # not PR_SET_DUMPABLE: it would hide open files from the measurement. Not PR_SET_THP_DISABLE: `Confinement` has set
    # it for the memory limit
    "prctl": (Condition(0, (4, 41), refuses=True),),
    "fcntl": (Condition(1, (1024,), refuses=True),),  # not F_SETLEASE: opening a leased file blocks
    # allow only the caller: otherwise, code could change other processes of the same user
    **dict.fromkeys(
        ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"), (_SELF_AS_ZERO,)
    ),
    **dict.fromkeys(("setpriority", "ioprio_set"), (Condition(1, (0,)),)),
}


@dataclass(frozen=True, slots=True)
class Rules:
    """The verdict on each system call.

    Attributes:
        answers: Name -> error that the caller gets.
        conditions: Name -> conditions on its arguments.
        allowed: Names that are allowed besides those in `conditions`; any other name outside `answers` gets EPERM. None
            to allow every known name that is in neither `answers` nor `conditions`.
    """

    answers: Mapping[str, int]
    conditions: Mapping[str, tuple[Condition, ...]]
    allowed: Collection[str] | None = None


WITHOUT_PROGRAMS: Final = Rules(ANSWERS, CONDITIONAL, ALLOWED)
WITH_PROGRAMS: Final = Rules(_PROGRAMS_ANSWERS, _PROGRAMS_CONDITIONS)
# for code that accesses files as root (`change_user_reading_as_root`): it must not change their owner, mode or times
WITH_PROGRAMS_AS_OWNER: Final = Rules(
    _PROGRAMS_ANSWERS | dict.fromkeys(_OWNERSHIP.split(), errno.EPERM), _PROGRAMS_CONDITIONS
)

_AUDIT_ARCH: Final = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7, "arm64": 0xC000_00B7}
_X32_BIT: Final = 0x4000_0000
_PR_SET_SECCOMP: Final = 22
_MODE_FILTER: Final = 2

_KILL_PROCESS: Final = 0x8000_0000
_ALLOW: Final = 0x7FFF_0000
_ERRNO: Final = 0x0005_0000

_LOAD: Final = 0x20
_AND: Final = 0x54
_JUMP: Final = 0x05
_IF_EQUAL: Final = 0x15
_IF_AT_LEAST: Final = 0x35
_IF_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06
_NUMBER_OFFSET: Final = 0
_ARCH_OFFSET: Final = 4
_ARGUMENTS_OFFSET: Final = 16


class _Instruction(NamedTuple):
    """An instruction of classic BPF; jumps are numbers of instructions to skip."""

    code: int
    value: int
    if_true: int = 0
    if_false: int = 0


# A block returns on every path, so it never runs into the block after it. Only a block of `_check` does, if its
# condition holds.
_Block = list[_Instruction]


@dataclass(frozen=True, slots=True)
class SyscallFilter:
    """A filter for one architecture, compiled once; `program` fills in a process's own id."""

    template: bytes
    pid_offsets: tuple[int, ...]

    @classmethod
    def for_machine(cls, machine: str, rules: Rules = WITHOUT_PROGRAMS) -> Self:
        """Compile the filter for `machine`, a value of `platform.machine()`."""
        block = _search(_verdicts(syscall_numbers(machine), rules))
        if machine == "x86_64":
            block = _branch(_IF_ANY_BIT, _X32_BIT, _returns(_KILL_PROCESS), block)
        block = [_Instruction(_LOAD, _NUMBER_OFFSET), *block]
        block = _branch(_IF_EQUAL, _AUDIT_ARCH[machine], block, _returns(_KILL_PROCESS))
        block = [_Instruction(_LOAD, _ARCH_OFFSET), *block]
        packed = b"".join(
            struct.pack("<HBBI", code, if_true, if_false, 0 if value == _OWN_PID else value)
            for code, value, if_true, if_false in block
        )
        return cls(packed, tuple(8 * i + 4 for i, (_, value, *_) in enumerate(block) if value == _OWN_PID))

    def program(self, own_pid: int) -> bytes:
        """Return the filter for the process with this id, in the kernel's format: eight bytes per instruction."""
        program = bytearray(self.template)
        for offset in self.pid_offsets:
            struct.pack_into("<I", program, offset, own_pid)
        return bytes(program)


def is_supported() -> bool:
    """Return whether this machine's architecture is known and its kernel accepts filters."""
    if sys.platform != "linux" or sys.maxsize < 2**32 or os.uname().machine not in _AUDIT_ARCH:
        return False
    try:
        prctl(_PR_SET_SECCOMP, _MODE_FILTER, 0)
    except OSError as e:
        return e.errno == errno.EFAULT  # the kernel tried to read a filter at address zero, so it accepts filters
    return False


def install(program: bytes) -> None:
    """Apply a filter from `SyscallFilter.program` irrevocably to the calling thread and to all that it starts.

    Other threads of the process stay unrestricted: the caller should have none. A program's set-user-id bit has no
    effect afterwards.
    """
    instructions = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions)))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(header))


def _verdicts(numbers: dict[str, int], rules: Rules) -> list[tuple[int, _Block]]:
    """Return the verdicts by ranges of numbers: the first number of each range and its verdict, in ascending order."""
    by_number = {number: _verdict(name, rules) for name, number in numbers.items()}
    last = max(by_number)
    verdicts = [(number, by_number.get(number, _returns(_ERRNO | errno.EPERM))) for number in range(last + 1)]
    verdicts.append((last + 1, _returns(_ERRNO | errno.ENOSYS)))
    return [next(run) for _, run in groupby(verdicts, key=lambda verdict: verdict[1])]


def _verdict(name: str, rules: Rules) -> _Block:
    if name in rules.answers:
        return _returns(_ERRNO | rules.answers[name])
    if rules.allowed is not None and name not in rules.allowed and name not in rules.conditions:
        return _returns(_ERRNO | errno.EPERM)
    block = _returns(_ALLOW)
    for condition in reversed(rules.conditions.get(name, ())):
        block = [*_check(condition), *block]
    return block


def _check(condition: Condition) -> _Block:
    """Compile a condition. If it fails, the instructions return its error; otherwise, they end without a return."""
    argument, values, mask, high, error, refuses = condition
    loads = [_Instruction(_LOAD, _ARGUMENTS_OFFSET + 8 * argument + 4 * high)]
    if mask != _LOW:
        loads.append(_Instruction(_AND, mask))
    # each comparison that succeeds jumps over the later comparisons, and over the refusal or the jump past it
    compares = [_Instruction(_IF_EQUAL, value, len(values) - i) for i, value in enumerate(values)]
    past = [_Instruction(_JUMP, 1)] if refuses else []
    return [*loads, *compares, *past, *_returns(_ERRNO | error)]


def _search(ranges: list[tuple[int, _Block]]) -> _Block:
    """Compile a binary search for the verdict on the loaded number."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    return _branch(_IF_AT_LEAST, ranges[middle][0], _search(ranges[middle:]), _search(ranges[:middle]))


def _branch(code: int, value: int, if_true: _Block, if_false: _Block) -> _Block:
    """Compile a branch: a conditional jump can skip at most 255 instructions, an unconditional jump any number."""
    if len(if_true) <= 255:
        return [_Instruction(code, value, 0, len(if_true)), *if_true, *if_false]
    return [_Instruction(code, value, 1, 0), _Instruction(_JUMP, len(if_true)), *if_true, *if_false]


def _returns(value: int) -> _Block:
    return [_Instruction(_RETURN, value)]
