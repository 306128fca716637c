"""Tools that tell which of their calls began and which ended: `call` is a call's name."""

import asyncio
import time
from collections import Counter
from typing import Final

from strands import tool

began: Final[list[str]] = []
ended: Final[list[str]] = []
ended_in_threads: Final[list[str]] = []
PATHS: Final = tuple(f"{__name__}.{name}" for name in ("work", "linger", "block", "fail"))


def forget() -> None:
    for record in (began, ended, ended_in_threads):
        record.clear()


def ended_twice() -> list[str]:
    """Calls that ended more than once. Those in threads aren't counted: a thread that was cut ends all the same."""
    return [call for call, count in Counter(ended).items() if count > 1]


@tool
async def work(call: str, seconds: float = 0.0) -> str:
    """Work."""
    began.append(call)
    await asyncio.sleep(seconds)
    ended.append(call)
    return f"{call} is done"


@tool
async def linger(call: str, seconds: float) -> str:
    """Work long; not where it is begun again."""
    is_new = call not in began
    began.append(call)
    await asyncio.sleep(seconds if is_new else 0.0)
    ended.append(call)
    return f"{call} is done"


@tool
def block(call: str, seconds: float = 0.0) -> str:
    """Work, in a thread."""
    began.append(call)
    time.sleep(seconds)
    ended_in_threads.append(call)
    return f"{call} is done"


@tool
async def fail(call: str) -> str:
    """Fail."""
    began.append(call)
    await asyncio.sleep(0)
    ended.append(call)
    raise RuntimeError(f"{call} went wrong")
