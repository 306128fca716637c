"""Executors that stand in for others: one process per session, as plainly as can be; and one that names its process.

The nodes of a Ray cluster make the second by its dotted path.
"""

import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from strands_rollout.code_tool.executors import CodeExecutor, ExecutionResult, ExecutorFacts, check_call
from strands_rollout.code_tool.local.sandbox.output import shorten

_LOOP = """
import contextlib, io, json, sys, traceback
space = {"__name__": "__main__"}
for line in sys.stdin:
    code, out, err, status = json.loads(line), io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exec(code, space)
        except Exception:
            traceback.print_exc()
            status = 1
    print(json.dumps([out.getvalue(), err.getvalue(), status]), flush=True)
"""


class SessionExecutor(CodeExecutor):
    """Sessions only; a folder of its own for each."""

    facts = ExecutorFacts(keeps_sessions=True)

    def __init__(self, *, max_output_chars: int = 20_000) -> None:
        self._max_output_chars = max_output_chars
        self._sessions: dict[str, tuple[asyncio.subprocess.Process, str]] = {}

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        check_call("SessionExecutor", code, timeout_s or 60, session, keeps_sessions=True)
        assert session is not None
        if session not in self._sessions:
            self._sessions[session] = await self._start()
        process, _ = self._sessions[session]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(code).encode() + b"\n")
        try:
            async with asyncio.timeout(timeout_s):
                stdout, stderr, status = json.loads(await process.stdout.readline())
        except (TimeoutError, ValueError) as e:
            timed_out = isinstance(e, TimeoutError)
            await self.close_session(session)
            words = "time limit" if timed_out else "SIGKILL (probably out of memory)"
            return ExecutionResult("", "", -9, timed_out=timed_out, killed_by=words, session_lost=True)
        short = [shorten(text, self._max_output_chars) for text in (stdout, stderr)]
        return ExecutionResult(*short, status, truncated=short != [stdout, stderr])

    async def _start(self) -> tuple[asyncio.subprocess.Process, str]:
        folder = tempfile.mkdtemp()
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, "-c", _LOOP]
        return await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, cwd=folder, limit=1 << 26
        ), folder

    async def close_session(self, session: str) -> None:
        process, folder = self._sessions.pop(session, (None, ""))
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.communicate()
            shutil.rmtree(folder, ignore_errors=True)

    async def aclose(self) -> None:
        for session in list(self._sessions):
            await self.close_session(session)


class ProcessExecutor(CodeExecutor):
    """Runs nothing: each answer names the actor's process, and the code is a file that is waited for, or nothing."""

    def __init__(self, *, faulty_node: str = "", faults_log: str = "", deaf: bool = False) -> None:
        self.facts = ExecutorFacts(keeps_sessions=True)
        self._faulty_node = faulty_node
        self._faults_log = faults_log
        self._deaf = deaf

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        import ray

        while self._deaf or (code and not Path(code).exists()):  # noqa: ASYNC110, ASYNC240 - another process makes it
            await asyncio.sleep(0.02)
        if ray.get_runtime_context().get_node_id() == self._faulty_node:
            self._note_fault()
            return ExecutionResult("", "", None, infra_error="the disk is full")
        return ExecutionResult(str(os.getpid()), "", 0)

    def _note_fault(self) -> None:
        with Path(self._faults_log).open("a") as log:
            log.write("fault\n")

    async def aclose(self) -> None: ...
