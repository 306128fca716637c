"""Attacks that use more of the machine's resources than a run may, and attacks on the limits."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from attack import MAX_FILES, MEMORY_MB, Attack
from host_view import MachineMemory, ObservedProcesses, Process, Usage
from signs import held_above, locks_above, memory_above, pending_signals_above, unlimited

_MUCH_DISK: Final = 512  # 16 times the limit, because periodic checks notice usage late


def _holding_attack(name: str, code: str, sign: Callable[[Sequence[Process]], bool], **more: str) -> Attack:
    """Return an attack that takes a resource and holds it until the host has looked."""
    return Attack(name, f"take_name()\n{code.strip()}\nhold()", partial(ObservedProcesses, sign=sign), **more)


# As long as one byte of a file is in a socket or pipe, the kernel keeps the byte's whole piece of the page cache, here
# 2 MiB, even after the file was truncated. For each way: code that makes a destination, the number of pages that fit
# into it, and a call that moves a page there by reference.
_SOCKETS: Final = ("socket.socketpair()", 100)
_PIPES: Final = ("os.pipe()", 16)
_WAYS: Final = {
    "sendfile-to-a-socket": (*_SOCKETS, "os.sendfile(kept[-1][0].fileno(), file, 0, 1)"),
    "sendfile-to-a-pipe": (*_PIPES, "os.sendfile(kept[-1][1], file, 0, 1)"),
    "splice-to-a-pipe": (*_PIPES, "checked(libc.splice(file, offset, kept[-1][1], None, number(1), 0))"),
}
_PIN: Final = """
file, piece, kept, offset = os.open("a", os.O_CREAT | os.O_RDWR), bytes(2 << 20), [], (ctypes.c_int64 * 1)(0)
for i in range(448):
    if i % {fitting} == 0:
        kept.append({made})
    os.ftruncate(file, 0)
    os.pwrite(file, piece, 0)
    offset[0] = 0
    {call}
os.ftruncate(file, 0)
hold()
"""
# Memory of which all but one page is unmapped: the processes are charged for one page, and the kernel keeps all.
_PARTS: Final = {
    "shared-memory": ("Shmem", 64, "0x21 | 0x10_0000, -1"),
    "shared-memory-of-a-device": ("Shmem", 64, "0x1 | 0x10_0000, os.open('/dev/zero', os.O_RDWR)"),
    "huge-pages": (None, 2, "0x22 | 0x10_0000, -1"),
}
_KEEP_PARTS: Final = """
libc.mmap.restype, size = ctypes.c_void_p, {size_mib} << 20
for i in range({count}):
    memory = libc.mmap(ctypes.c_void_p((1 << 44) + i * size), number(size), 3, {mapped}, number(0))
    assert memory not in (None, 2**64 - 1), os.strerror(ctypes.get_errno())
    libc.madvise(ctypes.c_void_p(memory), number(size), 14)
    ctypes.memset(memory, 1, size)
    checked(libc.munmap(ctypes.c_void_p(memory + 4096), number(size - 4096)))
hold()
"""

# Each piece is held only by a process that did not create it.
_PIECE_MIB: Final = 30
_DELETED: Final = """
import shutil
program = TARGET["name"]
shutil.copy(next(p for p in ("/bin/sleep", "/usr/bin/sleep") if os.path.exists(p)), program)
def hidden():
    # a program without read permission hides its handles from other processes of its user
    os.chmod(program, 0o111)
    os.set_inheritable(handle, True)
    os.execv(program, [program, "30"])
for i in range(24):
    handle = os.open("a", os.O_CREAT | os.O_RDWR)
    os.unlink("a")
    for _ in range({piece_mib}):
        os.write(handle, bytes(1 << 20))
    {handed_over}
    os.close(handle)
    time.sleep(0.05)
"""
_STAY: Final = "libc.prctl(4, {shown}, 0, 0, 0), time.sleep(30), os._exit(0)"
_HOLDERS: Final = {
    "children": f"os.fork() or ({_STAY.format(shown=1)})",
    "orphans": f"os.waitpid(os.fork() or (os.setsid(), os.fork() and os._exit(0), {_STAY.format(shown=1)}), 0)",
    "processes-that-hide": f"os.fork() or ({_STAY.format(shown=0)})",
    "programs-that-hide": "os.fork() or hidden()",
    "orphans-that-hide": "os.waitpid(os.fork() or (os.setsid(), os.fork() and os._exit(0), hidden()), 0)",
}


def _memory_attack(name: str, code: str, counted: str | None = None, may_fail_on_plain: str = "") -> Attack:
    target = partial(MachineMemory, mebibytes=MEMORY_MB + 40, counted=counted)
    return Attack(f"memory-in-{name}", code, target, may_fail_on_plain=may_fail_on_plain, timeout_s=10)


ALL: Final = (
    _holding_attack(
        "memory",
        "kept = bytearray(b'x') * (2 << 30)",
        memory_above(MEMORY_MB * 5 // 4),
        skip_on_plain="it limits the address space too",
    ),
    *(
        _memory_attack(name, _PIN.format(made=made, fitting=fitting, call=call))
        for name, (made, fitting, call) in _WAYS.items()
    ),
    *(
        _memory_attack(
            f"parts-of-{name}",
            _KEEP_PARTS.format(size_mib=size_mib, count=1024 // size_mib, mapped=mapped),
            counted,
            "it needs huge pages" if name == "huge-pages" else "",
        )
        for name, (counted, size_mib, mapped) in _PARTS.items()
    ),
    _holding_attack(
        "kernel-memory-in-locks",
        """
import fcntl
f = open("a", "wb")
fcntl.lockf(f, fcntl.LOCK_EX)
for i in range(20_000):
    fcntl.lockf(f, fcntl.LOCK_UN, 1, (1 << 40) - 2 * i)
""",
        locks_above(5000),
    ),
    _holding_attack(
        "kernel-memory-in-signals",
        """
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
for _ in range(10_000):
    os.kill(os.getpid(), 40)
""",
        pending_signals_above(1000),
    ),
    _holding_attack(
        "kernel-memory-in-page-tables",
        """
libc.mmap.restype = ctypes.c_void_p
for i in range(16_000):
    page = libc.mmap(ctypes.c_void_p((1 << 44) + (i << 30)), number(4096), 3, 0x22 | 0x10_0000, -1, number(0))
    ctypes.memset(page, 1, 1)
    i % 500 or time.sleep(0.02)
""",
        lambda processes: any(process.number("VmPTE") > 96 << 10 for process in processes),
    ),
    Attack(
        "disk-in-one-file",
        "take_name()\nwith open('a', 'wb') as f:\n    for _ in range(1024):\n        f.write(bytes(1 << 20))\nhold()",
        partial(Usage, mebibytes=_MUCH_DISK),
        skip_on_plain="it limits the size of one file too",
    ),
    Attack(
        "disk-in-hidden-folders",
        """
take_name()
for i in range(60):
    os.mkdir(f"{i}")
    with open(f"{i}/a", "wb") as f:
        os.chmod(f"{i}", 0)
        for _ in range(16):
            f.write(bytes(1 << 20))
    time.sleep(0.05)
hold()
""",
        partial(Usage, mebibytes=_MUCH_DISK),
        may_fail_on_plain="only root can look there",
    ),
    Attack(
        "disk-by-fallocate",
        """
take_name()
for i in range(40):
    handle = os.open(f"a{i}", os.O_CREAT | os.O_RDWR)
    os.posix_fallocate(handle, 0, 32 << 20)
    os.close(handle)
    time.sleep(0.05)
hold()
""",
        partial(Usage, mebibytes=_MUCH_DISK),
    ),
    _holding_attack(
        "disk-in-deleted-files",
        """
kept = []
for i in range(60):
    kept.append(os.open("a", os.O_CREAT | os.O_RDWR))
    os.unlink("a")
    for _ in range(16):
        os.write(kept[-1], bytes(1 << 20))
    time.sleep(0.05)
""",
        held_above(_MUCH_DISK),
    ),
    *(
        Attack(
            f"disk-in-deleted-files-of-{name}",
            f"take_name()\n{_DELETED.format(handed_over=code, piece_mib=_PIECE_MIB).strip()}\nhold()",
            partial(ObservedProcesses, sign=held_above(_MUCH_DISK, per_hiding_process=_PIECE_MIB), judges_hidden=True),
        )
        for name, code in _HOLDERS.items()
    ),
    _holding_attack(
        "disk-in-a-moving-folder",
        """
os.mkdir("a")
folder = os.open("a", os.O_RDONLY)
def move():
    while True:
        os.rename("a", "b")
        os.rename("b", "a")
threading.Thread(target=move, daemon=True).start()
for i in range(56):
    handle = os.open(f"{i}", os.O_CREAT | os.O_WRONLY, dir_fd=folder)
    for _ in range(16):
        os.write(handle, bytes(1 << 20))
    time.sleep(0.05)
""",
        held_above(_MUCH_DISK),
    ),
    Attack(
        "many-empty-files",
        """
take_name()
for i in range(4_500):
    os.close(os.open(f"a{i}", os.O_CREAT))
    i % 100 or time.sleep(0.05)
hold()
""",
        partial(Usage, files=MAX_FILES * 8),
    ),
    Attack(
        "many-open-files",
        "take_name()\nkept = []\nfor i in range(15_000):\n    kept.append(os.open('/dev/null', 0))\nhold()",
        partial(
            ObservedProcesses, sign=lambda processes: any(len(process.handles()) > 10_000 for process in processes)
        ),
        may_fail_on_plain="the machine may allow fewer open files",
    ),
)

ON_LIMITS: Final = (
    *(
        Attack(
            f"raise-limit-of-{name}",
            f"""
import resource
take_name()
lift = (resource.RLIM_INFINITY,) * 2
try_all(lambda: resource.setrlimit(resource.{constant}, lift), lambda: resource.prlimit(0, resource.{constant}, lift))
hold(0.3)
""",
            partial(ObservedProcesses, sign=unlimited(line)),
            may_fail_on_plain="only root may",
        )
        for name, line, constant in (
            ("memory", "Max address space", "RLIMIT_AS"),
            ("disk", "Max file size", "RLIMIT_FSIZE"),
            ("time", "Max cpu time", "RLIMIT_CPU"),
        )
    ),
    Attack(
        "escape-the-memory-killer",
        "take_name()\nos.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-900')\nhold()",
        partial(
            ObservedProcesses, sign=lambda processes: any(int(p.text("oom_score_adj") or 0) < 0 for p in processes)
        ),
        may_fail_on_plain="only root may",
    ),
)
