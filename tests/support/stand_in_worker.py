"""Does with our samples what slime's fully-async rollout does with its own, without slime.

A thread with a loop of its own keeps a pool of groups running, and hands finished ones out. Nobody raises an abort
flag; weight updates abort the engine's requests, and groups with an ABORTED sample go back to the buffer. Written for
slime 0.3 (slime/rollout/fully_async_rollout.py).
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from types import TracebackType
from typing import Any, Self

from rollout_record import RolloutRecord
from stand_in_buffer import Buffer, Group
from stand_in_rollout import StandInRollout, StepSize, run_group

from strands_rollout import Sample

_POLL_S = 0.01  # slime: 1
_END_S = 30.0


class StandInWorker:
    """The worker; a context manager that waits for what is running at its end.

    Args:
        args: As slime's.
        params: slime's sampling parameters.
        buffer: Where groups come from, and where aborted ones go.
        record: Sees every call, on the worker's loop.
        pool: Groups that run at one time.

    Attributes:
        raised: Whatever a group ended with that was no result.
    """

    def __init__(self, args: Any, params: dict[str, Any], buffer: Buffer, record: RolloutRecord, *, pool: int) -> None:
        self._args, self._params, self._buffer, self._record, self._pool = args, params, buffer, record, pool
        self._finished: queue.Queue[Group] = queue.Queue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), name="stand-in worker", daemon=True)
        self.raised: list[BaseException] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(_END_S)
        assert not self._thread.is_alive(), "groups are still running"

    async def take(self, count: int, timeout_s: float) -> list[Group]:
        """So many finished groups; fewer if there are no more to come, or in that time."""
        taken: list[Group] = []
        give_up_at = time.monotonic() + timeout_s
        while len(taken) < count and time.monotonic() < give_up_at:
            try:
                taken.append(self._finished.get_nowait())
            except queue.Empty:
                if not self._thread.is_alive():
                    break
                await asyncio.sleep(_POLL_S)
        return taken

    async def _work(self) -> None:
        size = StepSize(groups=0, begun=0, concurrency=4 * self._pool)
        rollout = StandInRollout(self._args, self._params, self._buffer, self._record, size)
        active: set[asyncio.Task[Group]] = set()
        while not self._stopping.is_set():
            while len(active) < self._pool and self._finished.qsize() < self._pool and (new := self._buffer.get(1)):
                task = asyncio.create_task(run_group(rollout, new[0]))
                task.add_done_callback(self._hand_out)
                active.add(task)
            active = {task for task in active if not task.done()}
            await asyncio.sleep(_POLL_S)
        if active:
            await asyncio.wait(active, timeout=_END_S)

    def _hand_out(self, task: asyncio.Task[Group]) -> None:
        if task.cancelled() or task.exception() is not None:
            self.raised.append(task.exception() or asyncio.CancelledError())
            return
        group = task.result()
        if any(sample.status is Sample.Status.ABORTED for sample in group):
            self._buffer.add(group)
        else:
            self._finished.put(group)
