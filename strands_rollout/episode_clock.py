"""Seconds since an episode began, for whatever runs in it.

Time between an abort and the resumption is none of the episode's: its clock stands still meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

_BEGAN: Final[ContextVar[float | None]] = ContextVar("strands_rollout_episode_began", default=None)


@contextmanager
def episode_clock(elapsed_s: float = 0.0) -> Iterator[None]:
    """Start the clock for whatever the block calls, awaits or starts.

    Args:
        elapsed_s: Seconds that the episode took before it was aborted.
    """
    token = _BEGAN.set(time.monotonic() - elapsed_s)
    try:
        yield
    finally:
        _BEGAN.reset(token)


def began_at_s(seconds: float) -> float | None:
    """When something of the episode began that ends now, to 0.1 ms; None outside of one.

    Args:
        seconds: How long it took.
    """
    began = _BEGAN.get()
    return None if began is None else round(max(0.0, time.monotonic() - seconds - began), 4)
