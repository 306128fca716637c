"""A code executor that keeps a real Python process per session, as plainly as can be: for what is built on sessions."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from typing import Any, Self

from strands_rollout.code_tool.executors import ExecutionResult, ExecutorFacts, check_call
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


class SessionExecutor:
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self.aclose()
