"""Attacks on what the kernel offers besides files and processes: namespaces, rights, rings, programs, IPC, keys."""

from functools import partial
from typing import Final

from attack import Attack
from attack_targets import Stage, Target
from host_view import Process, Sight
from kernel_objects import IpcObject, Keys, Queue, Segment
from signs import changes, differs, holds

_NO_RIGHT: Final = "a container, or an ordinary user's rights, may refuse it"
_NAMESPACES: Final = {
    "mnt": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000, "net": 0x40000000,
}  # fmt: skip
_HANDLES: Final = {
    "io_uring": ("kept = syscall('io_uring_setup', 8, (ctypes.c_uint64 * 32)())", "[io_uring]"),
    "bpf-map": ("kept = syscall('bpf', 0, struct.pack('IIII', 2, 4, 4, 1) + bytes(100), 116)", "bpf-map"),
    "bpf-program": (
        "p = ctypes.create_string_buffer(struct.pack('<BBHi', 0xb7, 0, 0, 0) + struct.pack('<BBHi', 0x95, 0, 0, 0))\n"
        "l = ctypes.create_string_buffer(b'GPL')\n"
        "q = struct.pack('IIQQ', 1, 2, ctypes.addressof(p), ctypes.addressof(l))\n"
        "kept = syscall('bpf', 5, q + bytes(100), 124)",
        "bpf-prog",
    ),
    "perf-event": (
        "kept = syscall('perf_event_open', struct.pack('IIQQQQQ', 1, 112, 0, 0, 0, 0, 0x61) + bytes(64), 0, -1, -1, 0)",
        "[perf_event]",
    ),
    "userfaultfd": ("kept = syscall('userfaultfd', 1)", "[userfaultfd]"),
    "file-system": ("kept = syscall('fsopen', b'tmpfs', 0)", "[fscontext]"),
    "fanotify": ("kept = checked(libc.fanotify_init(0x200, 0))", "[fanotify]"),
    "process-handle": ("kept = os.pidfd_open(os.getppid())", "pidfd"),
    "memory-file": ("kept = os.memfd_create('a')", "/memfd:"),
    "secret-memory-file": ("kept = checked(libc.syscall(number(447), number(0)))", "/secretmem"),
}
_ALWAYS: Final = ("process-handle", "memory-file")


class Watched(Target):
    """A file that the host writes to while the sandbox may be watching it: that it did is the secret."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        folder = stage.folder / f"watched-{self.name}"
        folder.mkdir()
        folder.chmod(0o755)
        self._path = folder / self.secret
        self.facts |= {"folder": str(folder)}

    def seen(self) -> bool:
        self._path.write_text("new")
        return False

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


class Lock(Target):
    """A file that the sandbox may only read, and must not keep others from locking."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._path = stage.folder / f"lock-{self.name}"
        self._path.touch(0o644)
        self.facts |= {"path": str(self._path)}

    def seen(self) -> bool:
        import fcntl

        with self._path.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


def _has_rights(process: Process) -> bool:
    return int(process.status("CapEff") or "0", 16) != 0


def _is_root(process: Process) -> bool:
    return "0" in process.status("Uid").split() + process.status("Gid").split() + process.status("Groups").split()


def _may_trace(process: Process) -> bool:
    return process.status("NoNewPrivs") == "0"


def _mount(stage: Stage) -> Sight:
    sight: Sight = Sight(stage, lambda processes: any(sight.name in process.text("mountinfo") for process in processes))
    return sight


ALL: Final = (
    *(
        Attack(
            f"new-namespace-{name}",
            f"be_known()\ntime.sleep(0.3)\nchecked(libc.unshare({flag:#x}))\nhold()",
            partial(Sight, shows=changes(f"ns/{name}")),  # an ordinary user's runs have user namespaces of their own
            seldom_on_plain=_NO_RIGHT,
        )
        for name, flag in _NAMESPACES.items()
    ),
    Attack(
        "new-namespace-of-a-user-in-a-user",
        "be_known()\nchecked(libc.unshare(0x10020000))\nhold()",
        partial(Sight, shows=differs("ns/mnt")),
        seldom_on_plain=_NO_RIGHT,
    ),
    Attack(
        "change-root",
        "be_known()\nos.mkdir('jail')\nos.chroot('jail')\nhold()",
        partial(Sight, shows=lambda processes: any(process.link("root").endswith("/jail") for process in processes)),
        seldom_on_plain=_NO_RIGHT,
    ),
    Attack(
        "mount-in-the-scratch",
        """
be_known()
each(lambda: checked(libc.unshare(0x20000)), lambda: checked(libc.mount(b"none", b"/", None, 0x44000, None)))
os.mkdir("m")
checked(libc.mount(TARGET["name"].encode(), b"m", b"tmpfs", 0, None))
hold()
""",
        _mount,
        seldom_on_plain=_NO_RIGHT,
    ),
    *(
        Attack(
            f"open-{name}",
            f"be_known()\n{code}\nhold()",
            partial(Sight, shows=holds(word)),
            seldom_on_plain="" if name in _ALWAYS else _NO_RIGHT,
        )
        for name, (code, word) in _HANDLES.items()
    ),
    *(
        Attack(f"make-{kind}-object", code, partial(IpcObject, kind=kind))
        for kind, code in (
            ("shm", "checked(libc.shmget(TARGET['key'], 65536, 0o1666))"),
            ("msg", "checked(libc.msgget(TARGET['key'], 0o1666))"),
            ("sem", "checked(libc.semget(TARGET['key'], 1, 0o1666))"),
        )
    ),
    Attack(
        "overwrite-shared-memory",
        "libc.shmat.restype = ctypes.c_void_p\n"
        "ctypes.memset(libc.shmat(checked(libc.shmget(TARGET['key'], 0, 0)), None, 0), 65, 4)",
        Segment,
    ),
    Attack("make-message-queue", "checked(libc.mq_open(TARGET['queue'].encode(), 0o102, 0o666, None))", Queue),
    *(
        Attack(
            f"add-key-to-{name}-keyring",
            f"print(syscall('add_key', b'user', TARGET['name'].encode(), b'x', 1, {ring}))\nhold()",
            Keys,
            seldom_on_plain=_NO_RIGHT,
        )
        for name, ring in (("process", -2), ("session", -3), ("user", -4))
    ),
    Attack("join-a-keyring", "syscall('keyctl', 1, TARGET['name'].encode())\nhold()", Keys, seldom_on_plain=_NO_RIGHT),
    Attack(
        "turn-off-randomization",
        "be_known()\nchecked(libc.personality(0x0040000))\nhold()",
        partial(Sight, shows=lambda processes: any(int(p.text("personality") or "0", 16) for p in processes)),
        seldom_on_plain=_NO_RIGHT,
    ),
    Attack(
        "become-root",
        """
be_known()
each(lambda: os.setgroups([0]), lambda: os.setresgid(0, 0, 0), lambda: os.setresuid(0, 0, 0), lambda: os.setuid(0))
hold(0.3)
""",
        partial(Sight, shows=lambda processes: any(_is_root(process) for process in processes)),
        seldom_on_plain="whoever is not root can't",
    ),
    Attack(
        "have-rights",
        "be_known()\nlibc.prctl(8, 1, 0, 0, 0)\nhold(0.3)",
        partial(Sight, shows=lambda processes: any(_has_rights(process) for process in processes)),
        seldom_on_plain="whoever is not root has none",
    ),
    Attack(
        "gain-rights-by-programs",
        "be_known()\nlibc.prctl(38, 0, 0, 0, 0)\nhold(0.3)",
        partial(Sight, shows=lambda processes: any(_may_trace(process) for process in processes)),
        seldom_on_plain="a container may have taken that from all of its processes",
    ),
    Attack(
        "adopt-orphans-and-outlive-the-parent",
        "be_known()\nlibc.prctl(36, 1, 0, 0, 0)\nlibc.prctl(1, 0, 0, 0, 0)\n"
        "if os.fork() == 0:\n    time.sleep(9)\nos._exit(0)",
        partial(Sight, shows=lambda processes: bool(processes), after=True),
        never_on_plain="it kills the group",
    ),
    Attack(
        "watch-files",
        """
watch = checked(libc.inotify_init1(0))
checked(libc.inotify_add_watch(watch, TARGET["folder"].encode(), 0xFFF))
print(os.read(watch, 4096))
""",
        Watched,
    ),
    Attack("lock-a-file", "import fcntl\nf = open(TARGET['path'])\nfcntl.flock(f, fcntl.LOCK_EX)\nhold()", Lock),
)
