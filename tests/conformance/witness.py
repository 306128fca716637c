"""A generation beside others, which shows that they were ended."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from answer_shape import ABORTED
from engine_api import in_flight, until_load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from served_engine import ServedEngine


@asynccontextmanager
async def witness(engine: ServedEngine) -> AsyncIterator[None]:
    """Checks that long generations that begin in the block end before a shorter one, which begins with it."""
    shorter = {**engine.long, "max_new_tokens": engine.long["max_new_tokens"] * 3 // 4}
    async with in_flight(engine, "witness", **shorter) as [task]:
        await until_load(engine, 1)
        yield
        await until_load(engine, 1)
        # whether its task is done would not tell: the load falls to 1 before the witness's own answer arrives
        await engine.post("/abort_request", {"rid": "witness"})
        assert (await task)["meta_info"]["finish_reason"] == ABORTED
