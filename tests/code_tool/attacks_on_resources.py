"""Attacks that take more of the machine than one run may have, and attacks on the limits themselves."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from attack import MAX_FILES, MEMORY_MB, Attack
from host_view import Process, Sight, Usage
from signs import held_above, locks_above, memory_above, pending_signals_above, pipes_above, unlimited

_SAME_LIMIT: Final = "it limits the address space too"
_MUCH_MEMORY: Final = MEMORY_MB * 5 // 4
_MUCH_DISK: Final = 512  # 16 times the limit, since what is looked at now and then is noticed late
_MEMORY: Final = {
    "bytes": "kept = bytearray(b'x') * (2 << 30)",
    "pieces": "kept = []\nwhile len(kept) < 2048:\n    kept.append(bytearray(b'x') * (1 << 20))",
    "mapping": "kept = mmap.mmap(-1, 2 << 30)\nfor i in range(0, 2 << 30, 4096):\n    kept[i] = 1",
    "libc": "libc.malloc.restype = ctypes.c_void_p\nkept = ctypes.memset(libc.malloc(number(2 << 30)), 1, 2 << 30)",
    "stack": "threading.stack_size(1 << 30)\nkept = [threading.Thread(target=lambda: ctypes.memset("
    "(ctypes.c_char * (900 << 20)).from_buffer(bytearray(900 << 20)), 1, 900 << 20)) for _ in range(4)]\n"
    "[t.start() for t in kept]",
}
_FILES_IN_MEMORY: Final = """
be_known()
kept = []
for i in range(60):
    kept.append({make})
    for _ in range(16):
        os.write(kept[-1], bytes(1 << 20))
hold()
"""

_MANY: Final = """
be_known()
for i in range(4_500):
    name = f"a{{i}}"
    {make}
    i % 100 or time.sleep(0.05)
hold()
"""


def _held(name: str, code: str, shows: Callable[[Sequence[Process]], bool], **more: str) -> Attack:
    """Takes something, and holds it until the host has looked."""
    return Attack(name, f"be_known()\n{code.strip()}\nhold()", partial(Sight, shows=shows), **more)


_ATTACKS: Final = (
    *(
        Attack(
            f"memory-in-{name}",
            f"be_known()\n{code}\nhold()",
            partial(Sight, shows=memory_above(_MUCH_MEMORY)),
            never_on_plain=_SAME_LIMIT,
        )
        for name, code in _MEMORY.items()
    ),
    _held(
        "memory-in-forks",
        """
for _ in range(4):
    if os.fork() == 0:
        kept = bytearray(b"x") * (250 << 20)
        time.sleep(9)
""",
        memory_above(_MUCH_MEMORY),
    ),
    Attack(
        "memory-in-files-without-name",
        _FILES_IN_MEMORY.format(make="os.memfd_create('a')"),
        partial(Sight, shows=held_above(_MUCH_DISK)),
    ),
    _held(
        "memory-in-secret-files",
        """
kept = []
for _ in range(2):
    handle = checked(libc.syscall(number(447), number(0)))
    os.ftruncate(handle, 700 << 20)
    kept.append(mmap.mmap(handle, 700 << 20))
    for i in range(0, 700 << 20, 4096):
        kept[-1][i] = 1
""",
        memory_above(_MUCH_MEMORY),
        never_on_plain=_SAME_LIMIT,
    ),
    Attack(
        "memory-in-pipes",
        """
import fcntl
be_known()
kept = []
for _ in range(800):
    try:
        reader, writer = os.pipe()
        kept.append((reader, writer))
        fcntl.fcntl(writer, 1031, 1 << 20)
        os.set_blocking(writer, False)
        os.write(writer, bytes(1 << 20))
    except OSError:
        break
hold(0.3)
""",
        partial(Sight, shows=pipes_above(_MUCH_DISK)),
        seldom_on_plain="only root may have that much in pipes",
    ),
    Attack(
        "kernel-memory-in-locks",
        """
import fcntl
be_known()
f = open("a", "wb")
fcntl.lockf(f, fcntl.LOCK_EX)
for i in range(20_000):
    fcntl.lockf(f, fcntl.LOCK_UN, 1, (1 << 40) - 2 * i)
hold()
""",
        partial(Sight, shows=locks_above(5000)),
    ),
    Attack(
        "kernel-memory-in-signals",
        """
be_known()
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
for _ in range(10_000):
    os.kill(os.getpid(), 40)
hold()
""",
        partial(Sight, shows=pending_signals_above(1000)),
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
        "memory-in-shared-memory-files",
        _FILES_IN_MEMORY.format(make="os.open('/dev/shm', os.O_TMPFILE | os.O_RDWR)"),
        partial(Sight, shows=held_above(_MUCH_DISK)),
        seldom_on_plain="/dev/shm may be small",
    ),
    Attack(
        "disk-in-one-file",
        "be_known()\nwith open('a', 'wb') as f:\n    for _ in range(1024):\n        f.write(bytes(1 << 20))\nhold()",
        partial(Usage, mebibytes=_MUCH_DISK),
        never_on_plain="it limits the size of one file too",
    ),
    Attack(
        "disk-in-60-files",
        """
be_known()
for i in range(60):
    with open(f"a{i}", "wb") as f:
        for _ in range(16):
            f.write(bytes(1 << 20))
    time.sleep(0.05)
hold()
""",
        partial(Usage, mebibytes=_MUCH_DISK),
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
    Attack(
        "disk-by-mapping",
        """
be_known()
for i in range(60):
    f = open(f"a{i}", "w+b")
    f.truncate(16 << 20)
    page = mmap.mmap(f.fileno(), 16 << 20)
    page[:] = bytes(b"x") * (16 << 20)
    page.close()
    f.close()
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
    _held(
        "disk-in-deleted-files-that-are-mapped",
        """
kept = []
for i in range(60):
    handle = os.open("a", os.O_CREAT | os.O_RDWR)
    os.unlink("a")
    for _ in range(16):
        os.write(handle, bytes(1 << 20))
    kept.append(checked(libc.mmap(None, number(4096), 1, 1, handle, number(0))))
    os.close(handle)
    time.sleep(0.05)
""",
        held_above(_MUCH_DISK),
        seldom_on_plain="only root sees what is mapped",
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
        "disk-in-files-that-never-had-a-name",
        _FILES_IN_MEMORY.format(make="os.open('.', os.O_TMPFILE | os.O_RDWR)"),
        partial(Sight, shows=held_above(_MUCH_DISK)),
        seldom_on_plain="the file system may not know O_TMPFILE",
    ),
    Attack(
        "many-empty-files",
        _MANY.format(make="os.close(os.open(name, os.O_CREAT))"),
        partial(Usage, files=MAX_FILES * 8),
    ),
    Attack("many-empty-folders", _MANY.format(make="os.mkdir(name)"), partial(Usage, files=MAX_FILES * 8)),
    Attack(
        "many-open-files",
        "be_known()\nkept = []\nfor i in range(15_000):\n    kept.append(os.open('/dev/null', 0))\nhold()",
        partial(Sight, shows=lambda processes: any(len(process.handles()) > 10_000 for process in processes)),
        seldom_on_plain="the machine may allow fewer open files",
    ),
)

ALL: Final = tuple(
    replace(attack, slow_on_plain=attack.name.startswith(("memory", "disk", "many"))) for attack in _ATTACKS
)


def _statistic(process: Process, index: int) -> int:
    """A number of /proc/PID/stat, counted from the state; -1 for a process that has just ended."""
    numbers = process.text("stat").rpartition(")")[2].split()
    return int(numbers[index]) if numbers else -1


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
            ("core", "Max core file size", "RLIMIT_CORE"),
            ("open-files", "Max open files", "RLIMIT_NOFILE"),
        )
    ),
    Attack(
        "escape-the-memory-killer",
        "be_known()\nos.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-900')\nhold()",
        partial(Sight, shows=lambda processes: any(int(p.text("oom_score_adj") or 0) < 0 for p in processes)),
        seldom_on_plain="only root may",
    ),
    Attack(
        "become-urgent",
        "be_known()\nos.setpriority(os.PRIO_PROCESS, 0, -10)\nhold()",
        partial(Sight, shows=lambda processes: any(_statistic(p, 16) < 0 for p in processes)),
        seldom_on_plain="only root may",
    ),
    Attack(
        "become-real-time",
        "be_known()\nos.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))\nhold()",
        partial(Sight, shows=lambda processes: any(_statistic(p, 38) == 2 for p in processes)),
        seldom_on_plain="only root may",
    ),
    Attack(
        "lock-memory",
        "be_known()\nkept = mmap.mmap(-1, 64 << 20)\n"
        "checked(libc.mlock(ctypes.byref(ctypes.c_char.from_buffer(kept)), number(64 << 20)))\nhold()",
        partial(Sight, shows=lambda processes: any(p.number("VmLck") > 32_000 for p in processes)),
        seldom_on_plain="only root may",
    ),
)
