"""Symbolic equality in worker processes, with a time limit that holds whatever the expression is.

Knows processes, threads and `symbolic_worker.py`'s protocol. Nothing starts before the first question; workers are
fresh interpreters, not forks, serve every event loop of the process, and end when it does.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from strands_rollout.errors import RolloutError
from strands_rollout.grading.comparison import Comparison

_LOGGER = logging.getLogger(__name__)
_START_LIMIT_S: Final = 60.0  # importing sympy takes half a second, and far more while a training run starts
_GRACE_S: Final = 1.0  # the worker's own timer comes first
_MOST_WORKERS: Final = 8
_MOST_REMEMBERED: Final = 4096
_HOSTILE: Final = re.compile(
    r"\d{4,}\s*!|!\s*!\s*!|\^\s*\{?\s*[+-]?\d{5,}|\d\s*\)?(?:\^|\*\*)[{(\s]*\d+\s*(?:\^|\*\*)|\d{200}"
)

_pools: dict[int, SymbolicPool] = {}


class WorkerEndedError(RolloutError):
    """A worker's process is over, or gave no reply in time and must be ended."""


class WorkerUnavailableError(RolloutError):
    """No worker can be started here: its library is missing, or the machine refuses the process."""


class Worker:
    """One worker process. Blocking; for one thread at a time."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-m", "strands_rollout.grading.symbolic_worker"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env={"LANG": "C.UTF-8", "PYTHONPATH": os.pathsep.join(entry or os.curdir for entry in sys.path)},
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait for the imports.

        Raises:
            WorkerUnavailableError: They failed.
            WorkerEndedError: The process ended, or took longer than a minute.
        """
        error = self._receive(_START_LIMIT_S).get("error")
        if error is not None:
            raise WorkerUnavailableError(f"the symbolic worker can't start: {error}")

    def are_equal(self, prediction: str, label: str, limit_s: float) -> bool:
        """Ask one question.

        Raises:
            WorkerEndedError: The process ended, by its own timer or otherwise; `close` it.
        """
        question = {"prediction": prediction, "label": label, "limit_s": limit_s}
        try:
            self._socket.sendall(json.dumps(question).encode() + b"\n")
        except OSError as e:
            raise WorkerEndedError("the symbolic worker is gone") from e
        return bool(self._receive(limit_s + _GRACE_S).get("equal"))

    def close(self) -> None:
        """End the process and reap it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _receive(self, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        line = b""
        while not line.endswith(b"\n"):
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                chunk = self._socket.recv(65536)
            except OSError as e:  # TimeoutError is one
                raise WorkerEndedError(f"the symbolic worker gave no reply in {limit_s:g} s") from e
            if not chunk:
                raise WorkerEndedError("the symbolic worker ended")
            line += chunk
        message: dict[str, Any] = json.loads(line)
        return message


class SymbolicPool:
    """Up to `size` workers of one process, each behind a thread of its own."""

    def __init__(self, size: int) -> None:
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="symbolic")
        self._idle: list[Worker] = []
        self._known: dict[tuple[str, str], Comparison] = {}
        self._unavailable = ""
        self._reported: set[str] = set()

    async def compare(self, prediction: str, label: str, limit_s: float) -> Comparison:
        """Compare two formulas; see `compare_symbolically`."""
        if _HOSTILE.search(prediction):
            return Comparison(equal=False, method="algebra_refused")
        known = self._known.get((prediction, label))
        if known is not None:
            return known
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._compare, prediction, label, limit_s)

    def close(self) -> None:
        """End all workers; waits for the questions that are being answered."""
        self._threads.shutdown(cancel_futures=True)
        while self._idle:
            self._idle.pop().close()

    def _compare(self, prediction: str, label: str, limit_s: float) -> Comparison:
        """On a thread of the pool. Identical questions, as a group of samples asks them, cost one answer."""
        if (prediction, label) not in self._known:
            if len(self._known) >= _MOST_REMEMBERED:
                self._known.clear()
            try:
                self._known[prediction, label] = self._ask(prediction, label, limit_s)
            except (RolloutError, OSError) as e:
                self._report(str(e))
                return Comparison(equal=False, method="algebra_unavailable")
        return self._known[prediction, label]

    def _report(self, error: str) -> None:
        """Log each reason once: every further question would repeat it."""
        if error not in self._reported:
            self._reported.add(error)
            _LOGGER.warning("event=symbolic_worker_unavailable error=%s", error)

    def _ask(self, prediction: str, label: str, limit_s: float) -> Comparison:
        for is_retry in (False, True):  # a worker may have been killed while it was idle
            worker = self._take(fresh=is_retry)
            started_at = time.monotonic()
            try:
                equal = worker.are_equal(prediction, label, limit_s)
            except WorkerEndedError:
                worker.close()
                if time.monotonic() - started_at > 0.9 * limit_s:
                    return Comparison(equal=False, method="algebra_timeout")
            else:
                self._idle.append(worker)
                return Comparison(equal, method="algebra")
        return Comparison(equal=False, method="algebra_crash")

    def _take(self, *, fresh: bool) -> Worker:
        if self._unavailable:
            raise WorkerUnavailableError(self._unavailable)
        if self._idle and not fresh:
            try:
                return self._idle.pop()
            except IndexError:  # another thread was faster
                pass
        worker = Worker()
        try:
            worker.wait_until_ready()
        except RolloutError as e:
            worker.close()
            if isinstance(e, WorkerUnavailableError):
                self._unavailable = str(e)
            raise
        return worker


async def compare_symbolically(prediction: str, label: str, limit_s: float) -> Comparison:
    """Whether algebra makes two formulas equal; never takes long on the event loop.

    Args:
        prediction: LaTeX or plain notation without delimiters, at most a few hundred characters.
        label: As `prediction`; math-verify lets it decide what form is asked for.
        limit_s: Seconds that a worker may spend on it; waiting for a worker is not counted.

    Returns:
        `equal` is never None. `method` is "algebra", or why there was none: "algebra_refused" (a tower of powers, a
        huge factorial), "algebra_timeout", "algebra_crash", "algebra_unavailable" (no worker can be started).
    """
    return await _pool().compare(prediction, label, limit_s)


def close_workers() -> None:
    """End this process's workers; the next question starts new ones. Called at exit."""
    pool = _pools.pop(os.getpid(), None)
    if pool is not None:
        pool.close()


def _pool() -> SymbolicPool:
    """This process's pool: a forked process inherits the object, but neither threads nor workers."""
    pid = os.getpid()
    if pid not in _pools:
        affinity = getattr(os, "sched_getaffinity", None)
        cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
        pool = _pools.setdefault(pid, SymbolicPool(max(1, min(_MOST_WORKERS, cpus // 2))))
        atexit.register(close_workers)
        return pool
    return _pools[pid]
