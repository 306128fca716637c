"""Strands tools for the agents of these tests, found by dotted path."""

import asyncio
import time

from slime_workers import prepare_worker
from strands import tool

prepare_worker()


@tool
def multiply(a: int, b: int) -> str:
    """Multiply two integers."""
    return str(a * b)


@tool
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


@tool
def block(seconds: float) -> str:
    """Wait, synchronously."""
    time.sleep(seconds)
    return "waited"


@tool
async def cancel() -> str:
    """Raise CancelledError although the task is not cancelled."""
    raise asyncio.CancelledError
