"""A `strands.sandbox.Sandbox` over a code executor, for `Agent(sandbox=...)` and the tools that use an agent's sandbox.

What is relied on, from the sources of strands-agents 1.51 to 1.62: the four file operations and the two streams are
abstract; a timeout is a `SandboxTimeoutError` (whose partial output came after 1.51); a missing folder is a
`SandboxPathNotFoundError`; exit code 127 is a command that is not there, and 128 + N a signal.
"""

from __future__ import annotations

import errno
import inspect
import secrets
from collections.abc import AsyncGenerator
from typing import Any, Final, NoReturn

from strands.sandbox import ExecutionResult as StrandsResult
from strands.sandbox import FileInfo, Sandbox, StreamChunk
from strands.sandbox.errors import SandboxPathNotFoundError, SandboxTimeoutError

from strands_rollout.errors import SandboxError
from strands_rollout.sandbox.executor import CodeExecutor, ExecutionResult, check_positive, facts_of
from strands_rollout.sandbox.session_files import SessionFiles

_LANGUAGES: Final = ("python", "python3")
_NOT_THERE: Final = 127
_SIGNAL_BASE: Final = 128
_TIMEOUT_TAKES_OUTPUT: Final = "stdout" in inspect.signature(SandboxTimeoutError.__init__).parameters


class CodeExecutorSandbox(Sandbox):
    """Runs Python on a code executor; has no shell and no other language, and says so with exit code 127.

    Over an executor that keeps sessions, all calls share one: variables are kept, and the file operations act on the
    files that the session's code sees, by the same paths. Without sessions each call is alone, and there are no files:
    file operations raise an OSError that says so.

    No tool is vended: add `strands.vended_tools.python_repl` or the code tool.

    Args:
        executor: Not owned: the caller closes it.
        session: The session's name, where the executor keeps sessions; made up if None.
        max_timeout_s: Longest limit in seconds that a call may ask for (a model may set a tool's timeout), and the
            limit of a call that asks for none; None for the executor's default and no bound.

    Raises:
        ConfigError: `max_timeout_s` is not a positive number.
    """

    def __init__(
        self, executor: CodeExecutor, *, session: str | None = None, max_timeout_s: float | None = None
    ) -> None:
        if max_timeout_s is not None:
            check_positive("max_timeout_s", max_timeout_s)
        self._executor = executor
        self._max_timeout_s = max_timeout_s
        keeps = facts_of(executor).keeps_sessions
        self._session = (session or f"sandbox-{secrets.token_hex(8)}") if keeps else None
        self._files = SessionFiles(executor, self._session) if self._session is not None else None

    async def execute_streaming(
        self,
        command: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - Strands' signature
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        **kwargs: Any,  # noqa: ANN401 - Strands' signature
    ) -> AsyncGenerator[StreamChunk | StrandsResult, None]:
        """Say that there is no shell."""
        del command, timeout, cwd, env, kwargs
        async for item in _refusal("this sandbox has no shell; it runs Python code only"):
            yield item

    async def execute_code_streaming(
        self,
        code: str,
        language: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - Strands' signature
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        **kwargs: Any,  # noqa: ANN401 - Strands' signature
    ) -> AsyncGenerator[StreamChunk | StrandsResult, None]:
        """Run Python code; the output comes when the code has ended.

        Yields:
            At most one chunk of stdout and one of stderr, then the result.

        Raises:
            SandboxTimeoutError: The time limit ended the code.
            SandboxError: The executor itself failed; the code is not to blame.
        """
        del kwargs
        refusal = None
        if language not in _LANGUAGES:
            refusal = f"this sandbox has no interpreter {language!r}; it runs {' and '.join(_LANGUAGES)} only"
        elif cwd is not None or env:
            refusal = "this sandbox can't set a working directory or environment variables; let the code do it"
        if refusal is not None:
            async for item in _refusal(refusal):
                yield item
            return
        limit_s = self._limit_s(timeout)
        result = await self._executor.run(code, timeout_s=limit_s, session=self._session)
        async for item in _items(result, limit_s):
            yield item

    def _limit_s(self, asked_s: float | None) -> float | None:
        if asked_s is None or self._max_timeout_s is None:
            return self._max_timeout_s if asked_s is None else asked_s
        return min(asked_s, self._max_timeout_s)

    async def read_file(self, path: str, **kwargs: Any) -> bytes:  # noqa: ANN401 - Strands' signature
        """Read a file that the session's code sees.

        Raises:
            OSError: There is none, it can't be read, or the executor keeps no sessions.
            SandboxError: The executor itself failed.
        """
        del kwargs
        return await self._files.read(path) if self._files is not None else _no_files(path)

    async def write_file(self, path: str, content: bytes, **kwargs: Any) -> None:  # noqa: ANN401 - Strands' signature
        """Write a file for the session's code, with its folders.

        Raises:
            OSError: It can't be written, or the executor keeps no sessions.
            SandboxError: The executor itself failed.
        """
        del kwargs
        await self._files.write(path, content) if self._files is not None else _no_files(path)

    async def remove_file(self, path: str, **kwargs: Any) -> None:  # noqa: ANN401 - Strands' signature
        """Remove a file that the session's code sees.

        Raises:
            OSError: There is none, it can't be removed, or the executor keeps no sessions.
            SandboxError: The executor itself failed.
        """
        del kwargs
        await self._files.remove(path) if self._files is not None else _no_files(path)

    async def list_files(self, path: str, **kwargs: Any) -> list[FileInfo]:  # noqa: ANN401 - Strands' signature
        """List a folder that the session's code sees, sorted by name.

        Raises:
            SandboxPathNotFoundError: There is no such folder.
            OSError: It can't be listed, or the executor keeps no sessions.
            SandboxError: The executor itself failed.
        """
        del kwargs
        if self._files is None:
            _no_files(path)
        try:
            return [FileInfo(name, is_dir, size) for name, is_dir, size in await self._files.listed(path)]
        except (FileNotFoundError, NotADirectoryError) as e:
            raise SandboxPathNotFoundError(path) from e

    async def aclose(self) -> None:
        """End the session, with its variables and files; the executor stays open. Safe to call twice."""
        if self._session is not None:
            await self._executor.close_session(self._session)


async def _refusal(words: str) -> AsyncGenerator[StreamChunk | StrandsResult, None]:
    yield StreamChunk(f"{words}\n", "stderr")
    yield StrandsResult(_NOT_THERE, "", f"{words}\n")


async def _items(result: ExecutionResult, timeout_s: float | None) -> AsyncGenerator[StreamChunk | StrandsResult, None]:
    if result.infra_error is not None:
        raise SandboxError(f"the code executor failed: {result.infra_error}")
    stderr = result.stderr if result.stderr.endswith("\n") or not result.stderr else f"{result.stderr}\n"
    if result.killed_by is not None and not result.timed_out:
        stderr += f"The code was ended by: {result.killed_by}.\n"
    if result.session_lost:
        stderr += "Its variables and files are gone.\n"
    if result.stdout:
        yield StreamChunk(result.stdout, "stdout")
    if stderr:
        yield StreamChunk(stderr, "stderr")
    if result.timed_out:
        raise _timeout(timeout_s if timeout_s is not None else round(result.duration_s, 1), result.stdout, stderr)
    code = result.exit_code or 0
    yield StrandsResult(code if code >= 0 else _SIGNAL_BASE - code, result.stdout, stderr)


def _timeout(seconds: float, stdout: str, stderr: str) -> SandboxTimeoutError:
    return SandboxTimeoutError(seconds, stdout, stderr) if _TIMEOUT_TAKES_OUTPUT else SandboxTimeoutError(seconds)


def _no_files(path: str) -> NoReturn:
    words = "this sandbox keeps no files between calls, since its code executor keeps no sessions"
    raise OSError(errno.ENOTSUP, words, path)
