"""Which system calls sandboxed code may make, as seccomp filters.

`ALONE`, for code that starts no programs, is a list of what is allowed; `WITH_PROGRAMS`, for code that does, of what is
refused.

What `ALONE` does not list is refused with EPERM. Calls that C libraries try first, and replace by an older one on
ENOSYS, get that, as do numbers that are not known here; what file systems and older kernels need not have is answered
as they would answer. Advice about the page cache and byte-range locks are answered with success and have no effect. A
call by another architecture's convention ends the process.
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
    # the goals of links outside can't be asked for either: the answer is that of a file that is no link
    **dict.fromkeys(("readlink", "readlinkat"), errno.EINVAL),
    # what the first two are asked lies in memory, where a filter can't look; libraries do without the others
    **dict.fromkeys(("clone3", "openat2", "futex_waitv", "futex_wait", "futex_wake", "futex_requeue"), errno.ENOSYS),
    # space that is taken at once is not measured in time; attributes tell of files that may not be read
    **dict.fromkeys(
        ("fallocate", "getxattr", "lgetxattr", "fgetxattr", "listxattr", "llistxattr", "flistxattr"), errno.EOPNOTSUPP
    ),
    # They move pages by reference: a byte that waits in a socket or a pipe keeps up to 2 MiB of the page cache, which
    # is no process's memory, also when the file is gone. With these answers Python's copies go on by read and write.
    "sendfile": errno.ENOTSOCK,
    "copy_file_range": errno.EXDEV,
}

_OWN_PID: Final = -1  # stands for the number of the process, which `program` fills in
_LOW: Final = 0xFFFF_FFFF
_CLONE_FILES: Final = 0x400
_CLONE_THREAD: Final = 0x1_0000
_THREAD: Final = 0xB00 | _CLONE_FILES | _CLONE_THREAD  # and VM, FS, SIGHAND: one table of descriptors for all threads
# PTRACE, PARENT, PIDFD, UNTRACED, and NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_CLONE_REFUSED: Final = 0x2000 | 0x8000 | 0x1000 | 0x80_0000 | 0x7E02_0000


class Condition(NamedTuple):
    """One half of an argument, masked, must be one of a few values, or none of them; else the call is not made."""

    argument: int
    values: tuple[int, ...]
    mask: int = _LOW
    high: bool = False
    error: int = errno.EPERM  # that the caller sees instead; 0 for success, as if the call had been made
    refuses: bool = False  # it must be none of the values


_SUCCESS: Final = 0
_SELF: Final = Condition(0, (_OWN_PID,))
_SELF_OR_ZERO: Final = Condition(0, (0, _OWN_PID))
# a clock that is negative and not a thread's is the CPU time of a process, which may be another
_CLOCKS: Final = Condition(0, (0, 4, 0x8000_0004), 0x8000_0004, error=errno.EINVAL)
# MSG_PEEK, MSG_TRUNC, MSG_DONTWAIT, MSG_EOR, MSG_WAITALL, MSG_NOSIGNAL, MSG_MORE. Not MSG_OOB, which nobody needs on
# such a socket and whose code in the kernel has had holes.
_MESSAGE_FLAGS: Final = 0x2 | 0x20 | 0x40 | 0x80 | 0x100 | 0x4000 | 0x8000
_MESSAGES: Final = Condition(3, (0,), _LOW & ~_MESSAGE_FLAGS, error=errno.EOPNOTSUPP)
# O_TRUNC only with O_WRONLY or O_RDWR: Landlock before its ABI 3 lets a file that may only be read be truncated.
# No __O_TMPFILE: such a file never has a name, and libraries take one that has for a file system without.
_OPENS: Final = ((0, 1, 2, 3, 0x201, 0x202), 0x203 | 0x40_0000)
_FICLONE: Final = 0x4004_9409
CONDITIONAL: Final[dict[str, tuple[Condition, ...]]] = {
    "clone": (Condition(0, (_THREAD,), _THREAD | _CLONE_REFUSED),),
    "close_range": (Condition(2, (0, 4)),),  # not CLOSE_RANGE_UNSHARE
    # no sendmsg and recvmsg: a file that is on its way in a socket is in nobody's table of descriptors.
    # SOL_SOCKET: SO_TYPE, SO_ERROR, SO_SNDBUF, SO_RCVBUF, SO_PROTOCOL, SO_DOMAIN. None can be set: what lies in the
    # buffers counts as nobody's memory, and a machine may allow megabytes for each.
    "getsockopt": (Condition(1, (1,)), Condition(2, (3, 4, 7, 8, 38, 39))),
    "sendto": (_MESSAGES,),
    "recvfrom": (_MESSAGES,),
    # AF_UNIX, SOCK_STREAM: unlike a datagram, what is written to a connected stream can't be given another address
    "socketpair": (Condition(0, (1,)), Condition(1, (1,), 0xF)),
    "open": (Condition(1, *_OPENS),),
    "openat": (Condition(2, *_OPENS),),
    "kill": (_SELF,),
    "tgkill": (_SELF,),
    # a C library asks for a thread's affinity by its number, which can't be known here, and takes ENOSYS for an answer
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
    # WAIT, WAKE, REQUEUE, CMP_REQUEUE, WAKE_OP, WAIT_BITSET, WAKE_BITSET: nothing that passes on priorities
    "futex": (Condition(1, (0, 1, 3, 4, 5, 9, 10), _LOW & ~0x180, error=errno.ENOSYS),),
    # No MAP_HUGETLB: that pool is somebody's. MAP_SHARED and MAP_SHARED_VALIDATE of files, MAP_PRIVATE, and with
    # MAP_ANONYMOUS only that: of shared memory the kernel keeps all as long as a page of it is mapped, and no process
    # is charged for more than the page.
    "mmap": (
        Condition(3, (0,), 0x4_0000, error=errno.ENOMEM),
        Condition(3, (0x1, 0x2, 0x3, 0x22), 0x2F, error=errno.ENOMEM),
    ),
    # NORMAL to DONTNEED, FREE, DONTFORK, DOFORK, HUGEPAGE to KEEPONFORK, POPULATE_*, GUARD_*. Not PAGEOUT, COLD and
    # COLLAPSE, which change what is cached of files that all runs read, nor MERGEABLE.
    "madvise": (Condition(2, (*range(5), 8, 10, 11, *range(14, 20), 22, 23, 102, 103), error=errno.EINVAL),),
    # Whether a page of such a file is cached would be a message from an earlier run: no flags to ask without reading
    # (RWF_NOWAIT) or to read without keeping (RWF_DONTCACHE), no advice to let go. To write, RWF_DSYNC, SYNC, APPEND.
    "preadv2": (Condition(5, (0,), error=errno.EOPNOTSUPP),),
    "pwritev2": (Condition(5, (0,), _LOW & ~0x16, error=errno.EOPNOTSUPP),),
    "fadvise64": (Condition(3, (0, 1, 2, 3), error=_SUCCESS),),
    "renameat2": (Condition(4, (0, 1, 2), error=errno.EINVAL),),  # NOREPLACE, EXCHANGE; no WHITEOUT
    "prctl": (Condition(0, (15, 16)),),  # PR_SET_NAME, PR_GET_NAME
    "prlimit64": (_SELF_OR_ZERO, Condition(2, (0,)), Condition(2, (0,), high=True)),  # to read, not to set
    # TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; FICLONE as on a file system that has none, as most
    "ioctl": (
        Condition(1, (0x5401, 0x541B, 0x5421, 0x5450, 0x5451, _FICLONE)),
        Condition(1, (_FICLONE,), error=errno.EOPNOTSUPP, refuses=True),
    ),
    # F_DUPFD to F_SETLKW, F_DUPFD_CLOEXEC, F_GETPIPE_SZ. Not F_SETOWN and F_SETSIG: with them the kernel sends a signal
    # of one's choice to any process of the same user. F_SETLK and F_SETLKW succeed without a lock: any number of them
    # lies in the kernel's memory, and the locks of one process never exclude each other, which is all that SQLite sees.
    "fcntl": (Condition(1, (*range(8), 1030, 1032)), Condition(1, (*range(6), 1030, 1032), error=_SUCCESS)),
}

# Landlock and a user of its own do not reach these: sockets (it knows TCP by bind and connect alone: not by
# MSG_FASTOPEN, not MPTCP, not Unix sockets with a path), what watches files without opening them, attributes of files,
# memory and messages that outlive who made them, and the ring that does all of this by itself.
_NOT_THERE: Final = """
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
# The first two: a file that is on its way in a socket is in no process's table of descriptors, where it would be
# measured.
_FORBIDDEN: Final = """
    sendmsg sendmmsg setns mount umount2 pivot_root move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick
    mount_setattr migrate_pages move_pages quotactl quotactl_fd syslog
"""
_OWNERS: Final = """
    chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat
"""
_NEW_NAMESPACES: Final = 0x7E02_0000
_NEW_TIME_NAMESPACE: Final = 0x80
_PROGRAMS_ANSWERS: Final[dict[str, int]] = {
    **dict.fromkeys(_NOT_THERE.split(), errno.ENOSYS),
    **dict.fromkeys(_ATTRIBUTES.split(), errno.EOPNOTSUPP),
    **dict.fromkeys(_FORBIDDEN.split(), errno.EPERM),
    **dict.fromkeys(
        ("sendfile", "splice", "tee", "vmsplice"), errno.EINVAL
    ),  # see `ANSWERS`; theirs for "not with these"
    "socket": errno.EAFNOSUPPORT,
}
_ITSELF: Final = Condition(0, (0,))
_PROGRAMS_CONDITIONS: Final[dict[str, tuple[Condition, ...]]] = {
    # and one table of descriptors for all threads of a process: one of them is looked at
    "clone": (
        Condition(0, (0,), _NEW_NAMESPACES),
        Condition(0, (0, _CLONE_FILES, _CLONE_FILES | _CLONE_THREAD), _CLONE_FILES | _CLONE_THREAD),
    ),
    "unshare": (Condition(0, (0,), _NEW_NAMESPACES | _NEW_TIME_NAMESPACE | _CLONE_FILES),),
    "close_range": CONDITIONAL["close_range"],
    # AF_UNIX, SOCK_STREAM and SOCK_SEQPACKET: what is written to such a pair can't be given another address
    "socketpair": (Condition(0, (1,), error=errno.EAFNOSUPPORT), Condition(1, (1, 5), 0xF, error=errno.EOPNOTSUPP)),
    # PR_SET_DUMPABLE, which would hide open files from who measures them; PR_SET_THP_DISABLE, see `Confinement.apply`
    "prctl": (Condition(0, (4, 41), refuses=True),),
    "fcntl": (Condition(1, (1024,), refuses=True),),  # F_SETLEASE: who opens a file that is leased waits
    # of the caller alone: where it has its user in common with others, theirs could be changed
    **dict.fromkeys(
        ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"), (_ITSELF,)
    ),
    **dict.fromkeys(("setpriority", "ioprio_set"), (Condition(1, (0,)),)),
}


@dataclass(frozen=True, slots=True)
class Rules:
    """A verdict on each system call.

    Attributes:
        answers: Name -> the error that the caller sees.
        conditions: Name -> what its arguments must be.
        allowed: Names of the others that are let through; the rest is refused with EPERM. None for all that are known.
    """

    answers: Mapping[str, int]
    conditions: Mapping[str, tuple[Condition, ...]]
    allowed: Collection[str] | None = None


ALONE: Final = Rules(ANSWERS, CONDITIONAL, ALLOWED)
WITH_PROGRAMS: Final = Rules(_PROGRAMS_ANSWERS, _PROGRAMS_CONDITIONS)
# as the owner of all of root's files, which code is whose Python only root may read: see `become_reading_as_root`
WITH_PROGRAMS_AS_OWNER: Final = Rules(
    _PROGRAMS_ANSWERS | dict.fromkeys(_OWNERS.split(), errno.EPERM), _PROGRAMS_CONDITIONS
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
    """Of classic BPF; jumps count the instructions to skip."""

    code: int
    value: int
    if_true: int = 0
    if_false: int = 0


_Block = list[_Instruction]  # ends in a return on every path, so that blocks can be put in a row


@dataclass(frozen=True, slots=True)
class SyscallFilter:
    """A filter for one architecture, compiled once; each process gets it with its own number filled in."""

    template: bytes
    pid_offsets: tuple[int, ...]

    @classmethod
    def for_machine(cls, machine: str, rules: Rules = ALONE) -> Self:
        """Compile the filter for a machine, as `platform.machine()` names it."""
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
        """The filter for the process of that number, as the kernel sees it: eight bytes an instruction."""
        program = bytearray(self.template)
        for offset in self.pid_offsets:
            struct.pack_into("<I", program, offset, own_pid)
        return bytes(program)


def is_supported() -> bool:
    """Whether this machine is known and its kernel takes filters; changes nothing."""
    if sys.platform != "linux" or sys.maxsize < 2**32 or os.uname().machine not in _AUDIT_ARCH:
        return False
    try:
        prctl(_PR_SET_SECCOMP, _MODE_FILTER, 0)
    except OSError as e:
        return e.errno == errno.EFAULT  # it would take a filter, if there were one at address zero
    return False


def install(program: bytes) -> None:
    """Put the calling thread, and all that it starts from now on, under a program for good.

    Other threads of the process are left free: the caller should have none. No set-user-id program works afterwards.
    """
    instructions = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions)))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(header))


def _verdicts(numbers: dict[str, int], rules: Rules) -> list[tuple[int, _Block]]:
    """What becomes of every number: first number of a range and its verdict, ascending."""
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
    """Return the error, or go on with what follows."""
    argument, values, mask, high, error, refuses = condition
    loads = [_Instruction(_LOAD, _ARGUMENTS_OFFSET + 8 * argument + 4 * high)]
    if mask != _LOW:
        loads.append(_Instruction(_AND, mask))
    # each comparison jumps over the ones after it, and over the refusal or the jump past it
    compares = [_Instruction(_IF_EQUAL, value, len(values) - i) for i, value in enumerate(values)]
    past = [_Instruction(_JUMP, 1)] if refuses else []
    return [*loads, *compares, *past, *_returns(_ERRNO | error)]


def _search(ranges: list[tuple[int, _Block]]) -> _Block:
    """Find the range that the loaded number is in by halving."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    return _branch(_IF_AT_LEAST, ranges[middle][0], _search(ranges[middle:]), _search(ranges[:middle]))


def _branch(code: int, value: int, if_true: _Block, if_false: _Block) -> _Block:
    """Go one way or the other; a conditional jump reaches 255 instructions, an unconditional one any."""
    if len(if_true) <= 255:
        return [_Instruction(code, value, 0, len(if_true)), *if_true, *if_false]
    return [_Instruction(code, value, 1, 0), _Instruction(_JUMP, len(if_true)), *if_true, *if_false]


def _returns(value: int) -> _Block:
    return [_Instruction(_RETURN, value)]
