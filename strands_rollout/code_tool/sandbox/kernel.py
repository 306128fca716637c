"""Linux interfaces that Python does not wrap: system calls by number, limits, users, capabilities, Landlock.

The module can be imported on every POSIX system; most functions need Linux.
"""

import contextlib
import ctypes
import errno
import os
import resource
import stat
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LIBC = ctypes.CDLL(None, use_errno=True)
_PRCTL_ARGUMENTS = 5  # prctl refuses some options unless their unused arguments are zero


def _call_libc(name: str, result: type[ctypes.c_int] | type[ctypes.c_long], *args: int) -> int:
    """Call a function of the C library with arguments as wide as a register.

    Raises:
        OSError: The function returned -1, or this system is not Linux.
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
    """Make a system call; a pointer is passed as the address of memory that the caller keeps alive."""
    return _call_libc("syscall", ctypes.c_long, number, *args)


def prctl(option: int, *args: int) -> int:
    """Call `prctl` of the C library; missing arguments are zero."""
    padding = (0,) * (_PRCTL_ARGUMENTS - 1 - len(args))
    return _call_libc("prctl", ctypes.c_int, option, *args, *padding)


# System calls in the order of their numbers. A number in the listing belongs to the system call after it; each further
# system call has the next number.
_SHARED: Final = """
    424 pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen fsconfig
    fsmount fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2
    mount_setattr quotactl_fd landlock_create_ruleset landlock_add_rule landlock_restrict_self memfd_secret
    process_mrelease futex_waitv set_mempolicy_home_node cachestat fchmodat2 map_shadow_stack futex_wake futex_wait
    futex_requeue statmount listmount lsm_get_self_attr lsm_set_self_attr lsm_list_modules mseal setxattrat
    getxattrat listxattrat removexattrat open_tree_attr file_getattr file_setattr listns
"""

_X86_64_OWN: Final = """
    0 read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
    rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise
    shmget shmat shmctl dup dup2 pause nanosleep getitimer alarm setitimer getpid sendfile socket connect accept
    sendto recvfrom sendmsg recvmsg shutdown bind listen getsockname getpeername socketpair setsockopt getsockopt
    clone fork vfork execve exit wait4 kill uname semget semop semctl shmdt msgget msgsnd msgrcv msgctl fcntl flock
    fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink symlink
    readlink chmod fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo times ptrace getuid
    syslog getgid setuid setgid geteuid getegid setpgid getppid getpgrp setsid setreuid setregid getgroups setgroups
    setresuid getresuid setresgid getresgid getpgid setfsuid setfsgid getsid capget capset rt_sigpending
    rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend sigaltstack utime mknod uselib personality ustat statfs fstatfs
    sysfs getpriority setpriority sched_setparam sched_getparam sched_setscheduler sched_getscheduler
    sched_get_priority_max sched_get_priority_min sched_rr_get_interval mlock munlock mlockall munlockall vhangup
    modify_ldt pivot_root _sysctl prctl arch_prctl adjtimex setrlimit chroot sync acct settimeofday mount umount2
    swapon swapoff reboot sethostname setdomainname iopl ioperm create_module init_module delete_module
    get_kernel_syms query_module quotactl nfsservctl getpmsg putpmsg afs_syscall tuxcall security gettid readahead
    setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr
    lremovexattr fremovexattr tkill time futex sched_setaffinity sched_getaffinity set_thread_area io_setup
    io_destroy io_getevents io_submit io_cancel get_thread_area lookup_dcookie epoll_create epoll_ctl_old
    epoll_wait_old remap_file_pages getdents64 set_tid_address restart_syscall semtimedop fadvise64 timer_create
    timer_settime timer_gettime timer_getoverrun timer_delete clock_settime clock_gettime clock_getres
    clock_nanosleep exit_group epoll_wait epoll_ctl tgkill utimes vserver mbind set_mempolicy get_mempolicy mq_open
    mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr kexec_load waitid add_key request_key keyctl
    ioprio_set ioprio_get inotify_init inotify_add_watch inotify_rm_watch migrate_pages openat mkdirat mknodat
    fchownat futimesat newfstatat unlinkat renameat linkat symlinkat readlinkat fchmodat faccessat pselect6 ppoll
    unshare set_robust_list get_robust_list splice tee sync_file_range vmsplice move_pages utimensat epoll_pwait
    signalfd timerfd_create eventfd fallocate timerfd_settime timerfd_gettime accept4 signalfd4 eventfd2
    epoll_create1 dup3 pipe2 inotify_init1 preadv pwritev rt_tgsigqueueinfo perf_event_open recvmmsg fanotify_init
    fanotify_mark prlimit64 name_to_handle_at open_by_handle_at clock_adjtime syncfs sendmmsg setns getcpu
    process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2 seccomp getrandom
    memfd_create kexec_file_load bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2
    pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq
"""

_AARCH64_OWN: Final = """
    0 io_setup io_destroy io_submit io_cancel io_getevents setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr
    listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr getcwd lookup_dcookie eventfd2
    epoll_create1 epoll_ctl epoll_pwait dup dup3 fcntl inotify_init1 inotify_add_watch inotify_rm_watch ioctl
    ioprio_set ioprio_get flock mknodat mkdirat unlinkat symlinkat linkat renameat umount2 mount pivot_root
    nfsservctl statfs fstatfs truncate ftruncate fallocate faccessat chdir fchdir chroot fchmod fchmodat fchownat
    fchown openat close vhangup pipe2 quotactl getdents64 lseek read write readv writev pread64 pwrite64 preadv
    pwritev sendfile pselect6 ppoll signalfd4 vmsplice splice tee readlinkat newfstatat fstat sync fsync fdatasync
    sync_file_range timerfd_create timerfd_settime timerfd_gettime utimensat acct capget capset personality exit
    exit_group waitid set_tid_address unshare futex set_robust_list get_robust_list nanosleep getitimer setitimer
    kexec_load init_module delete_module timer_create timer_gettime timer_getoverrun timer_settime timer_delete
    clock_settime clock_gettime clock_getres clock_nanosleep syslog ptrace sched_setparam sched_setscheduler
    sched_getscheduler sched_getparam sched_setaffinity sched_getaffinity sched_yield sched_get_priority_max
    sched_get_priority_min sched_rr_get_interval restart_syscall kill tkill tgkill sigaltstack rt_sigsuspend
    rt_sigaction rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigreturn setpriority getpriority
    reboot setregid setgid setreuid setuid setresuid getresuid setresgid getresgid setfsuid setfsgid times setpgid
    getpgid getsid setsid getgroups setgroups uname sethostname setdomainname getrlimit setrlimit getrusage umask
    prctl getcpu gettimeofday settimeofday adjtimex getpid getppid getuid geteuid getgid getegid gettid sysinfo
    mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr msgget msgctl msgrcv msgsnd semget semctl
    semtimedop semop shmget shmctl shmat shmdt socket socketpair bind listen accept connect getsockname getpeername
    sendto recvfrom setsockopt getsockopt shutdown sendmsg recvmsg readahead brk munmap mremap add_key request_key
    keyctl clone execve mmap fadvise64 swapon swapoff mprotect msync mlock munlock mlockall munlockall mincore
    madvise remap_file_pages mbind get_mempolicy set_mempolicy migrate_pages move_pages rt_tgsigqueueinfo
    perf_event_open accept4 recvmmsg 260 wait4 prlimit64 fanotify_init fanotify_mark name_to_handle_at
    open_by_handle_at clock_adjtime syncfs setns sendmmsg process_vm_readv process_vm_writev kcmp finit_module
    sched_setattr sched_getattr renameat2 seccomp getrandom memfd_create bpf execveat userfaultfd membarrier mlock2
    copy_file_range preadv2 pwritev2 pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq kexec_file_load
"""


def _parse_table(listing: str) -> dict[str, int]:
    table: dict[str, int] = {}
    number = 0
    for word in listing.split():
        if word.isdecimal():
            number = int(word)
            continue
        table[word] = number
        number += 1
    return table


X86_64: Final = _parse_table(_X86_64_OWN + _SHARED)
AARCH64: Final = _parse_table(_AARCH64_OWN + _SHARED)
_TABLES: Final = {"x86_64": X86_64, "aarch64": AARCH64, "arm64": AARCH64}


def syscall_numbers(machine: str) -> dict[str, int]:
    """Return the system calls (name -> number) of `machine`, a value of `platform.machine()`.

    Raises:
        ValueError: There is no table of the machine's system calls.
    """
    if machine not in _TABLES:
        raise ValueError(f"no table of system calls for the machine {machine!r}; expected one of {', '.join(_TABLES)}")
    return _TABLES[machine]


OPEN_FILES: Final = 64
_PENDING_SIGNALS: Final = 64
_STACK_BYTES: Final = 8 * 1024 * 1024
_MEBIBYTE: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Resource limits of one process."""

    memory_mb: int  # address space; macOS ignores it
    file_mb: int  # largest file
    max_threads: int  # if the kernel counts the process's threads separately; else see `shared_thread_limit`
    cpu_s: int  # last resort: the supervisor enforces wall-clock limits

    def apply(self, *, own_user: bool) -> None:
        """Set soft and hard limits of the calling process.

        Args:
            own_user: The process has its own user or user namespace, so the kernel counts its threads separately.
        """
        wanted = {
            resource.RLIMIT_AS: self.memory_mb * _MEBIBYTE,
            resource.RLIMIT_FSIZE: self.file_mb * _MEBIBYTE,
            resource.RLIMIT_CPU: self.cpu_s,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_STACK: _STACK_BYTES,
            resource.RLIMIT_CORE: 1,  # 0 would still pass a core dump to a program that reads it through a pipe
        }
        if own_user:
            wanted[resource.RLIMIT_NPROC] = self.max_threads
        elif (threads := shared_thread_limit(self.max_threads)) is not None:  # soft limit only: it is adjusted later
            resource.setrlimit(resource.RLIMIT_NPROC, (threads, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
        if sys.platform == "linux":
            wanted |= {resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0, resource.RLIMIT_RTPRIO: 0}
            wanted[resource.RLIMIT_SIGPENDING] = _PENDING_SIGNALS
        for kind, value in wanted.items():
            ceiling = resource.getrlimit(kind)[1]
            limit = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
            # macOS refuses some of these; the fork server's probe finds out whether memory is limited
            with contextlib.nullcontext() if sys.platform == "linux" else contextlib.suppress(ValueError, OSError):
                resource.setrlimit(kind, (limit, limit))


def shared_thread_limit(more: int) -> int | None:
    """Return RLIMIT_NPROC for a process whose user has other processes: the existing threads plus `more`.

    The kernel counts all threads of a user, including those in other containers. It does not report this count, so
    all threads of the machine serve as an upper bound. An eighth of the user's limit, at most 1024, is reserved for
    the user's other processes. Return None if the limit is unknown or has no effect.
    """
    if sys.platform != "linux" or os.geteuid() == 0:
        return None
    try:
        present = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, IndexError, ValueError):
        return None
    if present < 2:  # this process and its parent exist, so the (emulated) kernel does not count
        return None
    ceiling = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if ceiling == resource.RLIM_INFINITY:
        return present + more
    return min(present + more, ceiling - min(ceiling // 8, 1024))


_CAPABILITY_VERSION_3: Final = 0x20080522
_CAP_SETUID: Final = 7
_PR_SET_KEEPCAPS: Final = 8
_CLONE_NEWUSER: Final = 0x1000_0000


def can_change_user(user: int) -> bool:
    """Return whether this process may change its user to this id, by trying it in a child."""
    child = os.fork()
    if child == 0:
        try:
            change_user(user)
            os._exit(0)
        finally:  # whatever fails, this fork must not return
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def change_user(user: int) -> None:
    """Change user and group irrevocably, and leave all other groups; for root this also drops all capabilities."""
    os.setgroups([])
    os.setgid(user)  # for root this and setuid change the real, the effective and the saved id
    os.setuid(user)


def change_user_reading_as_root(user: int) -> None:
    """Change the user irrevocably, but keep accessing files as root; only for use under Landlock.

    Needed if only root may read Python's files. The kernel checks file access against a separate user id (setfsuid(2));
    signals, limits and everything else use the new user, and no capability remains.
    """
    numbers = syscall_numbers(os.uname().machine)
    prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    set_capabilities(1 << _CAP_SETUID)
    syscall(numbers["setfsuid"], 0)
    if syscall(numbers["setfsuid"], 0) != 0:  # returns the previous id, and never an error
        raise PermissionError("setfsuid(0) had no effect")
    set_capabilities(0)


@contextlib.contextmanager
def file_access_as(user: int | None) -> Iterator[None]:
    """Access files as another user and group, in this thread only; the block must not await.

    If `user` is None, nothing changes.
    """
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


def enter_user_namespace() -> bool:
    """Enter a user namespace; return False if that is not possible.

    Inside, per-user limits count only the caller. The user has no name there, and the caller gets no capabilities.
    Outside the namespace, the user stays the same.
    """
    if sys.platform != "linux":
        return False
    try:
        syscall(syscall_numbers(os.uname().machine)["unshare"], _CLONE_NEWUSER)
    except (OSError, ValueError):
        return False
    set_capabilities(0)
    return True


def set_capabilities(mask: int) -> None:
    """Set the effective and permitted capabilities of the calling process; bit i of `mask` is capability i, 0 to 31."""
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    sets = ctypes.create_string_buffer(struct.pack("6I", mask, mask, 0, 0, 0, 0))
    number = syscall_numbers(os.uname().machine)["capset"]
    syscall(number, ctypes.addressof(header), ctypes.addressof(sets))


_EXECUTE: Final = 1 << 0
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
_REMOVE_DIR: Final = 1 << 4
_REMOVE_FILE: Final = 1 << 5
_MAKE_DIR: Final = 1 << 7
_MAKE_REG: Final = 1 << 8
_MAKE_SYM: Final = 1 << 12
_REFER: Final = 1 << 13  # ABI 2; before it, a rename or link into another directory is always refused
_TRUNCATE: Final = 1 << 14  # ABI 3
_IOCTL_DEV: Final = 1 << 15  # ABI 5
_BIND_TCP: Final = 1 << 0  # ABI 4
_CONNECT_TCP: Final = 1 << 1  # ABI 4
_ABSTRACT_UNIX_SOCKET: Final = 1 << 0  # ABI 6
_SIGNAL: Final = 1 << 1  # ABI 6

NEWEST_LANDLOCK_ABI: Final = 7
_FILE_RIGHTS: Final = (1 << 13) - 1
_FILE_RIGHTS_SINCE: Final = {2: _REFER, 3: _TRUNCATE, 5: _IOCTL_DEV}
_MAKE: Final = _MAKE_DIR | _MAKE_REG | _MAKE_SYM
_SCRATCH: Final = _READ_FILE | _READ_DIR | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE | _REFER | _TRUNCATE

# these numbers are the same on every architecture
_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_QUERY_VERSION: Final = 1
_PATH_BENEATH: Final = 1
_LOG_SAME_EXEC_OFF: Final = 1  # ABI 7
PR_SET_NO_NEW_PRIVS: Final = 38
_O_PATH: Final[int] = getattr(os, "O_PATH", 0)  # only Linux has it


def landlock_abi() -> int:
    """Return the kernel's Landlock ABI version; 0 if Landlock is missing, disabled, or blocked for this process."""
    try:
        return syscall(_CREATE_RULESET, 0, 0, _QUERY_VERSION)
    except OSError:
        return 0  # ENOSYS; EOPNOTSUPP if not enabled; EPERM from a container's filter


class Ruleset:
    """A Landlock ruleset: limits on what a process may access, independent of its user's permissions.

    It is made once and then applied by any number of forked children. It handles every right that the ABI defines, so
    access without a rule is refused. Files, execution and TCP ports (from ABI 4) get EACCES. Signals and abstract Unix
    sockets (from ABI 6) get EPERM if the other process is outside of the caller's Landlock domain.

    A rule applies to the file or directory itself, under all its names. Adding a rule needs no permission on the file.

    Attributes:
        abi: The ABI in use: the argument or, by default, the kernel's ABI; at most `NEWEST_LANDLOCK_ABI`.
        fd: The ruleset's descriptor, closed on exec but not in forks; -1 if closed.

    Raises:
        OSError: The kernel offers no Landlock, or only an older ABI than `abi`.
        ValueError: `abi` is less than 1.
    """

    def __init__(self, abi: int | None = None) -> None:
        offered = landlock_abi() if abi is None else abi
        if abi is None and offered == 0:
            raise OSError(errno.EOPNOTSUPP, "the kernel offers no Landlock")
        if offered < 1:
            raise ValueError(f"got Landlock ABI {abi}; expected at least 1")
        self.abi = min(offered, NEWEST_LANDLOCK_ABI)
        self._handled = _FILE_RIGHTS
        for since, right in _FILE_RIGHTS_SINCE.items():
            self._handled |= right if self.abi >= since else 0
        attributes = struct.pack("=Q", self._handled)  # an older kernel refuses a longer structure
        if self.abi >= 4:
            attributes += struct.pack("=Q", _BIND_TCP | _CONNECT_TCP)
        if self.abi >= 6:
            attributes += struct.pack("=Q", _ABSTRACT_UNIX_SOCKET | _SIGNAL)
        memory = ctypes.create_string_buffer(attributes, len(attributes))
        self.fd = syscall(_CREATE_RULESET, ctypes.addressof(memory), len(attributes), 0)

    def allow_read(self, path: str, *, run: bool = False) -> None:
        """Allow reading a file or everything below a directory; with `run`, executing it too."""
        with _open_path(path) as descriptor:
            is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            self._add(descriptor, _READ_FILE | (_READ_DIR if is_directory else 0) | (_EXECUTE if run else 0))

    def allow_scratch(self, path: str, *, run: bool = False) -> None:
        """Allow reading, writing, making, moving and deleting files, folders and symbolic links below a directory.

        With `run`, also allow executing files there. Devices, sockets and FIFOs can't be made.
        """
        with _open_path(path, os.O_DIRECTORY) as descriptor:
            self._add(descriptor, _SCRATCH | (_EXECUTE if run else 0))

    def allow_device(self, path: str) -> None:
        """Allow reading and writing a device such as /dev/null."""
        with _open_path(path) as descriptor:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise IsADirectoryError(errno.EISDIR, "expected a device, got a directory", path)
            self._add(descriptor, _READ_FILE | _WRITE_FILE)

    def restrict_self(self) -> None:
        """Apply the rules irrevocably to the calling thread and to all threads and processes that it starts.

        Other threads of the process stay unrestricted: the caller should have none. A program's set-user-id bit has no
        effect afterwards. Open descriptors keep their rights. May be called in any number of processes.
        """
        if self.fd < 0:
            raise OSError(errno.EBADF, f"{os.strerror(errno.EBADF)}: the ruleset is closed")
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        # refusals are common here, and would fill the machine's audit log
        syscall(_RESTRICT_SELF, self.fd, _LOG_SAME_EXEC_OFF if self.abi >= 7 else 0)

    def close(self) -> None:
        """Close the descriptor; restricted processes stay restricted. Safe to call twice."""
        descriptor, self.fd = self.fd, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _add(self, descriptor: int, rights: int) -> None:
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights & self._handled, descriptor), 12)
        syscall(_ADD_RULE, self.fd, _PATH_BENEATH, ctypes.addressof(rule), 0)


@contextlib.contextmanager
def _open_path(path: str, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, _O_PATH | os.O_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
