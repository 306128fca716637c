"""How much of the machine this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cpus(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs that this process may use, and at least 2: its affinity, or its container's quota where that is less.

    Args:
        cgroups: Where the kernel shows the container's own limits (cgroup v2, else v1).
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 2
    quota = _quota(cgroups)
    return max(2, min(cpus, math.ceil(quota)) if quota is not None else cpus)


def _quota(cgroups: Path) -> float | None:
    """CPUs' worth of time per period; None for no limit."""
    try:
        if (limit := cgroups / "cpu.max").exists():
            quota, period = limit.read_text().split()
        else:
            quota, period = (
                (cgroups / "cpu" / name).read_text().strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            )
        return int(quota) / int(period) if quota not in {"max", "-1"} else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
