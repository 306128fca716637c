"""Bounded waits for conditions without an event, for the end of other processes, and for files that they write."""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path


async def wait_until(condition: Callable[[], object], within_s: float = 240.0) -> None:
    """Poll `condition` until it is true; after `within_s`, raise TimeoutError, so that a failing test doesn't hang."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    """Return whether a process exists and, on Linux, is not a zombie."""
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    try:  # a process that ends before the file is opened or read raises FileNotFoundError or ProcessLookupError
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def exits_within(pid: int, within_s: float = 30.0) -> bool:
    """Wait for the end of a process, and return whether it ended in time."""
    deadline = time.monotonic() + within_s
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def wait_for_number(note: Path, within_s: float = 30.0) -> int:
    """Wait until another process has written a number and a newline to a file, and return the number."""
    deadline = time.monotonic() + within_s
    while not (note.exists() and note.read_text().endswith("\n")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no number was written to {note} within {within_s:g} s")
        time.sleep(0.02)
    return int(note.read_text())
