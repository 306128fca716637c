"""Code in any `strands.sandbox.Sandbox` (a container, a host behind ssh, a cloud runtime); and a `Sandbox` over code.

What is relied on, from the sources of strands-agents 1.51 to 1.62: `execute_code_streaming(code, language,
timeout=...)` yields `StreamChunk`s and last an `ExecutionResult`, raises `SandboxTimeoutError` at its timeout (whose
partial output came after 1.51), and ends the process when the generator is closed. The sandboxes that come with Strands
start processes on the running loop and pass the code as one argument of a command, which Linux limits to 128 KiB. The
four file operations and the two streams are abstract; a missing folder is a `SandboxPathNotFoundError`; exit code 127
is a command that is not there, and 128 + N a signal.
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
    executor_fault,
    facts_of,
    infra_failure,
)
from strands_rollout.code_tool.remote import START_ALLOWANCE_S, LoopExecutor, RemoteProgram
from strands_rollout.errors import ConfigError, ToolError
from strands_rollout.files.json_codec import Json
from strands_rollout.user_code import resolve

_GIVE_UP_MARGIN_S: Final = 10.0  # for a sandbox that does not keep its own limit
_PIPES_END_S: Final = 0.25
_MAX_REPORT_BYTES: Final = 1 << 20
_TOO_LONG: Final = "the code is too long for this sandbox: it goes through a command line\n"


class StrandsSandboxExecutor(LoopExecutor):
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
        super().__init__(timeout_s, max_output_chars, max_concurrency)
        self._sandbox = _found(sandbox)
        self._language = language
        self._cut_short = False

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
            return infra_failure(f"{type(self._sandbox).__name__}: {type(e).__name__}: {e}")
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
    found: object = sandbox
    if isinstance(sandbox, str):
        try:
            found = resolve(sandbox)
        except ToolError as e:
            raise ConfigError(str(e).replace("can't load", "can't load the sandbox", 1)) from e
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


_READ_BYTES: Final = 12_000  # as base64 below 20 000 characters, which executors keep by default
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
    answer = {{"errno": getattr(e, "errno", None) or {invalid}, "words": getattr(e, "strerror", None) or str(e)}}
print("\\n" + mark + json.dumps(answer))
"""


_LANGUAGES: Final = ("python", "python3")
_NOT_THERE: Final = 127
_SIGNAL_BASE: Final = 128
_TIMEOUT_TAKES_OUTPUT: Final = "stdout" in inspect.signature(SandboxTimeoutError.__init__).parameters


_SHELL: Final = """
import os, signal, subprocess, sys
path = f"{sys.base_prefix}/bin:{os.environ.get('PATH', os.defpath)}"
env = os.environ | {"PATH": path, "GIT_CONFIG_NOSYSTEM": "1"} | env
try:
    process = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, cwd=cwd, env=env, process_group=0)
except OSError as e:
    print(f"{words} ({e.strerror}: {e.filename or 'fork'})", file=sys.stderr)
    code = not_there
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
_SHELL_MARGIN_S: Final = 5.0  # for the session to survive a command that is ended at its limit


class CodeExecutorSandbox(Sandbox):
    """Runs Python on a code executor, and shell commands where the executor's code may start programs.

    What can't be run ends with exit code 127 and says why. Over an executor that keeps sessions, all calls share one:
    variables are kept, and the file operations act on the files that code and commands see, by the same paths. Without
    sessions each call is alone, and there are no files: file operations raise an OSError that says so.

    An async context manager, which ends the session; so a function that gives one is a resource of an episode, whose
    folder and processes are gone with it. No tool is vended: add Strands' `shell` and `python_repl` or the code tool.

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
        """Run a command by `sh -c`; its processes end with it, and its output comes then.

        Raises:
            SandboxTimeoutError: The time limit ended it.
            SandboxError: The executor itself failed; the command is not to blame.
        """
        del kwargs
        if facts_of(self._executor).isolated:
            async for item in _refusal(_NO_SHELL):
                yield item
            return
        limit_s, mark = self._limit_s(timeout), secrets.token_hex(8)
        given = {"command": command, "cwd": cwd, "env": env or {}, "limit_s": limit_s, "mark": mark}
        given |= {"words": _NO_SHELL, "not_there": _NOT_THERE, "signal_base": _SIGNAL_BASE}
        whole_s = None if limit_s is None else limit_s + _SHELL_MARGIN_S
        result = await self._executor.run(f"exec({_SHELL!r}, {given!r})", timeout_s=whole_s, session=self._session)
        if result.stderr.endswith(mark):
            result = replace(result, stderr=result.stderr.removesuffix(mark), timed_out=True)
        async for item in _items(result, limit_s):
            yield item

    def _limit_s(self, asked: float | None) -> float | None:
        return min((limit for limit in (asked, self._max_timeout_s) if limit is not None), default=None)

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

    async def read_file(self, path: str, **kwargs: object) -> bytes:
        """Read a file that the session's code sees."""
        del kwargs
        content = b""
        while len(content) <= _MAX_FILE_BYTES:
            found = await self._found(_READ, path, offset=len(content), size=_READ_BYTES)
            if not isinstance(found, str):
                raise _unreadable(path)
            try:
                piece = base64.b64decode(found)
            except ValueError as e:
                raise _unreadable(path) from e
            content += piece
            if len(piece) < _READ_BYTES:
                return content
        raise OSError(errno.EFBIG, f"more than {_MAX_FILE_BYTES} bytes, or without end; read it in the sandbox", path)

    async def write_file(self, path: str, content: bytes, **kwargs: object) -> None:
        """Write a file for the session's code, with its folders."""
        del kwargs
        for start in range(0, max(1, len(content)), _WRITE_BYTES):
            piece = base64.b64encode(content[start : start + _WRITE_BYTES]).decode()
            mode, folder = "ab" if start else "wb", os.path.dirname(path)  # noqa: PTH120
            await self._found(_WRITE, path, folder=folder, mode=mode, content=piece)

    async def remove_file(self, path: str, **kwargs: object) -> None:
        """Remove a file that the session's code sees."""
        del kwargs
        await self._found(_REMOVE, path)

    async def list_files(self, path: str, **kwargs: object) -> list[FileInfo]:
        """List a folder that the session's code sees, sorted by name.

        Raises:
            SandboxPathNotFoundError: There is no such folder.
            OSError: It can't be listed, or the executor keeps no sessions.
            SandboxError: The executor itself failed.
        """
        del kwargs
        try:
            found = await self._found(_LIST, path)
        except (FileNotFoundError, NotADirectoryError) as e:
            raise SandboxPathNotFoundError(path) from e
        if not isinstance(found, list) or not all(_is_entry(entry) for entry in found):
            raise _unreadable(path)
        return [FileInfo(name, is_dir, size) for name, is_dir, size in found]

    async def _found(self, body: str, path: str, **more: object) -> Json:
        """What a program finds that runs where the session's code does, on the paths that it would use.

        Code that changed the modules which the program needs gets a wrong answer or an error; it fools itself alone.
        """
        if self._session is None:
            words = "this sandbox keeps no files between calls, since its code executor keeps no sessions"
            raise OSError(errno.ENOTSUP, words, path)
        mark = secrets.token_hex(8)
        source = _FRAME.format(body=textwrap.indent(body.strip(), "    "), invalid=errno.EINVAL)
        code = f"exec({source!r}, { ({'path': path, 'mark': mark} | more)!r})"
        result = await self._executor.run(code, session=self._session)
        if result.infra_error is not None:
            raise executor_fault(result.infra_error)
        line = next((line for line in result.stdout.splitlines() if line.startswith(mark)), "")
        try:
            answer = json.loads(line.removeprefix(mark))
        except (ValueError, RecursionError) as e:
            why = result.stderr or result.killed_by or "no answer; does the executor keep too little output?"
            raise OSError(errno.EINVAL, f"no access to files in the sandbox: {why}", path) from e
        match answer:
            case {"found": found}:
                return found
            case {"errno": int(number), "words": str(words)} if 0 < number < _MAX_ERRNO:
                raise OSError(number, words, path)
        raise _unreadable(path)

    async def aclose(self) -> None:
        """End the session, with its variables and files; the executor stays open. Safe to call twice."""
        if self._session is not None:
            await self._executor.close_session(self._session)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


def _unreadable(path: str) -> OSError:
    words = "the sandbox's answer can't be read: code of this session has changed what file operations need there"
    return OSError(errno.EINVAL, words, path)


def _is_entry(entry: object) -> bool:
    match entry:
        case [str(), bool(), int()]:
            return True
    return False


async def _refusal(words: str) -> AsyncGenerator[StreamChunk | StrandsResult, None]:
    yield StreamChunk(f"{words}\n", "stderr")
    yield StrandsResult(_NOT_THERE, "", f"{words}\n")


async def _items(result: ExecutionResult, timeout_s: float | None) -> AsyncGenerator[StreamChunk | StrandsResult, None]:
    if result.infra_error is not None:
        raise executor_fault(result.infra_error)
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
        printed = (result.stdout, stderr) if _TIMEOUT_TAKES_OUTPUT else ()
        raise SandboxTimeoutError(timeout_s if timeout_s is not None else round(result.duration_s, 1), *printed)
    code = result.exit_code or 0
    yield StrandsResult(code if code >= 0 else _SIGNAL_BASE - code, result.stdout, stderr)
