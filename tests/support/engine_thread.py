"""Run an engine in its own thread and event loop, so that its work is not counted as work of the rollout."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

_START_S = 300.0
T = TypeVar("T")


@contextmanager
def run_on_thread(engine: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enter and leave an async context manager in another thread; yield its value, to be used only over HTTP."""
    up, given, loop, stop = threading.Event(), [], asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with engine as served:
            given.append(served)
            up.set()
            await stop.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, name="engine", daemon=True)
    thread.start()
    assert up.wait(_START_S), f"the engine did not start within {_START_S:.0f} s"
    try:
        yield given[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_START_S)
