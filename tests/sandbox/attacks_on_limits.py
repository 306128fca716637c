"""Attacks on the limits themselves, and on the order in which processes get what is scarce."""

from __future__ import annotations

from functools import partial
from typing import Final

from attack import Attack
from host_view import Process, Sight
from signs import unlimited


def _statistic(process: Process, index: int) -> int:
    """A number of /proc/PID/stat, counted from the state; -1 for a process that has just ended."""
    numbers = process.text("stat").rpartition(")")[2].split()
    return int(numbers[index]) if numbers else -1


ALL: Final = (
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
        partial(
            Sight,
            shows=lambda processes: any(_statistic(p, 16) < 0 for p in processes),
        ),
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
