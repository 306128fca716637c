"""Two adapters: a code executor on a `strands.sandbox.Sandbox`, and a `Sandbox` on a code executor.

A sandbox may be a container, a host behind ssh or a cloud runtime. This module relies on this behavior, found in
the sources of strands-agents 1.51 to 1.62:

- `execute_code_streaming(code, language, timeout=...)` yields `StreamChunk`s and finally an `ExecutionResult`. At its
  timeout it raises `SandboxTimeoutError`, with the partial output in versions after 1.51. Closing the generator ends
  the process.
- The sandboxes of Strands start processes on the running loop and pass the code as one argument of a command, which
  Linux limits to 128 KiB.
- `execute_streaming`, `execute_code_streaming` and the four file operations are abstract. A missing folder raises
  `SandboxPathNotFoundError`; exit code 127 means a missing command, and 128 + N signal N.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import inspect
import json
import os
import secrets
import textwrap
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Final, Self

from strands.sandbox import FileInfo, Sandbox, StreamChunk
from strands.sandbox.errors import SandboxPathNotFoundError, SandboxTimeoutError
from strands.sandbox.types import ExecutionResult as StrandsResult

from strands_rollout.code_tool.executors import (
    CodeExecutor,
    ExecutionResult,
    check_positive,
    facts_of,
    infra_failure,
    record_executor_fault,
)
from strands_rollout.code_tool.remote import START_ALLOWANCE_S, LoopExecutor, RemoteProgram
from strands_rollout.errors import ConfigError, ToolError
from strands_rollout.files.json_codec import Json
from strands_rollout.user_code import resolve

_GIVE_UP_MARGIN_S: Final = 10.0  # extra time before giving up on a sandbox that ignores its own time limit
_PIPE_CLOSE_S: Final = 0.25
_MAX_REPORT_BYTES: Final = 1 << 20
_TOO_LONG: Final = "the code is too long for this sandbox: it goes through a command line\n"


class StrandsSandboxExecutor(LoopExecutor):
    """Executor that runs each piece of code inside a sandbox, in a fresh interpreter and its own scratch directory.

    Isolation depends on the sandbox; `NotASandboxLocalEnvironment` isolates nothing. Of the sandbox's environment
    variables the code sees only PATH, locale, time zone, library path, and the thread counts of numeric libraries.
    The sandbox's files outside of the scratch directory have their usual absolute paths.

    The sandbox is called on this executor's own event loop, so it starts no processes on the caller's loop.
    Cancelling `run` closes the sandbox's stream. Strands' local sandbox then kills its processes, so the code ends
    immediately. With `docker exec`, for example, the code runs on to its end or its time limit.

    Args:
        sandbox: A `Sandbox`; or the dotted path of a `Sandbox`, or of a class or function that makes a `Sandbox`. The
            caller owns a `Sandbox` that it passes. The sandbox must be a POSIX system with Python 3.8 or newer.
        timeout_s: Default limit in wall-clock seconds; a call may set its own.
        max_output_chars: Characters kept of stdout and of stderr, half from each end.
        max_concurrency: Maximum number of calls that run at once; further calls wait.
        language: The interpreter's name in the sandbox.

    Raises:
        ConfigError: `sandbox` can't be loaded or is not a `Sandbox`, or a limit is not a positive number.
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
        super().__init__(timeout_s, max_output_chars, max_concurrency)
        self._sandbox = _load_sandbox(sandbox)
        self._language = language
        self._cut_short = False

    async def _attempt(self, code: str, timeout_s: float) -> ExecutionResult:
        program = RemoteProgram(code, timeout_s, self._max_output_chars, _MAX_REPORT_BYTES)
        output = _Output()
        limit_s = timeout_s + START_ALLOWANCE_S
        try:
            async with asyncio.timeout(limit_s + _GIVE_UP_MARGIN_S):
                await self._execute(program.text(), limit_s, output)
        except TimeoutError:  # SandboxTimeoutError is a subclass
            return program.result(output.stdout, output.stderr, None, gave_up=True)
        except Exception as e:  # a sandbox may raise anything, and none of it is the code's fault
            if isinstance(e, OSError) and e.errno == errno.E2BIG:
                return ExecutionResult("", _TOO_LONG, 1)
            return infra_failure(f"{type(self._sandbox).__name__}: {type(e).__name__}: {e}")
        return program.result(output.stdout, output.stderr, output.exit_code)

    async def _execute(self, program: str, limit_s: float, output: _Output) -> None:
        stream = self._sandbox.execute_code_streaming(program, self._language, timeout=limit_s)
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    output.add(item)
        except SandboxTimeoutError as e:
            output.merge_whole(getattr(e, "stdout", ""), getattr(e, "stderr", ""))
            self._cut_short = True
            raise
        except asyncio.CancelledError:
            self._cut_short = True
            raise

    async def _release(self) -> None:
        """After a timeout or cancellation, keep the loop running briefly, so that it closes the processes' pipes."""
        if self._cut_short:
            await asyncio.sleep(_PIPE_CLOSE_S)


def _load_sandbox(sandbox: Sandbox | str) -> Sandbox:
    found: object = sandbox
    if isinstance(sandbox, str):
        try:
            found = resolve(sandbox)
        except ToolError as e:
            raise ConfigError(str(e).replace("can't load", "can't load the sandbox", 1)) from e
        if not isinstance(found, Sandbox) and callable(found):
            found = found()
    if not isinstance(found, Sandbox):
        raise ConfigError(
            f"got the sandbox {found!r:.80}; expected a strands.sandbox.Sandbox, or the dotted path of a Sandbox or of "
            "a class or function that makes a Sandbox"
        )
    return found


class _Output:
    """Output of a program, which a sandbox may deliver in chunks, in the result, or in the error of a timeout."""

    def __init__(self) -> None:
        self.stdout = ""
        self.stderr = ""
        self.exit_code: int | None = None

    def add(self, item: StreamChunk | StrandsResult) -> None:
        if isinstance(item, StrandsResult):
            self.exit_code = item.exit_code
            self.merge_whole(item.stdout, item.stderr)
        elif item.stream_type == "stderr":
            self.stderr += item.data
        else:
            self.stdout += item.data

    def merge_whole(self, stdout: str, stderr: str) -> None:
        self.stdout = max(self.stdout, stdout, key=len)
        self.stderr = max(self.stderr, stderr, key=len)


_READ_BYTES: Final = 12_000  # their base64 fits into the 20,000 characters of output that executors keep by default
_WRITE_BYTES: Final = 48_000
_MAX_FILE_BYTES: Final = 64 << 20
_MAX_ERRNO: Final = 4096
_READ: Final = """
with open(path, "rb") as file:
    file.seek(offset)
    found = base64.b64encode(file.read(size)).decode()
"""
_WRITE: Final = """
if folder:
    os.makedirs(folder, exist_ok=True)
with open(path, mode) as file:
    file.write(base64.b64decode(content))
found = None
"""
_REMOVE: Final = """
found = os.remove(path)
"""
_LIST: Final = """
with os.scandir(path or ".") as entries:
    found = sorted((entry.name, entry.is_dir(), entry.stat(follow_symlinks=False).st_size) for entry in entries)
"""
_FRAME: Final = """
import base64, json, os
try:
{body}
    answer = {{"found": found}}
except (OSError, ValueError) as e:
    answer = {{"errno": getattr(e, "errno", None) or {invalid}, "message": getattr(e, "strerror", None) or str(e)}}
print("\\n" + mark + json.dumps(answer))
"""


_LANGUAGES: Final = ("python", "python3")
_COMMAND_NOT_FOUND: Final = 127
_SIGNAL_BASE: Final = 128
_TIMEOUT_TAKES_OUTPUT: Final = "stdout" in inspect.signature(SandboxTimeoutError.__init__).parameters


_SHELL: Final = """
import os, signal, subprocess, sys
path = f"{sys.base_prefix}/bin:{os.environ.get('PATH', os.defpath)}"
env = os.environ | {"PATH": path, "GIT_CONFIG_NOSYSTEM": "1"} | env
try:
    process = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, cwd=cwd, env=env, process_group=0)
except OSError as e:
    print(f"{no_shell} ({e.strerror}: {e.filename or 'fork'})", file=sys.stderr)
    code = command_not_found
else:
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(end=mark, file=sys.stderr)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    code = process.wait()
sys.exit(code if code >= 0 else signal_base - code)
"""
_NO_SHELL: Final = "this sandbox has no shell; it runs Python code only"
_SHELL_MARGIN_S: Final = 5.0  # extra time: a command at its limit must not end the session


class CodeExecutorSandbox(Sandbox):
    """Sandbox that runs Python on a code executor, and shell commands if the executor's code may start programs.

    A refused call ends with exit code 127 and the reason on stderr. These calls are refused: commands, if code may
    start no programs; code in another language than Python; code with `cwd` or `env`.

    If the executor keeps sessions, all calls share one session. Variables are kept between calls. The file operations,
    code and commands see the same files under the same paths. Without sessions each call starts a fresh interpreter,
    and every file operation raises an OSError.

    Leaving the async context ends the session. A function that returns a `CodeExecutorSandbox` can therefore be a
    resource of an episode. The end of the episode then ends the sandbox's processes and deletes its files. No tool is
    included: add Strands' `shell` and `python_repl`, or the code tool.

    Args:
        executor: The executor, which the caller closes.
        session: The session's name, if the executor keeps sessions; None for a random name.
        max_timeout_s: Maximum time limit of a call in seconds, even if the call asks for more; a model may set a tool's
            timeout. A call that asks for no limit has this limit. None for no maximum; a call that asks for no limit
            then has the executor's default limit.

    Raises:
        ConfigError: `max_timeout_s` is not a positive number.
    """

    def __init__(
        self, executor: CodeExecutor, *, session: str | None = None, max_timeout_s: float | None = None
    ) -> None:
        if max_timeout_s is not None:
            check_positive(max_timeout_s=max_timeout_s)
        self._executor = executor
        self._max_timeout_s = max_timeout_s
        keeps = facts_of(executor).keeps_sessions
        self._session = (session or f"sandbox-{secrets.token_hex(8)}") if keeps else None

    async def execute_streaming(
        self,
        command: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - Strands' signature
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        **kwargs: object,
    ) -> AsyncGenerator[StreamChunk | StrandsResult, None]:
        """Run a command with `sh -c`; after its end, kill the rest of its process group, and yield its output.

        Raises:
            SandboxTimeoutError: The time limit ended the command.
            SandboxError: The executor itself failed, through no fault of the command.
        """
        del kwargs
        if facts_of(self._executor).isolated:
            async for item in _refuse(_NO_SHELL):
                yield item
            return
        limit_s, mark = self._limit_s(timeout), secrets.token_hex(8)
        variables = {"command": command, "cwd": cwd, "env": env or {}, "limit_s": limit_s, "mark": mark}
        variables |= {"no_shell": _NO_SHELL, "command_not_found": _COMMAND_NOT_FOUND, "signal_base": _SIGNAL_BASE}
        timeout_s = None if limit_s is None else limit_s + _SHELL_MARGIN_S
        code = f"exec({_SHELL!r}, {variables!r})"
        result = await self._executor.run(code, timeout_s=timeout_s, session=self._session)
        if result.stderr.endswith(mark):
            result = replace(result, stderr=result.stderr.removesuffix(mark), timed_out=True)
        async for item in _stream(result, limit_s):
            yield item

    def _limit_s(self, requested: float | None) -> float | None:
        return min((limit for limit in (requested, self._max_timeout_s) if limit is not None), default=None)

    async def execute_code_streaming(
        self,
        code: str,
        language: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - Strands' signature
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        **kwargs: object,
    ) -> AsyncGenerator[StreamChunk | StrandsResult, None]:
        """Run Python code; yield its output when it has ended.

        Yields:
            At most one chunk of stdout and one of stderr, then the result.

        Raises:
            SandboxTimeoutError: The time limit ended the code.
            SandboxError: The executor itself failed, through no fault of the code.
        """
        del kwargs
        refusal = None
        if language not in _LANGUAGES:
            refusal = f"this sandbox has no interpreter {language!r}; it runs {' and '.join(_LANGUAGES)} only"
        elif cwd is not None or env:
            refusal = "this sandbox can't set a working directory or environment variables; let the code do it"
        if refusal is not None:
            async for item in _refuse(refusal):
                yield item
            return
        limit_s = self._limit_s(timeout)
        result = await self._executor.run(code, timeout_s=limit_s, session=self._session)
        async for item in _stream(result, limit_s):
            yield item

    async def read_file(self, path: str, **kwargs: object) -> bytes:
        """Read a file that the session's code sees.

        Raises:
            OSError: The file can't be read or is larger than 64 MiB, or the executor keeps no sessions.
            SandboxError: The executor itself failed.
        """
        del kwargs
        content = b""
        while len(content) <= _MAX_FILE_BYTES:
            found = await self._run_file_program(_READ, path, offset=len(content), size=_READ_BYTES)
            if not isinstance(found, str):
                raise _garbled_answer(path)
            try:
                piece = base64.b64decode(found)
            except ValueError as e:
                raise _garbled_answer(path) from e
            content += piece
            if len(piece) < _READ_BYTES:
                return content
        raise OSError(errno.EFBIG, f"more than {_MAX_FILE_BYTES} bytes, or without end; read it in the sandbox", path)

    async def write_file(self, path: str, content: bytes, **kwargs: object) -> None:
        """Write a file that the session's code sees, creating its folders.

        Raises:
            OSError: The file can't be written, or the executor keeps no sessions.
            SandboxError: The executor itself failed.
        """
        del kwargs
        for start in range(0, max(1, len(content)), _WRITE_BYTES):
            piece = base64.b64encode(content[start : start + _WRITE_BYTES]).decode()
            mode, folder = "ab" if start else "wb", os.path.dirname(path)  # noqa: PTH120
            await self._run_file_program(_WRITE, path, folder=folder, mode=mode, content=piece)

    async def remove_file(self, path: str, **kwargs: object) -> None:
        """Remove a file that the session's code sees.

        Raises:
            OSError: The file can't be removed, or the executor keeps no sessions.
            SandboxError: The executor itself failed.
        """
        del kwargs
        await self._run_file_program(_REMOVE, path)

    async def list_files(self, path: str, **kwargs: object) -> list[FileInfo]:
        """List a folder that the session's code sees, sorted by name.

        Raises:
            SandboxPathNotFoundError: There is no such folder.
            OSError: The folder can't be listed, or the executor keeps no sessions.
            SandboxError: The executor itself failed.
        """
        del kwargs
        try:
            found = await self._run_file_program(_LIST, path)
        except (FileNotFoundError, NotADirectoryError) as e:
            raise SandboxPathNotFoundError(path) from e
        if not isinstance(found, list) or not all(_is_entry(entry) for entry in found):
            raise _garbled_answer(path)
        return [FileInfo(name, is_dir, size) for name, is_dir, size in found]

    async def _run_file_program(self, body: str, path: str, **variables: object) -> Json:
        """Run one of the file programs in the session's interpreter, and return its value `found`.

        The session's code may have changed the modules that the program needs; a wrong answer or an error then harms
        only the same session.
        """
        if self._session is None:
            message = "this sandbox keeps no files between calls, since its code executor keeps no sessions"
            raise OSError(errno.ENOTSUP, message, path)
        mark = secrets.token_hex(8)
        source = _FRAME.format(body=textwrap.indent(body.strip(), "    "), invalid=errno.EINVAL)
        code = f"exec({source!r}, { ({'path': path, 'mark': mark} | variables)!r})"
        result = await self._executor.run(code, session=self._session)
        if result.infra_error is not None:
            raise record_executor_fault(result.infra_error)
        line = next((line for line in result.stdout.splitlines() if line.startswith(mark)), "")
        try:
            answer = json.loads(line.removeprefix(mark))
        except (ValueError, RecursionError) as e:
            why = result.stderr or result.killed_by or "no answer; does the executor keep too little output?"
            raise OSError(errno.EINVAL, f"no access to files in the sandbox: {why}", path) from e
        match answer:
            case {"found": found}:
                return found
            case {"errno": int(number), "message": str(message)} if 0 < number < _MAX_ERRNO:
                raise OSError(number, message, path)
        raise _garbled_answer(path)

    async def aclose(self) -> None:
        """End the session and delete its variables and files; the executor stays open. Safe to call twice."""
        if self._session is not None:
            await self._executor.close_session(self._session)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


def _garbled_answer(path: str) -> OSError:
    message = "the sandbox's answer can't be read: code of this session has changed what file operations need there"
    return OSError(errno.EINVAL, message, path)


def _is_entry(entry: object) -> bool:
    match entry:
        case [str(), bool(), int()]:
            return True
    return False


async def _refuse(reason: str) -> AsyncGenerator[StreamChunk | StrandsResult, None]:
    yield StreamChunk(f"{reason}\n", "stderr")
    yield StrandsResult(_COMMAND_NOT_FOUND, "", f"{reason}\n")


async def _stream(
    result: ExecutionResult, timeout_s: float | None
) -> AsyncGenerator[StreamChunk | StrandsResult, None]:
    """Yield a result as Strands expects it: the streams, then the result."""
    if result.infra_error is not None:
        raise record_executor_fault(result.infra_error)
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
        output = (result.stdout, stderr) if _TIMEOUT_TAKES_OUTPUT else ()
        raise SandboxTimeoutError(timeout_s if timeout_s is not None else round(result.duration_s, 1), *output)
    code = result.exit_code or 0
    yield StrandsResult(code if code >= 0 else _SIGNAL_BASE - code, result.stdout, stderr)
