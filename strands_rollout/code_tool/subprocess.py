"""The plain backend: a fresh `python -I` per call, with limits but WITHOUT isolation."""

import asyncio
import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Final

from strands_rollout.code_tool.executors import (
    ExecutionResult,
    ExecutorFacts,
    StatelessExecutor,
    infra_failure,
    retried_once,
    usable_cpus,
)
from strands_rollout.code_tool.local.sandbox import scratch
from strands_rollout.code_tool.local.sandbox.output import CappedOutput, signal_words
from strands_rollout.errors import SandboxError, foreign_code

_CODE_RUNNER: Final = Path(__file__).with_name("local") / "sandbox" / "code_runner.py"
_START_LIMIT_S: Final = 60.0  # an interpreter that has not started by then is the machine's fault
_POLL_S: Final = 0.05  # how soon a cancellation, or an end that closed no pipe, is seen
_DRAIN_S: Final = 0.5  # a process that left the group may hold the pipes open for ever
_CHUNK_BYTES: Final = 65536
_MEBIBYTE: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """What one child may use."""

    timeout_s: float
    max_output_chars: int
    max_output_mb: int
    memory_mb: int
    file_mb: int


def run_child(code: str, limits: ChildLimits, cancelled: threading.Event) -> ExecutionResult:
    """Run `code` in a fresh interpreter, in its own session and scratch directory; both are gone on return.

    Setting `cancelled` ends it within about 0.05 s. What the machine refuses becomes `infra_error`, not an OSError.
    """
    try:
        with contextlib.ExitStack() as stack:
            folder = tempfile.mkdtemp(prefix="code-")
            stack.callback(scratch.delete, folder)
            ready_read, ready_write = os.pipe()
            ready = stack.enter_context(os.fdopen(ready_read, "rb", buffering=0))
            try:
                process = _start(code, limits, folder, ready_write)
            finally:
                os.close(ready_write)
            return _Watch(process, ready, limits, cancelled).result()
    except OSError as e:
        return infra_failure(f"can't run {sys.executable!r}: {e}")


def _start(code: str, limits: ChildLimits, folder: str, ready_fd: int) -> subprocess.Popen[bytes]:
    """Start the child; no preexec_fn, so that Python uses vfork, whose cost does not grow with the parent's memory."""
    whole_s = math.ceil(limits.timeout_s)
    numbers = [ready_fd, whole_s + 2, limits.memory_mb, limits.file_mb, whole_s + 10]
    # everything the child sees; one thread per numeric library, since each would otherwise start one per core
    path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])
    environment = {"PATH": path, "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with tempfile.TemporaryFile() as stdin:
        stdin.write(code.encode("utf-8", "surrogatepass"))
        stdin.seek(0)
        return subprocess.Popen(  # noqa: S603 - a fixed command; the code is data
            [sys.executable, "-I", "-X", "utf8", str(_CODE_RUNNER), *map(str, numbers)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=folder,
            env=environment,
            start_new_session=True,
            pass_fds=(ready_fd,),
        )


class _Watch:
    """Follows one child from its start to its end, on the thread that started it."""

    def __init__(
        self, process: subprocess.Popen[bytes], ready: IO[bytes], limits: ChildLimits, cancelled: threading.Event
    ) -> None:
        self._process = process
        self._ready = ready
        self._limits = limits
        self._cancelled = cancelled
        self._stdout = CappedOutput(limits.max_output_chars)
        self._stderr = CappedOutput(limits.max_output_chars)
        self._started_at: float | None = None
        self._deadline = time.monotonic() + _START_LIMIT_S
        self._killed_by: str | None = None
        self._timed_out = False

    def result(self) -> ExecutionResult:
        """Read to the end, then reap; whatever happens, the group is dead and the descriptors are closed afterwards."""
        with self._process, selectors.DefaultSelector() as selector:
            for stream in (self._process.stdout, self._process.stderr, self._ready):
                selector.register(stream, selectors.EVENT_READ)  # type: ignore[arg-type]
            try:
                self._read_until_end(selector)
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            ended_at = time.monotonic()
            # an escaped process that keeps writing is cut off
            while selector.get_map() and time.monotonic() < ended_at + _DRAIN_S:
                self._take_all(selector, _POLL_S)
        return self._summary(ended_at)

    def _read_until_end(self, selector: selectors.BaseSelector) -> None:
        pause_s = 0.0005  # between the end of the pipes and that of the process there is normally less than this
        while not self._has_ended() and not self._must_die():
            if not selector.get_map():
                time.sleep(pause_s)
                pause_s = min(_POLL_S, 2 * pause_s)
                continue
            self._take_all(selector, min(_POLL_S, max(0.0, self._deadline - time.monotonic())))

    def _must_die(self) -> bool:
        limit_bytes = self._limits.max_output_mb * _MEBIBYTE
        if self._cancelled.is_set():
            self._killed_by = "cancellation"
        elif self._stdout.total_bytes + self._stderr.total_bytes > limit_bytes:
            self._killed_by = f"output limit of {self._limits.max_output_mb} MiB"
        elif time.monotonic() >= self._deadline:
            self._timed_out = True
            self._killed_by = f"time limit of {self._limits.timeout_s:g} s"
        return self._killed_by is not None

    def _take_all(self, selector: selectors.BaseSelector, wait_s: float) -> None:
        for key, _ in selector.select(wait_s):
            chunk = os.read(key.fd, _CHUNK_BYTES)
            if key.fileobj is self._ready:
                if chunk:
                    self._started_at = time.monotonic()
                    self._deadline = self._started_at + self._limits.timeout_s
            else:
                output = self._stdout if key.fileobj is self._process.stdout else self._stderr
                output.feed(chunk, final=not chunk)
            if not chunk or key.fileobj is self._ready:
                selector.unregister(key.fileobj)

    def _has_ended(self) -> bool:
        """Whether the child has exited; it is not reaped, so that no other group can take its number."""
        if not hasattr(os, "waitid"):
            return self._process.poll() is not None
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _summary(self, ended_at: float) -> ExecutionResult:
        exit_code = self._process.returncode
        infra_error = None
        if self._started_at is None and self._killed_by != "cancellation":
            reason = f"exit code {exit_code}" if not self._timed_out else f"nothing in {_START_LIMIT_S:g} s"
            infra_error = f"the interpreter did not start ({reason}): {self._stderr.text()[-500:]!r}"
        return ExecutionResult(
            stdout=self._stdout.text(),
            stderr=self._stderr.text(),
            exit_code=exit_code,
            timed_out=self._timed_out,
            truncated=self._stdout.truncated or self._stderr.truncated,
            duration_s=max(0.0, ended_at - (self._started_at or ended_at)),
            killed_by=self._killed_by or signal_words(exit_code),
            infra_error=infra_error,
        )


class SubprocessExecutor(StatelessExecutor):
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
        super().__init__(
            **asdict(self._limits), facts=ExecutorFacts(memory_mb=memory_mb), max_concurrency=self._max_concurrency
        )
        self._pools: dict[int, ThreadPoolExecutor] = {}
        self._closed = False

    async def _run(self, code: str, timeout_s: float) -> ExecutionResult:
        if self._closed:
            raise SandboxError("SubprocessExecutor.run was called after aclose(); make a new executor")
        limits = replace(self._limits, timeout_s=timeout_s)
        return await retried_once(lambda: self._attempt(code, limits))

    async def _attempt(self, code: str, limits: ChildLimits) -> ExecutionResult:
        cancelled = threading.Event()
        try:
            with foreign_code("whatever breaks here is this backend's fault, and never the code's") as outcome:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._pool(), run_child, code, limits, cancelled)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return infra_failure(f"{type(outcome.error).__name__}: {outcome.error}")

    async def aclose(self) -> None:
        """Refuse new calls, wait for running ones, end the threads. Safe to call twice."""
        self._closed = True
        pool = self._pools.pop(os.getpid(), None)
        if pool is not None:
            await asyncio.to_thread(pool.shutdown)

    def _pool(self) -> ThreadPoolExecutor:
        """The threads of this process: a forked child inherits the object, but not the threads."""
        pid = os.getpid()
        if pid not in self._pools:
            pool = ThreadPoolExecutor(self._max_concurrency, thread_name_prefix="code-executor")
            return self._pools.setdefault(pid, pool)
        return self._pools[pid]
