"""The fake engine on a thread and a loop of its own, so that its work does not count as the rollout's."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Self

from fake_sglang import FakeSGLang

_START_S = 10.0


class EngineThread:
    """Runs an engine; a context manager. Only HTTP may go to it meanwhile."""

    def __init__(self, fake: FakeSGLang) -> None:
        self._fake = fake
        self._up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fake engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(_START_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_START_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with self._fake:
            self._up.set()
            await self._stop.wait()
