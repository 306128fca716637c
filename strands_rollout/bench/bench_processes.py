"""The processes of a benchmark: the scripted engine, and one worker after the other.

Each ends when its stdin does, and so with whoever started it, however that ends. A terminal's Ctrl-C reaches none of
them; whoever started them ends them then.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import orjson

from strands_rollout.bench.job import Figures, Job
from strands_rollout.errors import RolloutError

_WORKER_TIMEOUT_S = 1800.0
_ENGINE_TIMEOUT_S = 10.0
_LAST_WORDS_BYTES = 3000


class BenchProcessError(RolloutError):
    """A process of the benchmark failed."""


@contextmanager
def scripted_engine(scripts: Sequence[Path], *, core: int | None, any_input: bool = False) -> Iterator[int]:
    """The engine's port, for as long as the block lasts.

    Args:
        scripts: Files of what it answers.
        core: The core that it stays on; None for any.
        any_input: Whether only the end of an input must be a script's.

    Raises:
        BenchProcessError: It does not start, or a measurement in the block failed; its last words are in the message.
    """
    options = [*(["--core", str(core)] if core is not None else []), *(["--any-input"] if any_input else [])]
    command = [sys.executable, "-m", "strands_rollout.bench.scripted_engine", *map(str, scripts), *options]
    with (
        TemporaryFile() as said,
        subprocess.Popen(  # noqa: S603 - ours
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, start_new_session=True
        ) as process,
    ):
        try:
            yield _port_of(process)
        except BenchProcessError as e:
            last_words = _last_words(said)
            raise BenchProcessError(f"{e}\nthe scripted engine said:\n{last_words}" if last_words else f"{e}") from e
        finally:
            _end(process)


def _port_of(engine: subprocess.Popen[bytes]) -> int:
    port = engine.stdout.readline() if engine.stdout else b""
    if not port.strip():
        raise BenchProcessError("the scripted engine did not start")
    return int(port)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin:
        process.stdin.close()
    try:
        process.wait(_ENGINE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()


def run_job(job: Job) -> Figures:
    """Run one worker.

    Raises:
        BenchProcessError: It failed; its last words are in the message.
    """
    command = [sys.executable, "-m", "strands_rollout.bench.worker", job.to_json()]
    stdin, held = os.pipe()
    try:
        done = subprocess.run(  # noqa: S603 - ours
            command, stdin=stdin, capture_output=True, check=False, timeout=_WORKER_TIMEOUT_S, start_new_session=True
        )
    except subprocess.TimeoutExpired as e:
        raise BenchProcessError(
            f"the measurement {job.kind} of {job.variant} took over {_WORKER_TIMEOUT_S:.0f} s; ask for fewer --episodes"
        ) from e
    finally:
        os.close(held)
        os.close(stdin)
    if done.returncode != 0:
        last_words = done.stderr[-_LAST_WORDS_BYTES:].decode(errors="replace")
        raise BenchProcessError(
            f"the measurement {job.kind} of {job.variant} failed, {_ending(done.returncode)}:\n{last_words}"
        )
    figures: Figures = orjson.loads(done.stdout.splitlines()[-1])
    return figures


def _ending(code: int) -> str:
    return f"ended by signal {-code}" if code < 0 else f"exit code {code}"


def _last_words(said: IO[bytes]) -> str:
    said.seek(max(0, said.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
    return said.read().decode(errors="replace")
