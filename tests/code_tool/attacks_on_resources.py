"""Attacks that take more of the machine than one run may have, and attacks on the limits themselves."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from attack import MAX_FILES, MEMORY_MB, Attack
from host_view import MachineMemory, Process, Sight, Usage
from signs import held_above, locks_above, memory_above, pending_signals_above, unlimited

_MUCH_DISK: Final = 512  # 16 times the limit, since what is looked at now and then is noticed late


def _held(name: str, code: str, shows: Callable[[Sequence[Process]], bool], **more: str) -> Attack:
    """Takes something, and holds it until the host has looked."""
    return Attack(name, f"be_known()\n{code.strip()}\nhold()", partial(Sight, shows=shows), **more)


# A byte of a file that is on its way keeps the whole piece of the page cache that it lies in, here 2 MiB, also when the
# file is empty again. Each way is a call that moves pages by reference; what it moves them into holds so many of them.
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
# Memory of which all but a page is given back: no process is charged for more, and the kernel keeps the whole of it.
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

# Each piece is held by another process than the one that made it, and by that alone.
_PIECE_MIB: Final = 30
_DELETED: Final = """
import shutil
program = TARGET["name"]
shutil.copy(next(p for p in ("/bin/sleep", "/usr/bin/sleep") if os.path.exists(p)), program)
def hidden():
    # what a program that may be run and not be read holds is not shown to others of its user
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
_STAYS: Final = "libc.prctl(4, {shown}, 0, 0, 0), time.sleep(30), os._exit(0)"
_HEIRS: Final = {
    "children": f"os.fork() or ({_STAYS.format(shown=1)})",
    "orphans": f"os.waitpid(os.fork() or (os.setsid(), os.fork() and os._exit(0), {_STAYS.format(shown=1)}), 0)",
    "processes-that-hide": f"os.fork() or ({_STAYS.format(shown=0)})",
    "programs-that-hide": "os.fork() or hidden()",
    "orphans-that-hide": "os.waitpid(os.fork() or (os.setsid(), os.fork() and os._exit(0), hidden()), 0)",
}


def _takes_memory(name: str, code: str, counted: str | None = None, seldom_on_plain: str = "") -> Attack:
    target = partial(MachineMemory, mebibytes=MEMORY_MB + 40, counted=counted)
    return Attack(f"memory-in-{name}", code, target, seldom_on_plain=seldom_on_plain, timeout_s=10)


ALL: Final = (
    _held(
        "memory",
        "kept = bytearray(b'x') * (2 << 30)",
        memory_above(MEMORY_MB * 5 // 4),
        never_on_plain="it limits the address space too",
    ),
    *(
        _takes_memory(name, _PIN.format(made=made, fitting=fitting, call=call))
        for name, (made, fitting, call) in _WAYS.items()
    ),
    *(
        _takes_memory(
            f"parts-of-{name}",
            _KEEP_PARTS.format(size_mib=size_mib, count=1024 // size_mib, mapped=mapped),
            counted,
            "it needs huge pages" if name == "huge-pages" else "",
        )
        for name, (counted, size_mib, mapped) in _PARTS.items()
    ),
    _held(
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
    _held(
        "kernel-memory-in-signals",
        """
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
for _ in range(10_000):
    os.kill(os.getpid(), 40)
""",
        pending_signals_above(1000),
    ),
    _held(
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
        "be_known()\nwith open('a', 'wb') as f:\n    for _ in range(1024):\n        f.write(bytes(1 << 20))\nhold()",
        partial(Usage, mebibytes=_MUCH_DISK),
        never_on_plain="it limits the size of one file too",
    ),
    Attack(
        "disk-in-hidden-folders",
        """
be_known()
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
        seldom_on_plain="who is not root can't look there either",
    ),
    Attack(
        "disk-by-fallocate",
        """
be_known()
for i in range(40):
    handle = os.open(f"a{i}", os.O_CREAT | os.O_RDWR)
    os.posix_fallocate(handle, 0, 32 << 20)
    os.close(handle)
    time.sleep(0.05)
hold()
""",
        partial(Usage, mebibytes=_MUCH_DISK),
    ),
    _held(
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
            f"be_known()\n{_DELETED.format(handed_over=code, piece_mib=_PIECE_MIB).strip()}\nhold()",
            partial(Sight, shows=held_above(_MUCH_DISK, by_who_hides=_PIECE_MIB), judges_hidden=True),
        )
        for name, code in _HEIRS.items()
    ),
    _held(
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
be_known()
for i in range(4_500):
    os.close(os.open(f"a{i}", os.O_CREAT))
    i % 100 or time.sleep(0.05)
hold()
""",
        partial(Usage, files=MAX_FILES * 8),
    ),
    Attack(
        "many-open-files",
        "be_known()\nkept = []\nfor i in range(15_000):\n    kept.append(os.open('/dev/null', 0))\nhold()",
        partial(Sight, shows=lambda processes: any(len(process.handles()) > 10_000 for process in processes)),
        seldom_on_plain="the machine may allow fewer open files",
    ),
)

ON_LIMITS: Final = (
    *(
        Attack(
            f"raise-limit-of-{name}",
            f"""
import resource
be_known()
lift = (resource.RLIM_INFINITY,) * 2
each(lambda: resource.setrlimit(resource.{constant}, lift), lambda: resource.prlimit(0, resource.{constant}, lift))
hold(0.3)
""",
            partial(Sight, shows=unlimited(line)),
            seldom_on_plain="only root may",
        )
        for name, line, constant in (
            ("memory", "Max address space", "RLIMIT_AS"),
            ("disk", "Max file size", "RLIMIT_FSIZE"),
            ("time", "Max cpu time", "RLIMIT_CPU"),
        )
    ),
    Attack(
        "escape-the-memory-killer",
        "be_known()\nos.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-900')\nhold()",
        partial(Sight, shows=lambda processes: any(int(p.text("oom_score_adj") or 0) < 0 for p in processes)),
        seldom_on_plain="only root may",
    ),
)
