"""The parts that remote backends share: an event loop of their own, and code packed as a self-contained script.

The script is for sandboxes that run plain Python scripts. It brings its own supervisor (`remote_supervisor.py`).
Results therefore look like those of the local executor, however the sandbox handles a script's output. The value of a
last expression is printed, and tracebacks show only the code's own frames. The time limit starts with the code, and
output before a timeout is kept.

`SubprocessExecutor`, the simplest backend, runs that script on this machine, with limits, but with NO isolation.
"""

import asyncio
import base64
import contextlib
import functools
import json
import math
import os
import re
import secrets
import signal
import sys
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from strands_rollout.code_tool import executors
from strands_rollout.code_tool.executors import ExecutionResult, ExecutorFacts
from strands_rollout.code_tool.sandbox import scratch
from strands_rollout.code_tool.sandbox.code_runner import describe_signal, shorten
from strands_rollout.errors import SandboxError

_EXIT_JOIN_TIMEOUT_S: Final = 2.0  # a loop that does not stop must not keep the process alive


@dataclass(slots=True)
class _LoopThread:
    """One process's event loop and its thread; a forked child inherits this object, but not the thread."""

    loop: asyncio.AbstractEventLoop
    slots: asyncio.Semaphore
    thread: threading.Thread
    calls: set[asyncio.Task[ExecutionResult] | None] = field(default_factory=set)


class LoopExecutor(executors.StatelessExecutor):
    """Base class of executors with an event loop in a daemon thread; at most `max_concurrency` calls run at once.

    The first call starts the thread. With a single loop, a backend needs one connection pool, one semaphore and no
    lock, however many loops call it. If a backend blocks its loop briefly, for example to start a process, no other
    loop is blocked. When the interpreter exits, it closes an executor that is still open.
    """

    def __init__(
        self,
        timeout_s: float,
        max_output_chars: int,
        max_concurrency: int,
        facts: ExecutorFacts | None = None,
    ) -> None:
        super().__init__(timeout_s, max_output_chars, facts or ExecutorFacts(), max_concurrency=max_concurrency)
        self._max_concurrency = max_concurrency
        self._by_process: dict[int, _LoopThread] = {}
        self._lock = threading.Lock()
        self._closed = False

    async def aclose(self) -> None:
        """Refuse new calls, wait for running calls, release resources and end the thread. Safe to call twice."""
        with self._lock:
            self._closed = True
            worker = self._by_process.pop(os.getpid(), None)
        if worker is None:
            return
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_drain(worker), worker.loop))
        worker.loop.call_soon_threadsafe(worker.loop.stop)
        await asyncio.to_thread(worker.thread.join)

    async def _attempt(self, code: str, timeout_s: float) -> ExecutionResult:
        """Run code once; awaited on the executor's own loop."""
        raise NotImplementedError

    async def _release(self) -> None:
        """Release the backend's resources; awaited on the executor's own loop before the loop is closed."""

    async def _run(self, code: str, timeout_s: float) -> ExecutionResult:
        return await executors.run_with_one_retry(lambda: self._run_in_slot(code, timeout_s))

    async def _run_in_slot(self, code: str, timeout_s: float) -> ExecutionResult:
        worker = self._ensure_loop()

        async def attempt() -> ExecutionResult:
            task = asyncio.current_task()
            worker.calls.add(task)
            called_at = time.monotonic()
            try:
                async with worker.slots:
                    waited_s = time.monotonic() - called_at
                    result = await self._attempt(code, timeout_s)
                return replace(result, queued_s=waited_s + result.queued_s)
            finally:
                worker.calls.discard(task)

        # a cancellation of this await also ends the attempt
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(attempt(), worker.loop))

    def _ensure_loop(self) -> _LoopThread:
        name = type(self).__name__
        with self._lock:
            if self._closed:
                raise SandboxError(f"{name}.run was called after aclose(); create a new executor")
            pid = os.getpid()
            if pid not in self._by_process:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_run_loop, args=(loop, self._release), name=name, daemon=True)
                thread.start()
                weakref.finalize(self, _stop_loop, loop, thread, pid)
                self._by_process[pid] = _LoopThread(loop, asyncio.Semaphore(self._max_concurrency), thread)
            return self._by_process[pid]


def _run_loop(loop: asyncio.AbstractEventLoop, release: Callable[[], Coroutine[object, object, None]]) -> None:
    async def shut_down() -> None:
        remaining = asyncio.all_tasks() - {asyncio.current_task()}  # calls remain only at the interpreter's exit
        for task in remaining:
            task.cancel()
        await asyncio.gather(*remaining, return_exceptions=True)
        await release()

    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(shut_down())
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _stop_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    if pid == os.getpid() and not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_EXIT_JOIN_TIMEOUT_S)


async def _drain(worker: _LoopThread) -> None:
    await asyncio.gather(*filter(None, worker.calls), return_exceptions=True)


START_ALLOWANCE_S: Final = 10.0  # for the interpreter's start and, after the time limit, for the report
MAX_OUTPUT_MB: Final = 64
_SENT_MODULES: Final = ("remote_supervisor", "sandbox/code_runner")
_MAX_REPORT_BYTES: Final = 16 << 20  # decompressed; far above any genuine report
_UNDECODABLE: Final = "[DecodeError]"  # SandboxFusion's replacement for output that is not UTF-8
_SHOWN_CHARS: Final = 300
_MAX_EXIT_CODE: Final = 0xFFFF_FFFF  # no operating system has larger exit codes


@dataclass(frozen=True, slots=True)
class RemoteProgram:
    """Code and its limits: `text` returns a script that runs the code; `result` parses the script's output."""

    code: str
    timeout_s: float
    max_output_chars: int
    max_report_bytes: int  # must be below the sandbox's limit on stdout; the streams in a larger report are shortened
    memory_mb: int | None = None
    file_mb: int | None = None  # the largest file that the code may write
    max_output_mb: int = MAX_OUTPUT_MB  # the code is killed when it writes more
    token: str = field(default_factory=lambda: secrets.token_hex(8))  # marks the supervisor's own lines in stdout

    def text(self) -> str:
        """Return the ASCII text of the script, which needs no arguments, files or stdin."""
        job = asdict(self)
        return (
            "import base64, json, sys, types, zlib\n"
            f"sources, job = (json.loads(zlib.decompress(base64.b64decode(part))) for part in "
            f"({_packed_sources()!r}, {_packed(job)!r}))\n"
            "supervisor = sys.modules['remote_supervisor'] = types.ModuleType('remote_supervisor')\n"
            "exec(compile(sources['remote_supervisor'], '<supervisor>', 'exec'), supervisor.__dict__)\n"
            "supervisor.run(job, sources)\n"
        )

    def result(self, stdout: str, stderr: str, exit_code: int | None, *, gave_up: bool = False) -> ExecutionResult:
        """Return the result from the supervisor's report in the script's output; other lines are skipped.

        If there is no report and no sign that the code started, the result has an `infra_error`. If the code started
        but there is no report, the result has no output. Its `killed_by` is then the time limit (if `gave_up`) or the
        end of the supervisor.

        Args:
            stdout: The script's whole stdout, as the sandbox returned it.
            stderr: The script's stderr, quoted in an `infra_error`.
            exit_code: The script's exit code, None if unknown.
            gave_up: True if the sandbox stopped waiting before the script ended.
        """
        result = self._find_report(stdout)
        if result is not None:
            return result
        if f"{self.token} start" not in stdout and not stdout.startswith(_UNDECODABLE):
            end = "it did not end in time" if gave_up else f"exit code {exit_code}"
            output = (stderr.strip() or stdout.strip())[-_SHOWN_CHARS:]
            return executors.infra_failure(f"the program did not start in the sandbox ({end}): {output!r}")
        # the code started, but there is no report: it ended or stopped its supervisor, or spoiled the output
        killed_by = f"time limit of {self.timeout_s:g} s" if gave_up else "the end of its supervisor"
        return ExecutionResult("", "", exit_code or -9, timed_out=gave_up, killed_by=killed_by)

    def _find_report(self, stdout: str) -> ExecutionResult | None:
        lines = re.findall(rf"^{self.token} report ([A-Za-z0-9+/=]+)$", stdout, re.MULTILINE)
        for line in reversed(lines):
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError, zlib.error):
                raw = zlib.decompressobj().decompress(base64.b64decode(line), _MAX_REPORT_BYTES)
                return self._parse_report(json.loads(raw))
        return None

    def _parse_report(self, report: dict[str, Any]) -> ExecutionResult:
        """Convert a report to a result; the code may have forged the report, so its content is not trusted."""
        exit_code, duration_s = int(report["exit_code"]), float(report["duration_s"])
        if abs(exit_code) > _MAX_EXIT_CODE or not 0 <= duration_s < math.inf:
            raise ValueError(f"exit code {exit_code:.3g} after {duration_s} s")
        killed_by = report["killed_by"]
        max_chars = self.max_output_chars + 50  # `shorten` in the sandbox may have added a marker of up to 50
        return ExecutionResult(
            stdout=shorten(str(report["stdout"]), max_chars),
            stderr=shorten(str(report["stderr"]), max_chars),
            exit_code=exit_code,
            timed_out=bool(report["timed_out"]),
            truncated=bool(report["truncated"]),
            duration_s=duration_s,
            killed_by=describe_signal(exit_code) if killed_by is None else str(killed_by)[:_SHOWN_CHARS],
        )


def _packed(value: object) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


@functools.cache
def _packed_sources() -> str:
    folder = Path(__file__).parent
    files = [folder / f"{name}.py" for name in _SENT_MODULES]
    return _packed({file.stem: file.read_text("utf-8") for file in files})


_START_TIMEOUT_S: Final = 60.0  # if the interpreter takes longer to start, the machine is at fault
_REPORT_BYTES: Final = 8 << 20


class SubprocessExecutor(LoopExecutor):
    """Executor that runs each piece of code in its own Python process. This is NOT isolation.

    The code runs as this process's user: it can read and write that user's files, use the network, signal that user's
    processes, and leave a daemon behind. It inherits no environment variables, and thus no secrets in them. It gets a
    private scratch directory as HOME and working directory, and an empty stdin. Wall-clock time, memory, file size and
    output are limited.

    At most `max_concurrency` calls run at once, over all event loops; further calls wait. A call's time limit starts
    with its code.

    Args:
        timeout_s: Default limit in wall-clock seconds; a call may set its own.
        max_output_chars: Characters kept of stdout and of stderr: half from the head, half from the tail.
        max_output_mb: Code that prints more mebibytes than this, on stdout and stderr together, is killed.
        memory_mb: Maximum address space of a child in mebibytes.
        file_mb: Largest file that a child may write, in mebibytes.
        max_concurrency: Maximum number of calls that run at once; None for the number of usable CPUs, at least 2.

    Raises:
        ConfigError: A limit is not a positive number.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 30.0,
        max_output_chars: int = 20_000,
        max_output_mb: int = MAX_OUTPUT_MB,
        memory_mb: int = 4096,
        file_mb: int = 128,
        max_concurrency: int | None = None,
    ) -> None:
        slots = executors.usable_cpus() if max_concurrency is None else max_concurrency
        super().__init__(timeout_s, max_output_chars, slots, ExecutorFacts(memory_mb=memory_mb))
        executors.check_positive(max_output_mb=max_output_mb, memory_mb=memory_mb, file_mb=file_mb)
        self._limits = (memory_mb, file_mb, max_output_mb)

    async def _attempt(self, code: str, timeout_s: float) -> ExecutionResult:
        program = RemoteProgram(code, timeout_s, self._max_output_chars, _REPORT_BYTES, *self._limits)
        try:
            folder = tempfile.mkdtemp(prefix="code-")
            try:
                return await _run_in_subprocess(program, folder)
            finally:
                await asyncio.to_thread(scratch.delete, folder)
        except OSError as e:
            return executors.infra_failure(f"can't make the code's folder or start {sys.executable!r}: {e}")


async def _run_in_subprocess(program: RemoteProgram, folder: str) -> ExecutionResult:
    # the child gets only these variables; they limit numeric libraries to one thread, instead of one per core
    path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])
    environment = {"PATH": path, "LANG": "C.UTF-8", "TMPDIR": folder}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-X", "utf8", "-"),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env=environment,
        start_new_session=True,
    )
    output = b"", b""
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_TIMEOUT_S + program.timeout_s):
                output = await process.communicate(program.text().encode())
        gave_up = process.returncode is None
    finally:
        with contextlib.suppress(ProcessLookupError):
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    stdout, stderr = (text.decode("utf-8", "replace") for text in output)
    return program.result(stdout, stderr, process.returncode, gave_up=gave_up)
