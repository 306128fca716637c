"""Waits for what tells nobody, always with an end; whether another process still runs, as Linux tells it.

A process that ends while it is looked at has ended.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path


async def wait_until(holds: Callable[[], object], within_s: float = 240.0) -> None:
    """Wait for what has no event; TimeoutError where it never comes, so that no test fails by hanging alone."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process is there and is more than a zombie."""
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    try:  # FileNotFoundError before it is opened, ProcessLookupError before it is read
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def exits_within(pid: int, within_s: float = 30.0) -> bool:
    """Whether a process is gone in time."""
    give_up_at = time.monotonic() + within_s
    while is_running(pid) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    return not is_running(pid)


def wait_for_number(note: Path, within_s: float = 30.0) -> int:
    """The number that another process writes to a file, with the end of the line; waited for."""
    give_up_at = time.monotonic() + within_s
    while not (note.exists() and note.read_text().endswith("\n")):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"nobody has written to {note}")
        time.sleep(0.02)
    return int(note.read_text())
