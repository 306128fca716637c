"""Which processor cores this process may use, and keeping it on one, where the operating system allows that."""

from __future__ import annotations

import os


def usable_cores() -> list[int]:
    """The cores of this process, in order; empty where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def pin_to(core: int | None) -> None:
    """Keep this process and its children on a core; None leaves it as it is."""
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


def client_and_engine_core() -> tuple[int | None, int | None]:
    """A core for the measured client and another for the engine; None for both where there are no two."""
    cores = usable_cores()
    return (cores[0], cores[-1]) if len(cores) > 1 else (None, None)
