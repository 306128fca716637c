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


# System calls without a function in libc. The numbers from 424 on are the same on every architecture.
_COMMON_SYSCALLS: Final = {"io_uring_setup": 425, "fsopen": 430}
_MACHINE_SYSCALLS: Final = {
    "x86_64": {"exit": 60, "tgkill": 234, "perf_event_open": 298, "bpf": 321, "execveat": 322, "userfaultfd": 323},
    "aarch64": {"exit": 93, "tgkill": 131, "perf_event_open": 241, "bpf": 280, "execveat": 281, "userfaultfd": 282},
}
SYSCALLS: Final = _COMMON_SYSCALLS | _MACHINE_SYSCALLS.get(platform.machine(), {})

PRELUDE: Final = '''
import ctypes, json, mmap, os, re, signal, socket, struct, sys, threading, time
TARGET = json.loads({facts!r})
libc = ctypes.CDLL(None, use_errno=True)
number = ctypes.c_long

def checked(result):
    """Return the result of a libc call, or raise its error as an OSError."""
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def syscall(name, *args):
    """Make a system call by name; each argument fills a register."""
    registers = [number(argument) if isinstance(argument, int) else argument for argument in args]
    return checked(libc.syscall(number(TARGET["syscalls"][name]), *registers))

def take_name():
    """Take the attack's name, by which the host finds this process and its children, and let the host inspect them."""
    libc.prctl(15, TARGET["name"].encode(), 0, 0, 0)
    libc.prctl(4, 1, 0, 0, 0)

def hold(seconds={hold_s}):
    """Keep the resources until the host has looked; the host ends the run as soon as it sees the damage."""
    print(TARGET["name"], "holds", flush=True)
    time.sleep(seconds)

def try_all(*tries):
    """Call all functions, and print the result or error of each."""
    for attempt in tries:
        try:
            print(attempt())
        except BaseException as error:
            print(type(error).__name__, error)
'''


@dataclass(frozen=True)
class Attack:
    """The code of an attack, and its target."""

    name: str  # test id
    code: str  # Python source that runs after `PRELUDE`
    target: Callable[[Stage], Target]  # creates the target, which also detects damage
    skip_on_plain: str = ""  # why the attack fails or must not run on the plain backend
    may_fail_on_plain: str = ""  # reason why the attack fails on some machines without isolation
    timeout_s: float = 6.0  # wall-clock limit of the run

    def was_stopped(self, result: ExecutionResult, name: str) -> bool:
        """Return whether the code failed or was ended before it held the resource that the host looks for."""
        return f"{name} holds" not in result.stdout and (result.exit_code != 0 or result.killed_by is not None)

    def code_for(self, facts: dict[str, Any], hold_s: int = 4) -> str:
        return PRELUDE.format(facts=json.dumps({"syscalls": SYSCALLS, **facts}), hold_s=hold_s) + self.code
