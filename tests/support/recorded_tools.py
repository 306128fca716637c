"""Tools that tell which of their calls ended: `call` is a call's name."""

import asyncio
from collections import Counter
from typing import Final

from strands import tool

ended: Final[list[str]] = []
PATHS: Final = tuple(f"{__name__}.{name}" for name in ("work", "fail"))


def forget() -> None:
    ended.clear()


def ended_twice() -> list[str]:
    return [call for call, count in Counter(ended).items() if count > 1]


@tool
async def work(call: str, seconds: float = 0.0) -> str:
    """Work."""
    await asyncio.sleep(seconds)
    ended.append(call)
    return f"{call} is done"


@tool
async def fail(call: str) -> str:
    """Fail."""
    await asyncio.sleep(0)
    ended.append(call)
    raise RuntimeError(f"{call} went wrong")
