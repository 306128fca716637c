"""Strands tools for the agents of these tests, found by dotted path as a user's are."""

import asyncio
import time
from typing import Final

import recorded_tools
from strands import tool

held: Final[set[str]] = set()


@tool
def multiply(a: int, b: int) -> str:
    """Multiply two integers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a * b)


@tool
async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "waited"


@tool
def block(seconds: float) -> str:
    """Wait, synchronously.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "waited"


@tool
def fail() -> str:
    """Fail."""
    raise RuntimeError("the tool broke")


@tool
async def cancel() -> str:
    """Raise what a cancelled task raises, although nobody cancelled this one."""
    raise asyncio.CancelledError


@tool
async def hold(call: str) -> str:
    """Work, for ever while `held` has the end of the call's name.

    Args:
        call: Its name.
    """
    recorded_tools.began.append(call)
    if any(call.endswith(name) for name in held):
        await asyncio.sleep(60)
    recorded_tools.ended.append(call)
    return f"{call} is done"
