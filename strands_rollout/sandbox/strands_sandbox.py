"""Code in any `strands.sandbox.Sandbox`: a container, a host behind ssh, a cloud runtime.

What is relied on, from the sources of strands-agents 1.51 to 1.62: `execute_code_streaming(code, language,
timeout=...)` yields `StreamChunk`s and last an `ExecutionResult`, raises `SandboxTimeoutError` at its timeout, and ends
the process when the generator is closed. The sandboxes that come with Strands start processes on the running loop and
pass the code as one argument of a command, which Linux limits to 128 KiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import pkgutil
from typing import Any, Final, Self

from strands.sandbox import Sandbox, StreamChunk
from strands.sandbox.errors import SandboxTimeoutError
from strands.sandbox.types import ExecutionResult as StrandsResult

from strands_rollout.errors import ConfigError
from strands_rollout.sandbox.executor import ExecutionResult, ExecutorFacts, check_call, check_positive, retried_once
from strands_rollout.sandbox.private_loop import PrivateLoop
from strands_rollout.sandbox.remote_program import START_ALLOWANCE_S, RemoteProgram

_GIVE_UP_MARGIN_S: Final = 10.0  # for a sandbox that does not keep its own limit
_PIPES_END_S: Final = 0.25
_MAX_REPORT_BYTES: Final = 1 << 20
_TOO_LONG: Final = "the code is too long for this sandbox: it goes through a command line\n"


class StrandsSandboxExecutor:
    """Runs each piece of code in a fresh interpreter inside a sandbox, in a scratch directory of its own.

    How far the code is isolated is the sandbox's matter; `NotASandboxLocalEnvironment` isolates nothing. Of the
    sandbox's environment variables the code sees PATH, locale, time zone and library path. Its other files are at their
    absolute paths.

    The sandbox is called on an event loop of this executor's, so that its processes are not started on the caller's.
    Cancelling `run` closes the sandbox's stream, which ends the code at once where the sandbox ends its processes with
    it (the local one does); otherwise, as with `docker exec`, it ends at its time limit.

    Args:
        sandbox: Needs a POSIX system with Python 3.8 or newer. An instance, not owned; or the dotted path of one, or of
            a class or function that makes one.
        timeout_s: Default limit in wall-clock seconds; a call may name its own.
        max_output_chars: Characters kept of stdout and of stderr, half from each end.
        max_concurrency: Calls at once; the rest wait.
        language: The interpreter's name in the sandbox.

    Raises:
        ConfigError: The sandbox is none, or a limit is not a positive number.
    """

    def __init__(
        self,
        sandbox: Sandbox | str,
        *,
        timeout_s: float = 60.0,
        max_output_chars: int = 20_000,
        max_concurrency: int = 16,
        language: str = "python3",
    ) -> None:
        limits = {"timeout_s": timeout_s, "max_output_chars": max_output_chars, "max_concurrency": max_concurrency}
        for name, value in limits.items():
            check_positive(name, value)
        self._sandbox = _found(sandbox)
        self._timeout_s = timeout_s
        self._max_output_chars = max_output_chars
        self._language = language
        self._cut_short = False
        self._loop = PrivateLoop("StrandsSandboxExecutor", max_concurrency, self._release)
        self.facts = ExecutorFacts()

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        """Run code in the sandbox; see `CodeExecutor.run`.

        Raises:
            ConfigError: An argument can't be used; `session` must be None, since this backend keeps none.
            SandboxError: The executor has been closed.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        check_call("StrandsSandboxExecutor", code, limit_s, session, keeps_sessions=False)
        return await retried_once(lambda: self._loop.run(lambda: self._attempt(code, limit_s)))

    async def close_session(self, session: str) -> None:
        """Nothing to do: this backend keeps none."""

    async def aclose(self) -> None:
        """Refuse new calls and wait for running ones; the sandbox stays. Safe to call twice."""
        await self._loop.aclose()

    async def __aenter__(self) -> Self:
        """Return self."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close."""
        await self.aclose()

    async def _attempt(self, code: str, timeout_s: float) -> ExecutionResult:
        program = RemoteProgram(code, timeout_s, self._max_output_chars, _MAX_REPORT_BYTES)
        printed = _Printed()
        limit_s = timeout_s + START_ALLOWANCE_S
        try:
            async with asyncio.timeout(limit_s + _GIVE_UP_MARGIN_S):
                await self._execute(program.text(), limit_s, printed)
        except TimeoutError:  # the sandbox's own is one
            return program.result(printed.stdout, printed.stderr, None, gave_up=True)
        except Exception as e:  # a sandbox may raise anything, and whatever it is, the code is not to blame
            if isinstance(e, OSError) and e.errno == errno.E2BIG:
                return ExecutionResult("", _TOO_LONG, 1)
            return ExecutionResult("", "", None, infra_error=f"{type(self._sandbox).__name__}: {type(e).__name__}: {e}")
        return program.result(printed.stdout, printed.stderr, printed.exit_code)

    async def _execute(self, program: str, limit_s: float, printed: _Printed) -> None:
        stream = self._sandbox.execute_code_streaming(program, self._language, timeout=limit_s)
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    printed.take(item)
        except SandboxTimeoutError as e:
            printed.take_rest(getattr(e, "stdout", ""), getattr(e, "stderr", ""))
            self._cut_short = True
            raise
        except asyncio.CancelledError:
            self._cut_short = True
            raise

    async def _release(self) -> None:
        """Give processes that were cut short the time to end: Strands leaves their pipes to the loop."""
        if self._cut_short:
            await asyncio.sleep(_PIPES_END_S)


def _found(sandbox: Sandbox | str) -> Sandbox:
    found: Any = sandbox
    if isinstance(sandbox, str):
        try:
            found = pkgutil.resolve_name(sandbox)
        except (ImportError, AttributeError, ValueError) as e:
            raise ConfigError(f"can't load the sandbox {sandbox!r}: {e}; expected a dotted path") from e
        if not isinstance(found, Sandbox) and callable(found):
            found = found()
    if not isinstance(found, Sandbox):
        raise ConfigError(f"sandbox is {found!r:.80}; expected a strands.sandbox.Sandbox")
    return found


class _Printed:
    """What came of the program, in chunks, at the end, or with a timeout: sandboxes differ."""

    def __init__(self) -> None:
        self.stdout = ""
        self.stderr = ""
        self.exit_code: int | None = None

    def take(self, item: StreamChunk | StrandsResult) -> None:
        if isinstance(item, StrandsResult):
            self.exit_code = item.exit_code
            self.take_rest(item.stdout, item.stderr)
        elif item.stream_type == "stderr":
            self.stderr += item.data
        else:
            self.stdout += item.data

    def take_rest(self, stdout: str, stderr: str) -> None:
        """Take the whole output, where it is more than the chunks were."""
        self.stdout = max(self.stdout, stdout, key=len)
        self.stderr = max(self.stderr, stderr, key=len)
