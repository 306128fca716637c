"""How much a rollout asks of its process: how late the event loop is, and how much memory it takes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

_TICK_S = 0.01
_LOOK_S = 0.05
_PAGE_BYTES = 4096


@dataclass
class Strain:
    """Measured while a block ran.

    Attributes:
        lags_s: How late each tick of 10 ms was.
        busy_s: How long the loop's thread computed before each tick, which no other process lengthens.
        memory_mb: What the process took more at its peak than at the begin, resident; 0 where there is no /proc.
    """

    lags_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    memory_mb: float = 0.0

    def lag_s(self, share: float) -> float:
        """The lag that so many of the ticks stayed below."""
        return _quantile(self.lags_s, share)

    def computed_s(self, share: float) -> float:
        """How long the loop's thread computed at most before so many of the ticks."""
        return _quantile(self.busy_s, share)


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@contextlib.asynccontextmanager
async def measured() -> AsyncIterator[Strain]:
    """Measures the running loop and this process."""
    strain, stop = Strain(), threading.Event()
    watching = threading.Thread(target=_watch_memory, args=(strain, _resident_mb(), stop), daemon=True)
    watching.start()
    ticking = asyncio.create_task(_tick(strain))
    try:
        yield strain
    finally:
        ticking.cancel()
        stop.set()
        watching.join()


async def _tick(strain: Strain) -> None:
    while True:
        due, computed = time.monotonic() + _TICK_S, time.thread_time()
        await asyncio.sleep(_TICK_S)
        strain.lags_s.append(time.monotonic() - due)
        strain.busy_s.append(time.thread_time() - computed)


def _watch_memory(strain: Strain, before_mb: float, stop: threading.Event) -> None:
    while not stop.wait(_LOOK_S):
        strain.memory_mb = max(strain.memory_mb, _resident_mb() - before_mb)


def _resident_mb() -> float:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * _PAGE_BYTES / 2**20 if statm.exists() else 0.0
