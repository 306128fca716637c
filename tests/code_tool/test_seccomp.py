"""The seccomp filter: on the running kernel in real children, and simulated for other architectures."""

import errno
import os
import signal
import socket
import struct
import sys
from pathlib import Path

import pytest
from ordinary_code import DENIED, NEEDED

from strands_rollout.code_tool.sandbox import kernel, seccomp
from strands_rollout.code_tool.sandbox.seccomp import SyscallFilter

needs_seccomp = pytest.mark.skipif(not seccomp.is_supported(), reason="the kernel accepts no seccomp filters")


PROLOGUE = """
import ctypes, errno, json, os, platform, signal, sys, threading
from strands_rollout.code_tool.sandbox import seccomp
from strands_rollout.code_tool.sandbox.kernel import syscall
from strands_rollout.code_tool.sandbox.kernel import syscall_numbers

NUMBERS = syscall_numbers(platform.machine())
FILTER = seccomp.SyscallFilter.for_machine(platform.machine())

def confine():
    seccomp.install(FILTER.program(os.getpid()))

def refusal(call, *arguments):
    try:
        value = call(*arguments)
    except OSError as e:
        return errno.errorcode[e.errno]
    return f"returned {value}"
"""


@pytest.fixture
def child(confined_child):
    return lambda script, **more: confined_child(PROLOGUE + script, **more)


@needs_seccomp
def test_filter_hides_and_protects_page_cache(child, confined_folder):
    """Without the filter, readers of a file could pass messages: one loads pages, another asks which are in memory."""
    size = 1 << 16
    with Path(confined_folder, "f").open("w+b") as file:
        file.write(bytes(size)), file.flush(), os.fsync(file.fileno())
        script = """
import mmap
f = os.open("f", os.O_RDONLY)
pages = mmap.mmap(f, 0, prot=mmap.PROT_READ)
confine()
attempts = [
    lambda: os.preadv(f, [bytearray(9)], 0, os.RWF_NOWAIT),
    lambda: os.preadv(f, [bytearray(9)], 0, 0x80),
    lambda: syscall(NUMBERS["mincore"], 0, 0, 0),
    lambda: syscall(NUMBERS["cachestat"], f, 0, 0, 0),
    lambda: os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED),
    *[lambda advice=advice: pages.madvise(advice) for advice in (20, 21, 25, 12)],
]
print(json.dumps([refusal(attempt) for attempt in attempts]))
"""
        answers = child(script)
        assert answers == [errno.errorcode[errno.EOPNOTSUPP]] * 2 + ["EPERM"] * 2 + ["returned None"] + ["EINVAL"] * 4
        assert os.preadv(file.fileno(), [bytearray(size)], 0, os.RWF_NOWAIT) == size


@needs_seccomp
def test_filter_confines_socketpair_to_itself(child, confined_folder):
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as streams,
    ):
        for server, name in ((datagrams, "datagrams"), (streams, "streams")):
            server.bind(f"{confined_folder}/{name}")
        streams.listen()
        script = """
import socket
confine()
a, b = socket.socketpair()
seen = []
for name in ("datagrams", "streams"):
    seen += [refusal(a.sendto, b"x", name), refusal(a.sendmsg, [b"x"], [], 0, name), refusal(a.connect, name)]
b.close()
print(json.dumps([*seen, refusal(a.sendto, b"x", "streams")]))
"""
        assert child(script) == ["EISCONN", "EPERM", "EPERM"] * 2 + ["EISCONN"]
        for server in (datagrams, streams):
            server.setblocking(False)
        with pytest.raises(BlockingIOError):
            datagrams.recv(1)
        with pytest.raises(BlockingIOError):
            streams.accept()


@needs_seccomp
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="needs x86-64")
def test_filter_kills_on_32_bit_call(child):
    script = """
import mmap
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory.write(bytes.fromhex("b814000000 cd80 c3"))  # mov eax, 20 (getpid); int 0x80; ret
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
assert call() == os.getpid()
confine()
call()
"""
    child(script, exit_code=-signal.SIGSYS)


@needs_seccomp
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="needs x86-64")
def test_filter_kills_on_x32_call(child):
    child("confine(); syscall(0x40000000 | NUMBERS['getpid'])", exit_code=-signal.SIGSYS)


@needs_seccomp
def test_filter_of_other_machine_kills_on_first_call(child):
    other = "x86_64" if os.uname().machine == "aarch64" else "aarch64"
    child(
        f"seccomp.install(seccomp.SyscallFilter.for_machine({other!r}).program(os.getpid()))", exit_code=-signal.SIGSYS
    )


# ---- the program, interpreted like in the kernel

ALLOW, KILL = 0x7FFF0000, 0x80000000


def answer(error: int) -> int:
    """Return the result of the filter program that makes a system call fail with `error`."""
    return 0x50000 | error


EPERM, ENOSYS, EOPNOTSUPP, EINVAL, ENOMEM, PRETENDED = map(
    answer, (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOMEM, 0)
)
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES = tuple(ARCH)
PID = 4321

CLONE_THREAD = 0x3D0F00  # the flags of glibc's pthread_create
HIGH = 1 << 32
OPENS = (0, 0x80000, 0x90000, 0x80241, 0x80242, 0x80441, 0x200000, HIGH | 0x80241)
OPENS_REFUSED = (0x200, 0x203, HIGH | 0x80200, 0x410002, 0x404002)  # O_TRUNC without writing; O_TMPFILE
SELF_OR_ZERO = [(0,), (PID,)], [(1,), (PID + 1,), (2**64 - 1,)]
THREADS_CLOCK, PROCESSES_CLOCK = (~PID << 3 | 6) % 2**64, (~1 << 3 | 2) % 2**64
CLOCKS = [(clock,) for clock in (0, 1, 2, 3, 4, 5, 6, 7, 11, THREADS_CLOCK)], [(PROCESSES_CLOCK,)], EINVAL
MESSAGES = (
    [(5, 0, 9, flags) for flags in (0, 0x40, 0x4000, 0x4142, 0x20, HIGH)],
    [(5, 0, 9, flags) for flags in (1, 0x41, 0x2000, 0x400_0000, 0x2000_0000)],
    EOPNOTSUPP,
)
CASES = {  # name -> (allowed arguments, refused arguments[, result other than EPERM])
    "clone": (
        [(CLONE_THREAD,), (0x7D0F00,)],  # glibc's threads, musl's threads
        [(flags,) for flags in (0, 17, 0x4111, 0x100, 0x10000, 0x10100, 0x10B00)]
        + [(CLONE_THREAD | 1 << bit,) for bit in (12, 13, 15, 17, 23, *range(25, 31))],
    ),
    "close_range": ([(3, 9, 0), (3, 9, 4)], [(3, 9, 2), (3, 9, 6)]),
    "getsockopt": ([(5, 1, 4), (5, 1, 39)], [(5, 1, 77), (5, 6, 4), (5, 1, 26)]),
    "sendto": MESSAGES,
    "recvfrom": MESSAGES,
    "socketpair": ([(1, 1), (1, 0x80801)], [(1, 2), (1, 5), (1, 3), (2, 1), (10, 1), (16, 3), (1, 0x80802)]),
    "open": ([(0, flags) for flags in OPENS], [(0, flags) for flags in OPENS_REFUSED]),
    "openat": ([(0, 0, flags) for flags in OPENS], [(0, 0, flags) for flags in OPENS_REFUSED]),
    "kill": ([(PID, 9)], [(0, 9), (2**64 - 1, 9), (2**32 - PID, 9), (1, 9), (PID + 1, 0)]),
    "tgkill": ([(PID, PID + 7, 9)], [(1, PID, 9), (0, 0, 0), (2**32 - 1, PID, 9)]),
    "sched_getaffinity": (*SELF_OR_ZERO, ENOSYS),
    **dict.fromkeys(("sched_setaffinity", "sched_getparam", "sched_getscheduler", "getpgid", "getsid"), SELF_OR_ZERO),
    "getpriority": ([(0, 0), (0, PID)], [(0, 1), (0, PID + 1), (1, 0), (2, 0)]),
    **dict.fromkeys(("clock_gettime", "clock_getres", "clock_nanosleep"), CLOCKS),
    "futex": (
        [(0, op | flags) for op in (0, 1, 3, 4, 5, 9, 10) for flags in (0, 0x80, 0x100, 0x180)],
        [(0, op | flags) for op in (2, 6, 7, 8, 11, 12, 13, 14, 0x200) for flags in (0, 0x80)],
        ENOSYS,
    ),
    "mmap": (
        [(0, 9, 3, flags) for flags in (0x22, 0x4022, 0x10_0022, 0x1, 0x2, 0x3, 0x8001, 0x812)],
        [(0, 9, 3, flags) for flags in (0x4_0022, 0x5404_0022, 0x21, 0x23, 0x28, 0x8, 0x10_0021, HIGH | 0x21)],
        ENOMEM,
    ),
    "madvise": (
        [(0, 9, advice) for advice in (0, 1, 2, 3, 4, 8, 10, 14, 15, 16, 17, 18, 19, 22, 23)],
        [(0, 9, advice) for advice in (5, 9, 12, 13, 20, 21, 24, 25, 100, 101, 2**32 - 1)],
        EINVAL,
    ),
    "preadv2": ([(3, 0, 1, 0, 0, 0)], [(3, 0, 1, 0, 0, flag) for flag in (1, 8, 0x80, 0x100, 8 | 2)], EOPNOTSUPP),
    "pwritev2": (
        [(3, 0, 1, 0, 0, flags) for flags in (0, 2, 4, 0x16)],
        [(3, 0, 1, 0, 0, flag) for flag in (1, 8, 0x80, 0x18)],
        EOPNOTSUPP,
    ),
    "fadvise64": ([(3, 0, 0, a) for a in (0, 1, 2, 3)], [(3, 0, 0, a) for a in (4, 5)], PRETENDED),
    "renameat2": ([(0, 0, 0, 0, f) for f in (0, 1, 2)], [(0, 0, 0, 0, f) for f in (4, 5, 8)], EINVAL),
    "prctl": ([(15,), (16,)], [(1,), (4,), (22,), (38,), (0x53564D41,), (0,)]),
    "prlimit64": ([(0, 7, 0), (PID, 7, 0)], [(0, 7, 4096), (0, 7, HIGH), (PID, 7, HIGH | 1), (1, 7, 0)]),
    "ioctl": (
        [(0, 0x5401), (9, 0x541B), (9, 0x5421), (9, 0x5450), (9, 0x5451), (0, HIGH | 0x5401)],
        [(0, 0x5412), (0, HIGH | 0x5412), (0, 0x5402), (0, 0x8901), (0, 0)],
    ),
    "fcntl": (
        [(3, command) for command in (0, 1, 2, 3, 4, 5, 1030, 1032)],
        [(3, command) for command in (8, 9, 10, 12, 13, 14, 15, 36, 37, 38, 1024, 1025, 1026, 1031, 1033, 1036)],
    ),
}


def verdict(program: bytes, number: int, arguments=(), arch: int = ARCH["x86_64"]) -> int:
    """Interpret a program like the kernel, with some checks of its verifier."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, arch, 0, *padded)
    instructions = [*struct.iter_unpack("<HBBI", program)]
    position = accumulator = 0
    while True:
        code, if_true, if_false, value = instructions[position]
        position += 1
        if code == 0x20:
            assert value % 4 == 0
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x05:
            position += value
        elif code == 0x06:
            return value
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            position += if_true if holds else if_false


@pytest.fixture(params=MACHINES)
def machine(request):
    return request.param


@pytest.fixture
def judge(machine):
    """Function (name, arguments) -> verdict; None if the architecture lacks the call."""
    program = SyscallFilter.for_machine(machine).program(PID)
    numbers = kernel.syscall_numbers(machine)

    def judge_call(name, *arguments):
        return verdict(program, numbers[name], arguments, ARCH[machine]) if name in numbers else None

    return judge_call


def test_rules_name_only_system_calls():
    for rules in (seccomp.WITHOUT_PROGRAMS, seccomp.WITH_PROGRAMS, seccomp.WITH_PROGRAMS_AS_OWNER):
        assert {*(rules.allowed or ()), *rules.answers, *rules.conditions} <= kernel.X86_64.keys()
        assert not rules.answers.keys() & rules.conditions.keys()
    assert {"open", "stat", "fork", "poll"}.isdisjoint(kernel.AARCH64)


def test_filter_refuses_dangerous_calls(judge, machine):
    answers = {name: judge(name) for name in DENIED if name in kernel.syscall_numbers(machine)}
    assert answers == dict.fromkeys(answers, EPERM)
    assert kernel.X86_64.keys() >= set(DENIED)


def test_filter_allows_calls_of_ordinary_code(judge, machine):
    answers = {name: judge(name) for name in NEEDED if name in kernel.syscall_numbers(machine)}
    assert answers == dict.fromkeys(answers, ALLOW)
    assert kernel.X86_64.keys() >= set(NEEDED)


@pytest.mark.parametrize("name", CASES)
def test_filter_checks_arguments(judge, name):
    allowed, refused, *answer = CASES[name]
    for arguments, wanted in ((allowed, ALLOW), (refused, *(answer or [EPERM]))):
        answers = {each: judge(name, *each) for each in arguments}
        assert set(answers.values()) <= {wanted, None}, answers
    assert CASES.keys() == seccomp.CONDITIONAL.keys()


def test_filter_makes_python_copy_by_read_and_write(judge):
    assert (judge("sendfile", 1, 0), judge("copy_file_range")) == (answer(errno.ENOTSOCK), answer(errno.EXDEV))
    assert judge("ioctl", 3, 0x40049409) == EOPNOTSUPP  # FICLONE, which `pathlib` tries first


OWNERS_CHANGES = ("fchmodat", "fchownat", "utimensat")
PROGRAMS_NEED = {  # name -> arguments
    **dict.fromkeys(("execve", "execveat", "wait4", "setsid", "setpgid", "kill", "ptrace", "pipe2", "openat"), ((),)),
    **dict.fromkeys(("fchmodat", "fchownat", "utimensat", "readlinkat", "memfd_create", "copy_file_range"), ((),)),
    "clone": [(17,), (0x4111,), (CLONE_THREAD,), (0x1200011,)],
    "unshare": [(0x200,), (0x4_0000,)],
    "close_range": [(3, 9, 0), (3, 9, 4)],
    "socketpair": [(1, 1), (1, 0x80801), (1, 5)],
    "prctl": [(1,), (15,), (38,), (36,)],
    "fcntl": [(3, command) for command in (0, 1, 2, 3, 4, 5, 6, 7, 8, 1025, 1030, 1031)],
    "prlimit64": [(0, 7, 0), (0, 7, 4096)],
    "sched_setaffinity": [(0,)],
    "setpriority": [(0, 0)],
    "mmap": [(0, 9, 3, 0x21)],
}
PROGRAMS_LACK = {  # name -> answer, arguments
    "clone": (EPERM, [(0x1000_0011,), (0x2_0011,), (0x4000_0011,), (0x200_0011,), (0x3D0B00,)]),
    "close_range": (EPERM, [(3, 9, 2)]),
    "unshare": (EPERM, [(0x400,), (0x1000_0000,), (0x80,), (0x4000_0000,), (0x200 | 0x2_0000,)]),
    "socket": (answer(errno.EAFNOSUPPORT), [(family, kind) for family in (1, 2, 10, 16, 38, 40) for kind in (1, 2)]),
    "socketpair": (EOPNOTSUPP, [(1, 2), (1, 3), (1, 0x80802)]),
    "prctl": (EPERM, [(4, 0), (HIGH | 4, 0), (41, 0)]),
    "fcntl": (EPERM, [(3, 1024)]),
    **dict.fromkeys(("prlimit64", "sched_setaffinity", "sched_setattr"), (EPERM, [(1,), (PID,), (2**64 - 1,)])),
    **dict.fromkeys(("setpriority", "ioprio_set"), (EPERM, [(0, 1), (2, 5)])),
    **dict.fromkeys(("sendmsg", "sendmmsg", "setns", "mount", "syslog"), (EPERM, [()])),
    **dict.fromkeys(("sendfile", "splice", "tee", "vmsplice"), (EINVAL, [()])),
    **dict.fromkeys(("io_uring_setup", "io_uring_enter", "clone3", "shmget", "msgsnd", "semop"), (ENOSYS, [()])),
    **dict.fromkeys(("mq_open", "inotify_init1", "fanotify_init", "keyctl", "bpf", "memfd_secret"), (ENOSYS, [()])),
    **dict.fromkeys(("setxattr", "fsetxattr", "setxattrat", "lgetxattr", "file_setattr"), (EOPNOTSUPP, [()])),
}


@pytest.mark.parametrize("rules", [seccomp.WITH_PROGRAMS, seccomp.WITH_PROGRAMS_AS_OWNER], ids=["alone", "as-owner"])
def test_filter_with_programs(machine, rules):
    program, numbers = SyscallFilter.for_machine(machine, rules).program(PID), kernel.syscall_numbers(machine)
    for name, calls in PROGRAMS_NEED.items():
        wanted = EPERM if rules is seccomp.WITH_PROGRAMS_AS_OWNER and name in OWNERS_CHANGES else ALLOW
        answers = {call: verdict(program, numbers[name], call, ARCH[machine]) for call in calls}
        assert set(answers.values()) == {wanted}, (name, answers)
    for name, (wanted, calls) in PROGRAMS_LACK.items():
        answers = {call: verdict(program, numbers.get(name, 0), call, ARCH[machine]) for call in calls}
        assert name not in numbers or set(answers.values()) == {wanted}, (name, answers)
    assert verdict(program, 999, (), ARCH[machine]) == ENOSYS


def test_filter_fakes_byte_range_locks(judge):
    f_setlk, f_setlkw = 6, 7
    assert {judge("fcntl", 3, f_setlk), judge("fcntl", 3, HIGH | f_setlkw)} == {PRETENDED}


def test_filter_answers_enosys_to_unknown_call(judge, machine):
    assert {judge(name) for name in ("clone3", "openat2", "futex_waitv", "futex_wait", "futex_wake")} == {ENOSYS}
    program = SyscallFilter.for_machine(machine).program(PID)
    assert verdict(program, 471, (), ARCH[machine]) == ENOSYS


def test_filter_kills_on_other_architecture(machine):
    program = SyscallFilter.for_machine(machine).program(PID)
    for arch in {0x40000003, 0x40000028, *ARCH.values()} - {ARCH[machine]}:
        assert {verdict(program, number, (), arch) for number in range(500)} == {KILL}


def test_filter_program_fills_in_own_pid():
    syscall_filter = SyscallFilter.for_machine("x86_64")
    kill = kernel.X86_64["kill"]
    for pid, other in ((7, 8), (8, 7), (2**22, 7)):
        program = syscall_filter.program(pid)
        assert (verdict(program, kill, (pid, 9)), verdict(program, kill, (other, 9))) == (ALLOW, EPERM)
    assert SyscallFilter.for_machine("arm64") == SyscallFilter.for_machine("aarch64")


def test_filter_rejects_unknown_machine():
    with pytest.raises(ValueError, match="riscv64.*expected one of x86_64, aarch64, arm64"):
        SyscallFilter.for_machine("riscv64")


def test_is_supported_is_false_outside_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert (seccomp.is_supported(), kernel.landlock_abi()) == (False, 0)
    for call in (lambda: kernel.syscall(20), lambda: kernel.prctl(16), lambda: seccomp.install(b"")):
        with pytest.raises(OSError, match="it needs Linux") as caught:
            call()
        assert caught.value.errno == errno.ENOSYS
