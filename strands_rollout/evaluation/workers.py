"""Runs samples, a bounded number at once, and gives up where nothing but the same fault comes back.

Knows keys and results; nothing of how a sample is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from strands_rollout.evaluation.plan import SampleKey
from strands_rollout.evaluation.results_file import SampleResult

_LEAST_PATIENCE = 8


@dataclass(slots=True)
class Patience:
    """Counts failures in a row with one kind of error; any scored sample starts it anew.

    Attributes:
        most: So many in a row end the run.
        kind: Of the error that they have.
        count: How many there are.
    """

    most: int
    kind: str = ""
    count: int = 0

    @classmethod
    def of(cls, concurrency: int) -> Patience:
        """As many as run at once, at least 8: by then a whole round has failed, each after its own retries."""
        return cls(max(_LEAST_PATIENCE, concurrency))

    def note(self, result: SampleResult) -> str | None:
        """Count a result; the reason to stop, if that is reached."""
        if result.is_scored:
            self.count = 0
            return None
        kind = f"{result.stop_reason} {(result.error or '').partition(':')[0]}"
        self.count = self.count + 1 if kind == self.kind else 1
        self.kind = kind
        if self.count < self.most:
            return None
        return f"{self.count} samples in a row failed alike, the last one with {result.error or result.stop_reason}"


class _NoPatienceError(Exception):
    """Ends the workers' group."""


async def run_samples(
    keys: Iterable[SampleKey],
    run: Callable[[SampleKey], Awaitable[SampleResult]],
    *,
    concurrency: int,
) -> str | None:
    """Run each key once, in order, with so many workers.

    Args:
        keys: Taken one by one as workers come free.
        run: Makes and keeps a sample's result.
        concurrency: Workers.

    Returns:
        Why it was stopped early, the samples under way being cancelled; None if all were run.

    Raises:
        Exception: The first that `run` raised; the others are cancelled.
    """
    waiting, patience = iter(keys), Patience.of(concurrency)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(_work(waiting, run, patience))
    except ExceptionGroup as e:
        first = e.exceptions[0]
        if isinstance(first, _NoPatienceError):
            return str(first)
        raise first from None
    return None


async def _work(
    waiting: Iterator[SampleKey], run: Callable[[SampleKey], Awaitable[SampleResult]], patience: Patience
) -> None:
    for key in waiting:
        reason = patience.note(await run(key))
        if reason is not None:
            raise _NoPatienceError(reason)
