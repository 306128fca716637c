"""A backend that runs code on an interpreter of camel-ai, in threads.

`camel` is imported only when an executor is made. This module relies on this behavior, found in the sources of camel-ai
0.2.90:

- `run(code, "python") -> str`.
- The in-process interpreter raises `InterpreterError` for errors of the code. The other interpreters raise it for
  faults outside the code (no Python, no Docker daemon).
- With `require_confirm=True`, an interpreter asks on stdin before it runs code.
- `SubprocessInterpreter` answers `stdout(stderr: ...)(Execution failed with return code N)`, without the parts that do
  not apply. At its time limit, the stderr ends with "Process timed out after N seconds and was terminated.". The
  interpreter rewrites the code with astor, which supports neither `match` nor `except*`. For code without statements,
  the interpreter raises UnboundLocalError. Each call leaves a temporary directory behind.
"""

import asyncio
import contextlib
import copy
import functools
import importlib
import inspect
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from strands_rollout.code_tool.executors import ExecutionResult, check_positive, infra_failure
from strands_rollout.code_tool.remote import LoopExecutor
from strands_rollout.code_tool.sandbox.code_runner import describe_signal, shorten
from strands_rollout.errors import ConfigError, ToolError
from strands_rollout.exits import exits_as_errors, function_name
from strands_rollout.user_code import resolve

Interpreter = Any  # camel's classes can't be named here: camel may not be installed

_CAMEL_MODULE: Final = "camel.interpreters"
_DEFAULTS: Final[dict[str, Any]] = {"require_confirm": False, "print_stderr": False, "raise_error": True}
# these interpreters raise InterpreterError for their own faults only; their answer reports the code's errors
_OUT_OF_PROCESS: Final = ("DockerInterpreter", "JupyterKernelInterpreter", "E2BInterpreter", "MicrosandboxInterpreter")
_RETURN_CODE: Final = re.compile(r"\(Execution failed with return code (-?[0-9]{1,9})\)\Z")
_TIMED_OUT: Final = re.compile(r"\n?Process timed out after [\d.]+ seconds and was terminated\.\Z")
_SCRIPT_PATH: Final = re.compile(r'File "[^"\n]*temp_code\.py"')


def import_camel() -> ModuleType:
    """Import `camel.interpreters`.

    Raises:
        ConfigError: camel-ai can't be imported.
    """
    try:
        return importlib.import_module(_CAMEL_MODULE)
    except ImportError as e:
        raise ConfigError(
            f"a camel interpreter needs camel-ai, which can't be imported ({e}); run: "
            "pip install 'strands-rollout[camel]'"
        ) from e


def _make_factory(interpreter: object, options: Mapping[str, object] | None) -> Callable[[], Interpreter]:
    """Return a function that makes the interpreter of a call; for an instance, the function returns this instance."""
    base = import_camel().BaseInterpreter
    found = _load_interpreter(interpreter) if isinstance(interpreter, str) else interpreter
    if isinstance(found, type) and issubclass(found, base):
        accepted = inspect.signature(found).parameters
        chosen = {name: value for name, value in _DEFAULTS.items() if name in accepted} | dict(options or {})
        if unknown := sorted(chosen.keys() - accepted.keys()):
            takes = ", ".join(accepted) or "none"
            raise ConfigError(f"{found.__name__} takes no option {unknown[0]!r}; it takes {takes}")
        if chosen.get("require_confirm"):
            raise ConfigError(f"{found.__name__} with require_confirm=True would wait on stdin; expected False")
        return functools.partial(found, **chosen)
    if options:
        raise ConfigError(
            f"got the options {', '.join(options)} and interpreter={found!r:.80}; expected options only if interpreter "
            "is a class or the name of a class"
        )
    if isinstance(found, base):
        _check_no_confirmation(found)
        return lambda: found
    if callable(found):
        return found
    raise ConfigError(
        f"interpreter is {found!r:.80}; expected a class of {_CAMEL_MODULE} or its name, an instance, or a function "
        "that returns an instance"
    )


def _load_interpreter(path: str) -> object:
    try:
        return resolve(path if "." in path else f"{_CAMEL_MODULE}.{path}")
    except ToolError as e:
        raise ConfigError(
            f"interpreter is {path!r}; expected the name of a class in {_CAMEL_MODULE}, or a dotted path ({e})"
        ) from e


def _check_no_confirmation(interpreter: Interpreter) -> None:
    if getattr(interpreter, "require_confirm", False):
        kind = type(interpreter).__name__
        raise ConfigError(
            f"{kind} has require_confirm=True and would wait on stdin; create it with require_confirm=False"
        )


def _is_instance_of(interpreter: Interpreter, *names: str) -> bool:
    return isinstance(interpreter, tuple(getattr(import_camel(), name) for name in names))


def _is_stateless(interpreter: Interpreter) -> bool:
    """Return whether the interpreter is stateless and enforces a time limit, so that each call may use a copy."""
    return _is_instance_of(interpreter, "SubprocessInterpreter")


@contextlib.contextmanager
def _with_time_limit(interpreter: Interpreter, timeout_s: float) -> Iterator[Interpreter]:
    """Yield the interpreter for one call: if it is stateless, a copy with the call's time limit, else the original."""
    if not _is_stateless(interpreter):
        yield interpreter
        return
    limited = copy.copy(interpreter)
    limited.execution_timeout = timeout_s
    folders: list[Path] = []
    create = getattr(limited, "_create_temp_file", None)
    if callable(create):  # a private method of camel; if it is gone, temporary directories stay behind

        def create_and_record(*args: object, **kwargs: object) -> str | Path:
            path: str | Path = create(*args, **kwargs)
            folders.append(Path(path).parent)
            return path

        limited._create_temp_file = create_and_record
    try:
        yield limited
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _parse_answer(interpreter: Interpreter, answer: object, timeout_s: float) -> ExecutionResult:
    """Parse an interpreter's answer; if the interpreter does not mark stderr and exit code, all of it is stdout."""
    text = str(answer)
    if _is_instance_of(interpreter, "InternalPythonInterpreter"):
        return ExecutionResult("" if text == "None" else text, "", 0)
    if not _is_instance_of(interpreter, "SubprocessInterpreter", "DockerInterpreter"):
        return ExecutionResult(text, "", 0)
    return_code = _RETURN_CODE.search(text)
    exit_code = int(return_code[1]) if return_code else 0
    stdout, mark, rest = text.removesuffix(return_code[0] if return_code else "").partition("(stderr: ")
    stderr = rest.removesuffix(")") if mark else ""
    code_stderr = _TIMED_OUT.sub("", stderr)
    timed_out = code_stderr != stderr
    return ExecutionResult(
        stdout=stdout,
        stderr=_SCRIPT_PATH.sub('File "<code>"', code_stderr),
        exit_code=exit_code,
        timed_out=timed_out,
        killed_by=f"time limit of {timeout_s:g} s" if timed_out else describe_signal(exit_code),
    )


def _result_of_error(interpreter: Interpreter, error: BaseException) -> ExecutionResult:
    """Return a call's result after the interpreter's `run` raised `error`."""
    message = f"{type(error).__name__}: {error}"
    if _is_stateless(interpreter):  # SubprocessInterpreter may raise any error when it rewrites unusual code
        if isinstance(error, UnboundLocalError):
            return ExecutionResult("", "", 0)  # the interpreter's error for code without statements
        infra_errors = OSError | MemoryError | import_camel().InterpreterError
        is_about_code = not isinstance(error, infra_errors)
    elif isinstance(error, import_camel().InterpreterError):
        is_about_code = not _is_instance_of(interpreter, *_OUT_OF_PROCESS)
    else:  # a UnicodeError concerns the code's text or its output
        is_about_code = _is_instance_of(interpreter, "InternalPythonInterpreter") or isinstance(error, UnicodeError)
    return ExecutionResult("", f"{message}\n", 1) if is_about_code else infra_failure(message)


def _run(interpreter: Interpreter, code: str, timeout_s: float) -> ExecutionResult:
    began_at = time.monotonic()
    try:
        with _with_time_limit(interpreter, timeout_s) as limited:
            result = _parse_answer(limited, limited.run(code, "python"), timeout_s)
    except BaseException as e:  # code that runs in this process may raise anything, SystemExit included
        result = _result_of_error(interpreter, e)
    return replace(result, duration_s=time.monotonic() - began_at)


def _run_in_daemon_thread(work: Callable[..., Any], *args: object) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args))
        except Exception as e:  # a user's function that makes an interpreter may raise anything
            future.set_exception(e)

    threading.Thread(target=run, name="camel-interpreter", daemon=True).start()
    return future


_OWN_LIMIT_MARGIN_S: Final = 5.0  # extra time for an interpreter that enforces the time limit itself
_START_TIMEOUT_S: Final = 600.0  # the image of the first container may have to be built
_POLL_S: Final = 0.05  # how often to check whether an abandoned thread has ended


class CamelExecutor(LoopExecutor):
    """Executor that runs each piece of code on a camel interpreter, in a daemon thread.

    Isolation depends on the interpreter. `SubprocessInterpreter` isolates nothing: the code sees the environment
    variables, the files, the working directory and the stdin of this process.

    Each call gets a new interpreter, without the variables of earlier calls, unless `reuse` is set or an instance was
    given. An instance of `SubprocessInterpreter` is stateless and is copied for each call. Any other instance keeps its
    state, and is used by one call at a time.

    Cancelling `run` only stops waiting: camel can't end the code, which runs on to its end or to the interpreter's own
    limit. Only `SubprocessInterpreter` receives the call's limit. If another interpreter does not end the code at the
    call's limit, the call ends with a timeout, and the code runs on in its thread. Such a thread still counts towards
    `max_concurrency`. If all threads run code that has passed its limit, further calls end with an `infra_error`.

    Args:
        interpreter: An interpreter, or a class or function without arguments that makes one; or the dotted path of any
            of these. For a class of `camel.interpreters`, its name is enough ("SubprocessInterpreter").
        options: Keyword arguments for the constructor, if `interpreter` is or names a class. Defaults, if the
            constructor accepts them: require_confirm=False, print_stderr=False, raise_error=True.
        timeout_s: Default limit in wall-clock seconds, from the start of the interpreter's `run`; a call may set its
            own.
        max_output_chars: Characters kept of stdout and of stderr, half from each end.
        max_concurrency: Maximum number of calls that run at once; further calls wait. Must be 1 if the interpreter runs
            code in this process. Ignored (always 1) for an instance, except one of `SubprocessInterpreter`.
        reuse: Keep interpreters and their state between calls; for interpreters that are slow to start.

    Raises:
        ConfigError: camel-ai can't be imported, there is no such interpreter, or an argument is invalid. `run` raises
            it, too, if a function made an interpreter that would wait on stdin or needs `max_concurrency=1`.
    """

    def __init__(
        self,
        interpreter: object = "SubprocessInterpreter",
        *,
        options: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        max_output_chars: int = 20_000,
        max_concurrency: int = 8,
        reuse: bool = False,
    ) -> None:
        self._make = _make_factory(interpreter, options)
        check_positive(max_concurrency=max_concurrency)
        if isinstance(interpreter, import_camel().BaseInterpreter) and not _is_stateless(interpreter):
            max_concurrency = 1
        super().__init__(timeout_s, max_output_chars, max_concurrency)
        if isinstance(self._make, functools.partial) and isinstance(self._make.func, type):
            self._check_exclusive(self._make.func)
        self._reuse = reuse
        self._idle: list[Interpreter] = []
        self._abandoned: list[tuple[Future[Any], float]] = []  # threads, and when each should have ended

    async def _attempt(self, code: str, timeout_s: float) -> ExecutionResult:
        while len(self._prune_abandoned()) >= self._max_concurrency:
            if all(due_at <= time.monotonic() for _, due_at in self._abandoned):
                return infra_failure(
                    f"{self._max_concurrency} threads are occupied by code that does not end; use an interpreter that "
                    "enforces its time limit"
                )
            await asyncio.sleep(_POLL_S)
        try:
            interpreter = await self._wait_or_abandon(
                _run_in_daemon_thread(self._acquire_interpreter), _START_TIMEOUT_S
            )
        except ConfigError:
            raise
        except TimeoutError:
            return infra_failure(f"the interpreter did not start within {_START_TIMEOUT_S:g} s")
        except Exception as e:  # a user's function that makes an interpreter may raise anything
            return infra_failure(f"{type(e).__name__}: {e}")
        limit_s = timeout_s + (_OWN_LIMIT_MARGIN_S if _is_stateless(interpreter) else 0.0)
        try:
            running = _run_in_daemon_thread(_run, interpreter, code, timeout_s)
            result: ExecutionResult = await self._wait_or_abandon(running, limit_s)
        except TimeoutError:
            killed_by = f"time limit of {timeout_s:g} s"
            return ExecutionResult("", "", 1, timed_out=True, killed_by=killed_by, duration_s=limit_s)
        if self._reuse and not result.timed_out:
            self._idle.append(interpreter)
        stdout, stderr = (shorten(text, self._max_output_chars) for text in (result.stdout, result.stderr))
        truncated = (stdout, stderr) != (result.stdout, result.stderr)
        return replace(result, stdout=stdout, stderr=stderr, truncated=truncated)

    async def _wait_or_abandon(self, future: Future[Any], limit_s: float) -> Any:  # noqa: ANN401 - a thread's result
        """Wait for a thread; record it as abandoned if it runs on after the limit or a cancellation."""
        due_at = time.monotonic() + limit_s
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), limit_s)
        finally:
            if not future.done():
                self._abandoned.append((future, due_at))

    def _prune_abandoned(self) -> list[tuple[Future[Any], float]]:
        self._abandoned = [(future, due_at) for future, due_at in self._abandoned if not future.done()]
        return self._abandoned

    def _acquire_interpreter(self) -> Interpreter:
        """Reuse an idle interpreter or make a new one; called in a thread, since making one may be slow."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        with exits_as_errors(function_name(self._make)):
            interpreter = self._make()
        _check_no_confirmation(interpreter)
        self._check_exclusive(type(interpreter))
        return interpreter

    def _check_exclusive(self, kind: type) -> None:
        if issubclass(kind, import_camel().InternalPythonInterpreter) and self._max_concurrency != 1:
            raise ConfigError(
                f"{kind.__name__} runs code in this process, where calls would read each other's output; "
                f"got max_concurrency={self._max_concurrency}, expected 1"
            )

    async def _release(self) -> None:
        while self._idle:
            cleanup = getattr(self._idle.pop(), "cleanup", None)
            if callable(cleanup):
                await asyncio.to_thread(cleanup)
