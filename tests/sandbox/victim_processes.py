"""Processes that are attacked: a stranger with secrets, and the very process that owns the executor.

Knows what of a process can be read or changed from outside, and looks at it from the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from types import FrameType

from attack_targets import Stage, Target
from host_view import Process, descendants

_FIXED = ("TracerPid", "Cpus_allowed")


class Stranger(Target):
    """A process of the same user, with a secret in its arguments, its environment and its memory."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        del stage
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", "read line", self.secret],
            env={"SECRET": self.secret},
            stdin=subprocess.PIPE,
            process_group=0,
        )
        self._view = Process(self._process.pid)
        while self.secret not in self._view.text("environ"):  # until then it is still a copy of this process
            pass
        self._before = self._state()
        start = int(self._view.text("stat").rpartition(")")[2].split()[47])
        self.facts |= {"pid": self._process.pid, "address": start, "length": len(self.secret) + 8}

    def _state(self) -> tuple[object, ...]:
        pid = self._process.pid
        return (
            [self._view.status(field) for field in _FIXED],
            *(self._view.text(file) for file in ("environ", "limits", "oom_score_adj")),
            os.getpriority(os.PRIO_PROCESS, pid),
            os.sched_getscheduler(pid),
            _input_output_priority(pid),
        )

    def seen(self) -> bool:
        if self._process.poll() is not None or self._view.status("State")[:1] in "Tt":
            return True
        return self._state() != self._before

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _input_output_priority(pid: int) -> int:
    number = {"x86_64": 252, "aarch64": 31}.get(os.uname().machine)
    return int(ctypes.CDLL(None).syscall(number, 1, pid)) if number else 0


class Owner(Target):
    """This process, which owns the executor, and the helpers of that.

    It listens to SIGURG, which hurts nobody who comes too late; a helper that gets SIGUSR1 dies.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._memory = ctypes.create_string_buffer(self.secret.encode())
        family = descendants(os.getpid())
        self._helpers = family & {Process(pid).number("PPid") for pid in family}  # who has children: no run has
        self._signalled = False
        self._handler = signal.signal(signal.SIGURG, self._take)
        self.facts |= {
            "pid": os.getpid(),
            "address": ctypes.addressof(self._memory),
            "length": len(self.secret),
            "signal": signal.SIGURG,
            "signal_to_parent": signal.SIGUSR1 if stage.has_helpers else signal.SIGURG,
        }

    def _take(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._signalled = True

    def seen(self) -> bool:
        changed = self._memory.value != self.secret.encode()
        for process in map(Process, self._helpers):
            if process.status("State")[:1] == "T":  # or nothing would ever end again
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
                changed = True
        return changed or self._signalled or not all(process.is_alive() for process in map(Process, self._helpers))

    def close(self) -> None:
        signal.signal(signal.SIGURG, self._handler)
