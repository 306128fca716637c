"""What backends share that run code elsewhere: an event loop of their own, and the code as a program.

The program, for a sandbox that runs plain Python scripts, brings its own supervisor (`remote_supervisor.py`), so that
the value of a last expression is printed, tracebacks show only the code's own frames, the time limit starts with the
code, and what was printed before it is kept, whatever the sandbox makes of its scripts' output.

`SubprocessExecutor`, the plain backend, runs that program on this machine: limits, but NO isolation.
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
from strands_rollout.code_tool.sandbox.code_runner import shorten, signal_words
from strands_rollout.errors import SandboxError

_EXIT_JOIN_S: Final = 2.0  # a loop that does not stop must not keep the process from ending


@dataclass(slots=True)
class _LoopThread:
    """One process's loop: a forked child inherits the object, but not the thread."""

    loop: asyncio.AbstractEventLoop
    places: asyncio.Semaphore
    thread: threading.Thread
    calls: set[asyncio.Task[ExecutionResult] | None] = field(default_factory=set)


class LoopExecutor(executors.StatelessExecutor):
    """Runs calls on a loop in a daemon thread, at most `max_concurrency` at once; started by the first call.

    One loop means one pool of connections, one count of places and no lock in the backend, however many loops call;
    and a backend that blocks its loop for a moment, as starting a process does, blocks no other loop. What was not
    closed is closed when the interpreter ends.
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
        """Refuse new calls, wait for those that run, release what is held, end the thread. Safe to call twice."""
        with self._lock:
            self._closed = True
            running = self._by_process.pop(os.getpid(), None)
        if running is None:
            return
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_drained(running), running.loop))
        running.loop.call_soon_threadsafe(running.loop.stop)
        await asyncio.to_thread(running.thread.join)

    async def _attempt(self, code: str, timeout_s: float) -> ExecutionResult:
        """One attempt, on the loop."""
        raise NotImplementedError

    async def _release(self) -> None:
        """Awaited on the loop before it is closed: for connections."""

    async def _run(self, code: str, timeout_s: float) -> ExecutionResult:
        return await executors.retried_once(lambda: self._run_in_place(code, timeout_s))

    async def _run_in_place(self, code: str, timeout_s: float) -> ExecutionResult:
        """An attempt when a place is free, that wait added to its `queued_s`; cancelling this cancels the attempt."""
        running = self._running()

        async def attempt() -> ExecutionResult:
            task = asyncio.current_task()
            running.calls.add(task)
            called_at = time.monotonic()
            try:
                async with running.places:
                    waited_s = time.monotonic() - called_at
                    result = await self._attempt(code, timeout_s)
                return replace(result, queued_s=waited_s + result.queued_s)
            finally:
                running.calls.discard(task)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(attempt(), running.loop))

    def _running(self) -> _LoopThread:
        name = type(self).__name__
        with self._lock:
            if self._closed:
                raise SandboxError(f"{name}.run was called after aclose(); make a new executor")
            pid = os.getpid()
            if pid not in self._by_process:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_serve, args=(loop, self._release), name=name, daemon=True)
                thread.start()
                weakref.finalize(self, _stop, loop, thread, pid)
                self._by_process[pid] = _LoopThread(loop, asyncio.Semaphore(self._max_concurrency), thread)
            return self._by_process[pid]


def _serve(loop: asyncio.AbstractEventLoop, release: Callable[[], Coroutine[object, object, None]]) -> None:
    async def wind_up() -> None:
        """Cancel what still runs, as at the interpreter's end, and let go of what the backend holds."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await release()

    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(wind_up())
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    if pid == os.getpid() and not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_EXIT_JOIN_S)


async def _drained(running: _LoopThread) -> None:
    await asyncio.gather(*filter(None, running.calls), return_exceptions=True)


START_ALLOWANCE_S: Final = 10.0  # for the interpreter to start and, after the time limit, for the report
MAX_OUTPUT_MB: Final = 64
_SENT: Final = ("remote_supervisor", "sandbox/code_runner")
_MAX_REPORT_BYTES: Final = 16 << 20  # unpacked; no honest report comes near it
_UNREADABLE: Final = "[DecodeError]"  # what SandboxFusion puts in the place of output that is not UTF-8
_SHOWN_CHARS: Final = 300
_MAX_EXIT_CODE: Final = 0xFFFF_FFFF  # no system has larger ones


@dataclass(frozen=True, slots=True)
class RemoteProgram:
    """One piece of code to be run once."""

    code: str
    timeout_s: float
    max_output_chars: int
    max_report_bytes: int  # that the sandbox can carry on stdout; the output is cut further to fit
    memory_mb: int | None = None
    file_mb: int | None = None  # the largest file that it may write
    max_output_mb: int = MAX_OUTPUT_MB  # after which it is ended
    token: str = field(default_factory=lambda: secrets.token_hex(8))  # marks the program's own lines

    def text(self) -> str:
        """The script, in ASCII; it reads no argument, no file and no stdin."""
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
        """Read what the program printed, skipping other lines; `gave_up` if the sandbox did not end in time."""
        report = self._report(stdout)
        if report is not None:
            return report
        if f"{self.token} start" not in stdout and not stdout.startswith(_UNREADABLE):
            end = "it did not end in time" if gave_up else f"exit code {exit_code}"
            said = (stderr.strip() or stdout.strip())[-_SHOWN_CHARS:]
            return executors.infra_failure(f"the program did not start in the sandbox ({end}): {said!r}")
        # The code started, and nothing reported its end: it ended or stopped its supervisor, or wrote in its name.
        killed_by = f"time limit of {self.timeout_s:g} s" if gave_up else "the end of its supervisor"
        return ExecutionResult("", "", exit_code or -9, timed_out=gave_up, killed_by=killed_by)

    def _report(self, stdout: str) -> ExecutionResult | None:
        """The last report that can be read; None where there is none."""
        lines = re.findall(rf"^{self.token} report ([A-Za-z0-9+/=]+)$", stdout, re.MULTILINE)
        for line in reversed(lines):
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError, zlib.error):
                raw = zlib.decompressobj().decompress(base64.b64decode(line), _MAX_REPORT_BYTES)
                return self._result_of(json.loads(raw))
        return None  # the code wrote lines of its own

    def _result_of(self, report: dict[str, Any]) -> ExecutionResult:
        """Read a report, which may be the code's own: it may hold anything.

        Raises:
            ValueError, TypeError, KeyError, OverflowError: It holds what no report does.
        """
        exit_code, duration_s = int(report["exit_code"]), float(report["duration_s"])
        if abs(exit_code) > _MAX_EXIT_CODE or not 0 <= duration_s < math.inf:
            raise ValueError(f"exit code {exit_code:.3g} after {duration_s} s")
        killed_by = report["killed_by"]
        return ExecutionResult(
            stdout=shorten(str(report["stdout"]), self.max_output_chars + 50),  # 50: it may hold one marker
            stderr=shorten(str(report["stderr"]), self.max_output_chars + 50),
            exit_code=exit_code,
            timed_out=bool(report["timed_out"]),
            truncated=bool(report["truncated"]),
            duration_s=duration_s,
            killed_by=signal_words(exit_code) if killed_by is None else str(killed_by)[:_SHOWN_CHARS],
        )


def _packed(value: object) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


@functools.cache
def _packed_sources() -> str:
    here = Path(__file__)
    files = [here.parent / f"{name}.py" for name in _SENT]
    return _packed({file.stem: file.read_text("utf-8") for file in files})


_START_LIMIT_S: Final = 60.0  # an interpreter that has not started by then is the machine's fault
_REPORT_BYTES: Final = 8 << 20


class SubprocessExecutor(LoopExecutor):
    """Runs each piece of code in its own Python process. This is NOT isolation.

    The code runs as the user who runs this process: it can read and write that user's files, use the network, signal
    that user's processes, and leave a daemon behind. What it gets is a clean environment (no inherited variables, so no
    secrets from there), a private scratch directory as HOME and working directory, empty stdin, and limits on
    wall-clock time, memory, file size and output.

    At most `max_concurrency` children run at once, over all event loops; the rest wait, and their time limit starts
    when the code does.

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
        max_output_mb: int = MAX_OUTPUT_MB,
        memory_mb: int = 4096,
        file_mb: int = 128,
        max_concurrency: int | None = None,
    ) -> None:
        places = executors.usable_cpus() if max_concurrency is None else max_concurrency
        super().__init__(timeout_s, max_output_chars, places, ExecutorFacts(memory_mb=memory_mb))
        executors.check_positive(max_output_mb=max_output_mb, memory_mb=memory_mb, file_mb=file_mb)
        self._limits = (memory_mb, file_mb, max_output_mb)

    async def _attempt(self, code: str, timeout_s: float) -> ExecutionResult:
        program = RemoteProgram(code, timeout_s, self._max_output_chars, _REPORT_BYTES, *self._limits)
        try:
            folder = tempfile.mkdtemp(prefix="code-")
            try:
                return await _played(program, folder)
            finally:
                await asyncio.to_thread(scratch.delete, folder)
        except OSError as e:
            return executors.infra_failure(f"can't run {sys.executable!r}: {e}")


async def _played(program: RemoteProgram, folder: str) -> ExecutionResult:
    # everything the child sees; one thread per numeric library, since each would otherwise start one per core
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
    printed = b"", b""
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_LIMIT_S + program.timeout_s):
                printed = await process.communicate(program.text().encode())
        gave_up = process.returncode is None
    finally:
        with contextlib.suppress(ProcessLookupError):
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    stdout, stderr = (text.decode("utf-8", "replace") for text in printed)
    return program.result(stdout, stderr, process.returncode, gave_up=gave_up)
