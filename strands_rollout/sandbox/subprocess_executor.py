"""The plain backend: a fresh `python -I` per call, with limits but WITHOUT isolation from files, network or processes.

Knows threads and the event loop; the child itself is `child_process.py`'s.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Self

from strands_rollout.errors import SandboxError
from strands_rollout.sandbox.child_process import ChildLimits, run_child
from strands_rollout.sandbox.executor import ExecutionResult, ExecutorFacts, check_call, check_positive, retried_once
from strands_rollout.sandbox.machine_size import usable_cpus


class SubprocessExecutor:
    """Runs each piece of code in its own Python process. This is NOT isolation.

    The code runs as the user who runs this process: it can read and write that user's files, use the network, signal
    that user's processes, and leave a daemon behind. What it gets is a clean environment (no inherited variables, so no
    secrets from there), a private scratch directory as HOME and working directory, empty stdin, and limits on
    wall-clock time, CPU time, memory, file size and output.

    At most `max_concurrency` children run at once, over all event loops; the rest wait, and their time limit starts
    when the code does. Children are started from threads: asyncio's own subprocesses fork on the loop's thread.

    Args:
        timeout_s: Default limit in wall-clock seconds; a call may name its own.
        max_output_chars: Characters kept of stdout and of stderr: half from the head, half from the tail.
        max_output_mb: A child that writes more mebibytes than this is killed.
        memory_mb: Address space of a child in mebibytes.
        file_mb: Largest file that a child may write, in mebibytes.
        max_concurrency: Children at once; None for the number of usable CPUs, and at least 2.

    Raises:
        ConfigError: A limit is not a positive number.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 30.0,
        max_output_chars: int = 20_000,
        max_output_mb: int = 64,
        memory_mb: int = 4096,
        file_mb: int = 128,
        max_concurrency: int | None = None,
    ) -> None:
        self._limits = ChildLimits(timeout_s, max_output_chars, max_output_mb, memory_mb, file_mb)
        self._max_concurrency = usable_cpus() if max_concurrency is None else max_concurrency
        wanted = {
            "timeout_s": timeout_s,
            "max_output_chars": max_output_chars,
            "max_output_mb": max_output_mb,
            "memory_mb": memory_mb,
            "file_mb": file_mb,
            "max_concurrency": self._max_concurrency,
        }
        for name, value in wanted.items():
            check_positive(name, value)
        self.facts = ExecutorFacts(memory_mb=memory_mb)
        self._pools: dict[int, ThreadPoolExecutor] = {}
        self._closed = False

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        """Run code in a fresh process; see `CodeExecutor.run`.

        Raises:
            ConfigError: An argument can't be used; `session` must be None, since this backend keeps none.
            SandboxError: The executor has been closed.
        """
        limits = self._limits if timeout_s is None else replace(self._limits, timeout_s=timeout_s)
        check_call("SubprocessExecutor", code, limits.timeout_s, session, keeps_sessions=False)
        if self._closed:
            raise SandboxError("SubprocessExecutor.run was called after aclose(); make a new executor")
        return await retried_once(lambda: self._attempt(code, limits))

    async def _attempt(self, code: str, limits: ChildLimits) -> ExecutionResult:
        cancelled = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool(), run_child, code, limits, cancelled)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        except Exception as e:  # whatever breaks here is this backend's fault, and never the code's
            return ExecutionResult("", "", None, infra_error=f"{type(e).__name__}: {e}")

    async def close_session(self, session: str) -> None:
        """Nothing to do: this backend keeps none."""

    async def aclose(self) -> None:
        """Refuse new calls, wait for running ones, end the threads. Safe to call twice."""
        self._closed = True
        pool = self._pools.pop(os.getpid(), None)
        if pool is not None:
            await asyncio.to_thread(pool.shutdown)

    async def __aenter__(self) -> Self:
        """Return self."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close."""
        await self.aclose()

    def _pool(self) -> ThreadPoolExecutor:
        """The threads of this process: a forked child inherits the object, but not the threads."""
        pid = os.getpid()
        if pid not in self._pools:
            pool = ThreadPoolExecutor(self._max_concurrency, thread_name_prefix="code-executor")
            return self._pools.setdefault(pid, pool)
        return self._pools[pid]
