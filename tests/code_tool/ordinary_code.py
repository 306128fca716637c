"""Pieces of ordinary code for a confined child process in an empty directory.

The child has imported `os`, `platform`, `signal`, `threading` and `ctypes`.
"""

import os

import pytest

_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
USERS = [pytest.param(0, id="as-the-caller"), pytest.param(60001, id="as-nobody", marks=_ROOT)]
WORKS = {
    "numpy": """
import numpy
a = numpy.random.default_rng(0).random((400, 400))
assert numpy.allclose(numpy.linalg.solve(a, a), numpy.eye(400))
numpy.save("a.npy", a)
assert numpy.load("a.npy", mmap_mode="r").shape == a.shape
""",
    "sympy": "import sympy; x = sympy.Symbol('x'); assert len(sympy.solve(x**3 - 2 * x + 1, x)) == 3",
    "threads": """
import threading, concurrent.futures
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert list(pool.map(abs, [-1, 2])) == [1, 2]
""",
    "asyncio": """
import asyncio, time
async def main():
    await asyncio.gather(asyncio.sleep(0.01), asyncio.to_thread(time.sleep, 0.01))
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)
asyncio.run(main())
""",
    "tempfile": """
import tempfile
with tempfile.TemporaryFile(dir=".") as f, tempfile.NamedTemporaryFile(dir=".") as g:
    f.write(b"x"), g.write(b"x")
with tempfile.TemporaryDirectory(dir=".") as d:
    open(d + "/f", "w").close()
""",
    "sqlite": """
import sqlite3
for mode in ("delete", "wal"):
    with sqlite3.connect(mode + ".db") as db:
        db.execute("pragma journal_mode=" + mode)
        db.execute("create table t (a)")
        db.execute("insert into t values (1)")
    assert db.execute("select a from t").fetchall() == [(1,)]
    db.close()
""",
    "files": """
import fcntl, shutil, mmap
with open("f", "w+b") as f:
    f.write(b"x" * 5000), f.flush(), os.fsync(f.fileno()), f.truncate(4096)
    os.posix_fallocate(f.fileno(), 0, 8192), fcntl.flock(f, fcntl.LOCK_EX)
    fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB), fcntl.lockf(f, fcntl.LOCK_UN)
    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL), os.posix_fadvise(f.fileno(), 0, 0, 4)
    os.preadv(f.fileno(), [bytearray(1)], 0), os.pwritev(f.fileno(), [b"x"], 0)
    mmap.mmap(f.fileno(), 0)[0:1] = b"y"
    os.pread(f.fileno(), 1, 0), os.set_blocking(f.fileno(), True), f.isatty()
shutil.copyfile("f", "g")
os.makedirs("d/e"), os.rename("g", "d/g"), os.link("f", "d/h"), os.symlink("f", "l")
assert os.path.islink("l") and open("l").read() == open("f").read()
assert sorted(os.listdir("d")) == ["e", "g", "h"] and os.access("f", os.R_OK)
os.chdir("d"), os.getcwd(), os.chdir(".."), os.statvfs("."), os.umask(os.umask(0))
shutil.rmtree("d"), os.unlink("l")
""",
    "signals": """
import time
seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.01), signal.pause(), signal.alarm(5), signal.alarm(0)
os.kill(os.getpid(), signal.SIGALRM), signal.raise_signal(signal.SIGALRM)
signal.pthread_kill(threading.get_ident(), signal.SIGALRM)
assert len(seen) == 4
""",
    "waiting": """
import select, time
r, w = os.pipe()
os.write(w, b"x")
assert select.select([r], [], [], 1)[0] == [r]
poll = select.poll(); poll.register(r); assert poll.poll(1000)
epoll = select.epoll(); epoll.register(r); assert epoll.poll(1)
event = os.eventfd(1); assert os.eventfd_read(event) == 1
time.sleep(0.001), os.dup2(r, w), os.closerange(200, 300)
for descriptor in (r, w, event): os.close(descriptor)
epoll.close()
""",
    "stream pair": """
import socket
a, b = socket.socketpair()
a.sendall(b"x"), a.getsockname(), a.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF), a.settimeout(1)
assert b.recv(10) == b"x"
a.shutdown(socket.SHUT_WR)
assert b.recv(1) == b""
a.close(), b.close()
""",
    "memory": """
import mmap
code = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.madvise(mmap.MADV_DONTNEED)
assert len(bytearray(1 << 26)) == 1 << 26
""",
    "facts": """
import resource, time, zoneinfo
resource.getrlimit(resource.RLIMIT_AS), resource.getrusage(resource.RUSAGE_SELF), os.times(), os.getloadavg()
os.uname(), os.getppid(), os.getgroups(), os.getresuid(), os.getpgid(0), os.getsid(0), os.cpu_count()
os.getpriority(os.PRIO_PROCESS, 0), os.sched_getparam(0), os.sched_getscheduler(os.getpid())
time.clock_gettime(time.pthread_getcpuclockid(threading.get_ident())), time.process_time(), time.thread_time()
os.sched_setaffinity(0, os.sched_getaffinity(0)), os.sched_yield(), os.urandom(8), time.clock_getres(0)
zoneinfo.available_timezones(), platform.platform(), os.sysconf("SC_PHYS_PAGES")
with open("/proc/self/status") as f: assert f.read()
""",
    "libraries": "import _lsprof, ctypes.util; ctypes.CDLL(None).getpid()",
}

# system calls, by their names on x86-64, that the filter must refuse for all arguments, and those that it must allow
_DENIED = """
    execve execveat fork vfork ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp
    pidfd_open pidfd_getfd pidfd_send_signal tkill rt_sigqueueinfo rt_tgsigqueueinfo setsid setpgid setpriority
    socket connect bind listen accept accept4 sendmmsg recvmmsg sendmsg recvmsg
    memfd_create memfd_secret shmget shmat shmctl shmdt msgget msgsnd msgrcv msgctl semget semop semctl semtimedop
    mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
    truncate chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat
    setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr setxattrat removexattrat file_setattr
    mknod mknodat chroot pivot_root mount umount2 mount_setattr move_mount open_tree open_tree_attr fsopen fsconfig
    fsmount fspick unshare setns setuid setgid setreuid setregid setresuid setresgid setfsuid setfsgid setgroups
    capset setrlimit personality quotactl quotactl_fd reboot swapon swapoff kexec_load kexec_file_load
    init_module finit_module delete_module io_uring_setup io_uring_enter io_uring_register io_setup io_submit bpf
    perf_event_open userfaultfd add_key request_key keyctl open_by_handle_at name_to_handle_at
    fanotify_init fanotify_mark inotify_init inotify_init1 inotify_add_watch
    landlock_create_ruleset landlock_add_rule landlock_restrict_self seccomp
    sched_setscheduler sched_setparam sched_setattr timer_create signalfd4 syslog acct sethostname setdomainname
    settimeofday clock_settime clock_adjtime adjtimex ioperm iopl modify_ldt lookup_dcookie vhangup arch_prctl
    migrate_pages move_pages mbind set_mempolicy get_mempolicy ioprio_set ioprio_get capget setsockopt mincore cachestat
    readahead sync_file_range sync syncfs mlock munlock mlock2 mseal timer_settime sched_getattr sched_rr_get_interval
    splice tee vmsplice mlockall get_robust_list uselib
"""

_NEEDED = """
    read write close open openat stat fstat newfstatat statx lseek mprotect munmap mremap brk madvise futex rseq
    set_robust_list exit exit_group rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall getrandom
    clock_gettime clock_nanosleep gettimeofday getpid gettid geteuid sched_yield sched_getaffinity getrusage times
    sysinfo uname getcwd chdir mkdirat unlinkat renameat linkat symlinkat getdents64 ftruncate
    flock fsync pselect6 ppoll epoll_pwait epoll_create1 eventfd2 pipe2 alarm setitimer
    sendto recvfrom shutdown getsockname getpeername getrlimit wait4
"""

DENIED = tuple(_DENIED.split())
NEEDED = tuple(_NEEDED.split())
