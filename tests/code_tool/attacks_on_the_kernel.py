"""Attacks on interfaces of the kernel: namespaces, capabilities, io_uring, bpf, IPC."""

import ctypes
import secrets
from functools import partial
from pathlib import Path
from typing import Final

from attack import Attack
from attack_targets import Stage, Target
from host_view import ObservedProcesses, Process
from signs import changes, holds

_NO_RIGHT: Final = "a container, or an ordinary user's rights, may refuse it"
_NAMESPACES: Final = {"mnt": 0x20000, "user": 0x10000000, "net": 0x40000000}
_HANDLES: Final = {
    "io_uring": ("kept = syscall('io_uring_setup', 8, (ctypes.c_uint64 * 32)())", "[io_uring]"),
    "bpf-map": ("kept = syscall('bpf', 0, struct.pack('IIII', 2, 4, 4, 1) + bytes(100), 116)", "bpf-map"),
    "perf-event": (
        "kept = syscall('perf_event_open', struct.pack('IIQQQQQ', 1, 112, 0, 0, 0, 0, 0x61) + bytes(64), 0, -1, -1, 0)",
        "[perf_event]",
    ),
    "userfaultfd": ("kept = syscall('userfaultfd', 1)", "[userfaultfd]"),
    "file-system": ("kept = syscall('fsopen', b'tmpfs', 0)", "[fscontext]"),
    "process-handle": ("kept = os.pidfd_open(os.getppid())", "pidfd"),
    "memory-file": ("kept = os.memfd_create('a')", "/memfd:"),
    "secret-memory-file": ("kept = checked(libc.syscall(number(447), number(0)))", "/secretmem"),
}
_ALWAYS: Final = ("process-handle", "memory-file")


class SystemV(Target):
    """Shared memory, queue or semaphore with a key known to the attacker; it would outlive the run."""

    def __init__(self, stage: Stage, kind: str, remove: str) -> None:
        super().__init__(stage)
        self._kind, self._remove = kind, remove
        self.facts |= {"key": secrets.randbelow(2**31 - 2) + 1}

    def _number(self) -> int | None:
        lines = Path("/proc/sysvipc", self._kind).read_text().splitlines()[1:]
        return next((int(line.split()[1]) for line in lines if int(line.split()[0]) == self.facts["key"]), None)

    def check_damage(self) -> bool:
        return self._number() is not None

    def close(self) -> None:
        if (number := self._number()) is not None:
            remove = getattr(ctypes.CDLL(None), self._remove)
            remove(number, 0, 0, None) if self._kind == "sem" else remove(number, 0, None)


_SYSTEM_V: Final = {
    "shared-memory": ("shm", "checked(libc.shmget(TARGET['key'], 65536, 0o1666))"),
    "message-queue": ("msg", "checked(libc.msgget(TARGET['key'], 0o1666))"),
    "semaphore": ("sem", "checked(libc.semget(TARGET['key'], 1, 0o1666))"),
}


def _has_rights(process: Process) -> bool:
    return int(process.status("CapEff") or "0", 16) != 0


def _is_root(process: Process) -> bool:
    return "0" in process.status("Uid").split() + process.status("Gid").split() + process.status("Groups").split()


def _may_trace(process: Process) -> bool:
    return process.status("NoNewPrivs") == "0"


ALL: Final = (
    *(
        Attack(
            f"new-namespace-{name}",
            f"take_name()\ntime.sleep(0.3)\nchecked(libc.unshare({flag:#x}))\nhold()",
            # `changes` compares with the link's first target: an ordinary user's runs have their own user namespaces
            partial(ObservedProcesses, sign=changes(f"ns/{name}")),
            may_fail_on_plain=_NO_RIGHT,
        )
        for name, flag in _NAMESPACES.items()
    ),
    Attack(
        "change-root",
        "take_name()\nos.mkdir('jail')\nos.chroot('jail')\nhold()",
        partial(
            ObservedProcesses,
            sign=lambda processes: any(process.link("root").endswith("/jail") for process in processes),
        ),
        may_fail_on_plain=_NO_RIGHT,
    ),
    *(
        Attack(
            f"open-{name}",
            f"take_name()\n{code}\nhold()",
            partial(ObservedProcesses, sign=holds(word)),
            may_fail_on_plain="" if name in _ALWAYS else _NO_RIGHT,
        )
        for name, (code, word) in _HANDLES.items()
    ),
    *(
        Attack(f"make-{name}", code, partial(SystemV, kind=kind, remove=f"{kind}ctl"))
        for name, (kind, code) in _SYSTEM_V.items()
    ),
    Attack(
        "become-root",
        """
take_name()
try_all(lambda: os.setgroups([0]), lambda: os.setresgid(0, 0, 0), lambda: os.setresuid(0, 0, 0), lambda: os.setuid(0))
hold(0.3)
""",
        partial(ObservedProcesses, sign=lambda processes: any(_is_root(process) for process in processes)),
        may_fail_on_plain="only root can",
    ),
    Attack(
        "have-rights",
        "take_name()\nlibc.prctl(8, 1, 0, 0, 0)\nhold(0.3)",
        partial(ObservedProcesses, sign=lambda processes: any(_has_rights(process) for process in processes)),
        may_fail_on_plain="only root has capabilities",
    ),
    Attack(
        "gain-rights-by-programs",
        "take_name()\nlibc.prctl(38, 0, 0, 0, 0)\nhold(0.3)",
        partial(ObservedProcesses, sign=lambda processes: any(_may_trace(process) for process in processes)),
        may_fail_on_plain="a container may set no_new_privs for all its processes",
    ),
)
