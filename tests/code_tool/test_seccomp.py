import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from expected_syscalls import DENIED
from ordinary_code import WORKS

from strands_rollout.code_tool.local.sandbox import seccomp

pytestmark = pytest.mark.skipif(not seccomp.is_supported(), reason="the kernel takes no seccomp filters")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
USERS = [pytest.param(0, id="as-the-caller"), pytest.param(60001, id="as-nobody", marks=needs_root)]

PROLOGUE = """
import ctypes, errno, json, os, platform, signal, sys, threading
from strands_rollout.code_tool.local.sandbox import seccomp
from strands_rollout.code_tool.local.sandbox.kernel import syscall
from strands_rollout.code_tool.local.sandbox.kernel import syscall_numbers

NUMBERS = syscall_numbers(platform.machine())
FILTER = seccomp.SyscallFilter.for_machine(platform.machine())

def confine(user=0):
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    seccomp.install(FILTER.program(os.getpid()))

def refusal(call, *arguments):
    try:
        value = call(*arguments)
    except OSError as e:
        return errno.errorcode[e.errno]
    return f"returned {value}"
"""


@pytest.fixture
def scratch():
    """A directory that every user can work in and reach."""
    with tempfile.TemporaryDirectory(prefix="seccomp-") as folder:
        Path(folder).chmod(0o777)
        yield folder


@pytest.fixture
def child(scratch):
    """Runs a script after the prologue; returns what it printed as JSON, None if nothing."""

    def run(script: str, *, ends_with: int = 0):
        command = [sys.executable, "-c", PROLOGUE + script]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=60)
        assert done.returncode == ends_with, done.stderr
        return json.loads(done.stdout) if done.stdout else None

    return run


RUN_ALL = """
import socket, subprocess, traceback
WORKS, user = {works!r}, {user}
if user:  # who may not be able to read the libraries: have them imported before
    os.mkdir("before"), os.chdir("before")
    for name, code in WORKS.items():
        name.startswith("no ") or exec(code, dict(globals()))
    os.chdir("..")
confine(user)
failures = {{}}
for name, code in WORKS.items():
    try:
        exec(code, dict(globals()))
    except BaseException as e:
        failures[name] = traceback.format_exc()
print(json.dumps(failures))
"""


@pytest.mark.parametrize("user", USERS)
def test_ordinary_code_works(child, user):
    assert child(RUN_ALL.format(works=WORKS, user=user)) == {}


@pytest.mark.parametrize("user", USERS)
def test_what_is_dangerous_fails_with_eperm(child, user):
    script = f"""
confine({user})
names = [name for name in {DENIED!r} if name in NUMBERS]
print(json.dumps({{name: refusal(syscall, NUMBERS[name], -1, -1, -1, -1, -1, -1) for name in names}}))
"""
    answers = child(script)
    assert len(answers) > 100
    assert answers == dict.fromkeys(answers, "EPERM")


@pytest.mark.parametrize("user", USERS)
def test_no_other_process_can_be_signalled(child, user):
    script = f"""
others = os.getppid(), 1, 0, -1, -os.getpgid(0)
confine({user})
thread = lambda pid: syscall(NUMBERS["tgkill"], pid, pid, 0)
print(json.dumps([refusal(os.kill, pid, 0) for pid in others] + [refusal(thread, pid) for pid in others[:2]]))
"""
    assert child(script) == ["EPERM"] * 7


@pytest.mark.parametrize("user", USERS)
def test_nothing_is_told_of_other_processes(child, user):
    script = f"""
import resource
other = os.getppid()
confine({user})
cpu_time = (~other << 3 | 2) % 2**32
attempts = [
    *[lambda f=f: f(other) for f in (os.getpgid, os.getsid, os.sched_getaffinity, os.sched_getscheduler)],
    lambda: os.sched_getparam(other),
    lambda: os.getpriority(os.PRIO_PROCESS, other),
    lambda: os.getpriority(os.PRIO_USER, 0),
    lambda: resource.prlimit(other, resource.RLIMIT_NOFILE),
    *[lambda name=name: syscall(NUMBERS[name], cpu_time, 0, 0, 0) for name in ("clock_gettime", "clock_nanosleep")],
]
print(json.dumps([refusal(attempt) for attempt in attempts]))
"""
    assert child(script) == ["EPERM", "EPERM", "ENOSYS", *["EPERM"] * 5, "EINVAL", "EINVAL"]


def test_what_is_cached_of_a_file_can_neither_be_asked_nor_changed(child, scratch):
    """Whoever may only read a file can otherwise leave a message in which of its pages are in memory."""
    size = 1 << 16
    with Path(scratch, "f").open("w+b") as file:
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


def test_locks_of_byte_ranges_take_no_memory_of_the_kernel(child):
    script = """
import fcntl
confine()
f = open("f", "wb")
fcntl.lockf(f, fcntl.LOCK_EX)
for start in range(2000, 0, -2):
    fcntl.lockf(f, fcntl.LOCK_UN, 1, start)
unknown = [refusal(fcntl.fcntl, f, command, bytes(32)) for command in (36, 37, 38, 1024, 1026)]
fcntl.flock(f, fcntl.LOCK_EX)
held = [line.split()[1] for line in open("/proc/locks") if str(os.getpid()) in line.split()]
print(json.dumps([unknown, held]))
"""
    assert child(script) == [["EPERM"] * 5, ["FLOCK"]]


def test_threads_are_confined_and_no_namespace_comes_with_them(child):
    script = """
confine()
seen = []
thread = threading.Thread(target=lambda: seen.append(refusal(os.setsid)))
thread.start(), thread.join()
clone = lambda flags: syscall(NUMBERS["clone"], flags, 0, 0, 0, 0)
for flags in (signal.SIGCHLD, 0x4111, 0x3D0F00 | 0x10000000, 0x3D0F00 | 0x20000):
    seen.append(refusal(clone, flags))
seen.append(refusal(syscall, NUMBERS["clone3"], 0, 0))
print(json.dumps(seen))
"""
    assert child(script) == ["EPERM"] * 5 + ["ENOSYS"]


def test_a_stream_pair_reaches_nobody_else(child, scratch):
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as streams,
    ):
        for server, name in ((datagrams, "datagrams"), (streams, "streams")):
            server.bind(f"{scratch}/{name}")
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


def test_a_file_that_may_only_be_read_is_not_truncated(child, scratch):
    Path(scratch, "f").write_text("words")
    script = """
confine()
opening = lambda flags: refusal(os.open, "f", flags | os.O_TRUNC)
print(json.dumps([opening(os.O_RDONLY), opening(os.O_ACCMODE), os.stat("f").st_size, opening(os.O_WRONLY)]))
"""
    *refused, written = child(script)
    assert refused == ["EPERM", "EPERM", 5]
    assert written.startswith("returned")


def test_the_filter_holds_for_good(child):
    script = """
confine()
print(json.dumps([refusal(confine), refusal(os.execv, sys.executable, ["python"]), open("/proc/self/status").read()]))
"""
    again, execution, status = child(script)
    assert (again, execution) == ("EPERM", "EPERM")
    assert "Seccomp:\t2" in status
    assert "NoNewPrivs:\t1" in status


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the code is x86-64's")
def test_a_32_bit_call_ends_the_process(child):
    script = """
import mmap
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory.write(bytes.fromhex("b814000000 cd80 c3"))  # mov eax, 20 (getpid); int 0x80; ret
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
assert call() == os.getpid()
confine()
call()
"""
    child(script, ends_with=-signal.SIGSYS)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x32 is x86-64's")
def test_an_x32_call_ends_the_process(child):
    child("confine(); syscall(0x40000000 | NUMBERS['getpid'])", ends_with=-signal.SIGSYS)


def test_the_kernel_takes_the_other_machines_program_and_the_first_call_ends_the_process(child):
    other = "x86_64" if os.uname().machine == "aarch64" else "aarch64"
    child(
        f"seccomp.install(seccomp.SyscallFilter.for_machine({other!r}).program(os.getpid()))", ends_with=-signal.SIGSYS
    )


def test_asking_for_support_changes_nothing(child):
    script = 'assert seccomp.is_supported(); print(json.dumps(open("/proc/self/status").read()))'
    status = child(script)
    assert "Seccomp:\t0" in status
    assert "NoNewPrivs:\t0" in status
