"""An attack as data: its code, its target, and the limits under which attacks run."""

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from attack_targets import Stage, Target

from strands_rollout.code_tool import ExecutionResult

TIMEOUT_S: Final = 6
MEMORY_MB: Final = 640
DISK_MB: Final = 32
MAX_FILES: Final = 512
MAX_THREADS: Final = 32


# Only what libc has no function for. The numbers from 424 on are the same on every machine.
_SAME: Final = {"io_uring_setup": 425, "fsopen": 430}
_BY_MACHINE: Final = {
    "x86_64": {"exit": 60, "tgkill": 234, "perf_event_open": 298, "bpf": 321, "execveat": 322, "userfaultfd": 323},
    "aarch64": {"exit": 93, "tgkill": 131, "perf_event_open": 241, "bpf": 280, "execveat": 281, "userfaultfd": 282},
}
SYSCALLS: Final = _SAME | _BY_MACHINE.get(platform.machine(), {})

PRELUDE: Final = '''
import ctypes, json, mmap, os, re, signal, socket, struct, sys, threading, time
TARGET = json.loads({facts!r})
libc = ctypes.CDLL(None, use_errno=True)
number = ctypes.c_long

def checked(result):
    """What a call of libc returned, as an OSError if it failed."""
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def syscall(name, *args):
    """A system call by name; every argument goes as a whole register."""
    whole = [number(argument) if isinstance(argument, int) else argument for argument in args]
    return checked(libc.syscall(number(TARGET["syscalls"][name]), *whole))

def be_known():
    """Take a name by which the host finds this process and its children, and let it look into them."""
    libc.prctl(15, TARGET["name"].encode(), 0, 0, 0)
    libc.prctl(4, 1, 0, 0, 0)

def hold(seconds={hold_s}):
    """Stay as things are until the host has looked; it ends this run as soon as it has seen what it looks for."""
    print(TARGET["name"], "holds", flush=True)
    time.sleep(seconds)

def each(*tries):
    """Try them all, and report what each one met."""
    for attempt in tries:
        try:
            print(attempt())
        except BaseException as error:
            print(type(error).__name__, error)
'''


@dataclass(frozen=True)
class Attack:
    """The code of an attack, and its target."""

    name: str  # what it does, as a test's id
    code: str  # Python source; it is run after `PRELUDE`
    target: Callable[[Stage], Target]  # makes what is attacked, which also sees whether it was hit
    never_on_plain: str = ""  # why the plain backend is safe from it as well, or why it must not be tried there
    seldom_on_plain: str = ""  # what on some machines stops it even without isolation
    timeout_s: float = 6.0  # wall-clock limit of the run

    def was_stopped(self, result: ExecutionResult, name: str) -> bool:
        """Return whether the code was refused something, or ended, before it held the resource that the host looks
        for."""
        return f"{name} holds" not in result.stdout and (result.exit_code != 0 or result.killed_by is not None)

    def code_for(self, facts: dict[str, Any], hold_s: int = 4) -> str:
        return PRELUDE.format(facts=json.dumps({"syscalls": SYSCALLS, **facts}), hold_s=hold_s) + self.code
