"""The processes of a benchmark: the scripted engine, and one worker after the other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import orjson

from strands_rollout.bench.job import Figures, Job
from strands_rollout.errors import RolloutError

_WORKER_TIMEOUT_S = 1800.0
_ENGINE_TIMEOUT_S = 10.0


class BenchProcessError(RolloutError):
    """A process of the benchmark failed."""


@contextmanager
def scripted_engine(scripts: Sequence[Path], *, core: int | None, any_input: bool = False) -> Iterator[int]:
    """The engine's port, for as long as the block lasts.

    Args:
        scripts: Files of what it answers.
        core: The core that it stays on; None for any.
        any_input: Whether only the end of an input must be a script's.
    """
    options = [*(["--core", str(core)] if core is not None else []), *(["--any-input"] if any_input else [])]
    command = [sys.executable, "-m", "strands_rollout.bench.scripted_engine", *map(str, scripts), *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - ours
        try:
            port = process.stdout.readline() if process.stdout else ""
            if not port.strip():
                raise BenchProcessError("the scripted engine did not start; what it said is above")
            yield int(port)
        finally:
            if process.stdin:
                process.stdin.close()
            process.wait(_ENGINE_TIMEOUT_S)


def run_job(job: Job) -> Figures:
    """Run one worker.

    Raises:
        BenchProcessError: It failed; its last words are in the message.
    """
    command = [sys.executable, "-m", "strands_rollout.bench.worker", job.to_json()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_WORKER_TIMEOUT_S)  # noqa: S603 - ours
    if done.returncode != 0:
        raise BenchProcessError(
            f"the measurement {job.kind} of {job.variant} failed, exit code {done.returncode}:\n{done.stderr[-3000:]}"
        )
    figures: Figures = orjson.loads(done.stdout.splitlines()[-1])
    return figures
