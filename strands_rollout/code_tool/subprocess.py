"""The plain backend: a fresh `python -I` per call, with limits but WITHOUT isolation."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

from strands_rollout.code_tool import executors
from strands_rollout.code_tool.executors import ExecutionResult, ExecutorFacts
from strands_rollout.code_tool.local.sandbox import scratch
from strands_rollout.code_tool.remote import MAX_OUTPUT_MB, LoopExecutor, RemoteProgram

_START_LIMIT_S: Final = 60.0  # an interpreter that has not started by then is the machine's fault
_MAX_REPORT_BYTES: Final = 8 << 20


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
        program = RemoteProgram(code, timeout_s, self._max_output_chars, _MAX_REPORT_BYTES, *self._limits)
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
