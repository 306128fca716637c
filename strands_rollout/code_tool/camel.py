"""Code on an interpreter of camel-ai, in threads.

`camel` is imported only when an executor is made. What is relied on, from the sources of camel-ai 0.2.90: `run(code,
"python") -> str`; `InterpreterError`, which the in-process interpreter raises for faults of the code, and the others
for what failed around it (no Python, no Docker daemon); `require_confirm` waits on stdin; `SubprocessInterpreter`
answers `stdout(stderr: ...)(Execution failed with return code N)`, ends that stderr with "Process timed out after N
seconds and was terminated.", rewrites the code with astor (which knows no `match` and no `except*`), breaks with an
UnboundLocalError on code without statements, and leaves a temporary directory behind at each call.
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
from strands_rollout.code_tool.sandbox.code_runner import shorten, signal_words
from strands_rollout.errors import ConfigError, ToolError
from strands_rollout.user_code import resolve

Interpreter = Any  # camel's classes are not known where camel is not installed

_HOME: Final = "camel.interpreters"
_DEFAULTS: Final[dict[str, Any]] = {"require_confirm": False, "print_stderr": False, "raise_error": True}
# Their InterpreterError is never about the code: what the code does wrong is in their answer.
_OUTSIDE: Final = ("DockerInterpreter", "JupyterKernelInterpreter", "E2BInterpreter", "MicrosandboxInterpreter")
_STATUS: Final = re.compile(r"\(Execution failed with return code (-?[0-9]{1,9})\)\Z")
_TIMED_OUT: Final = re.compile(r"\n?Process timed out after [\d.]+ seconds and was terminated\.\Z")
_SCRIPT: Final = re.compile(r'File "[^"\n]*temp_code\.py"')


def import_camel() -> ModuleType:
    """Import `camel.interpreters`."""
    try:
        return importlib.import_module(_HOME)
    except ImportError as e:
        raise ConfigError(
            f"a camel interpreter needs camel-ai, which can't be imported ({e}): pip install 'strands-rollout[camel]'"
        ) from e


def _maker(interpreter: object, options: Mapping[str, object] | None) -> Callable[[], Interpreter]:
    """What makes the interpreter of a call."""
    base = import_camel().BaseInterpreter
    found = _at_path(interpreter) if isinstance(interpreter, str) else interpreter
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
        raise ConfigError(f"options {dict(options)!r:.200} were given with {found!r:.80}; expected a name or a class")
    if isinstance(found, base):
        _check_asks_nothing(found)
        return lambda: found
    if callable(found):
        return found
    raise ConfigError(f"interpreter is {found!r:.80}; expected a name, class, function or instance of {_HOME}")


def _at_path(path: str) -> object:
    try:
        return resolve(path if "." in path else f"{_HOME}.{path}")
    except ToolError as e:
        raise ConfigError(f"there is no interpreter {path!r}: {e}") from e


def _check_asks_nothing(interpreter: Interpreter) -> None:
    if getattr(interpreter, "require_confirm", False):
        kind = type(interpreter).__name__
        raise ConfigError(
            f"{kind} has require_confirm=True and would wait on stdin; make it with require_confirm=False"
        )


def _is_one_of(interpreter: Interpreter, *names: str) -> bool:
    return isinstance(interpreter, tuple(getattr(import_camel(), name) for name in names))


def _keeps_nothing(interpreter: Interpreter) -> bool:
    """Whether it remembers nothing and ends code by itself: each call may have a copy with its own time limit."""
    return _is_one_of(interpreter, "SubprocessInterpreter")


@contextlib.contextmanager
def _limited(interpreter: Interpreter, timeout_s: float) -> Iterator[Interpreter]:
    """The interpreter for one call: with the call's time limit and nothing left behind, where it can have that."""
    if not _keeps_nothing(interpreter):
        yield interpreter
        return
    one = copy.copy(interpreter)
    one.execution_timeout = timeout_s
    made: list[Path] = []
    create = getattr(one, "_create_temp_file", None)
    if callable(create):  # private: if it is gone, its directories stay, and nothing else is lost

        def create_and_remember(*args: object, **kwargs: object) -> str | Path:
            path: str | Path = create(*args, **kwargs)
            made.append(Path(path).parent)
            return path

        one._create_temp_file = create_and_remember
    try:
        yield one
    finally:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)


def _result_of_answer(interpreter: Interpreter, answer: object, timeout_s: float) -> ExecutionResult:
    """Read what an interpreter returned: stdout, and stderr and the exit code where it marks them."""
    text = str(answer)
    if _is_one_of(interpreter, "InternalPythonInterpreter"):
        return ExecutionResult("" if text == "None" else text, "", 0)
    if not _is_one_of(interpreter, "SubprocessInterpreter", "DockerInterpreter"):
        return ExecutionResult(text, "", 0)
    status = _STATUS.search(text)
    exit_code = int(status[1]) if status else 0
    stdout, mark, rest = text.removesuffix(status[0] if status else "").partition("(stderr: ")
    stderr = rest.removesuffix(")") if mark else ""
    unlimited = _TIMED_OUT.sub("", stderr)
    timed_out = unlimited != stderr
    return ExecutionResult(
        stdout=stdout,
        stderr=_SCRIPT.sub('File "<code>"', unlimited),
        exit_code=exit_code,
        timed_out=timed_out,
        killed_by=f"time limit of {timeout_s:g} s" if timed_out else signal_words(exit_code),
    )


def _result_of_error(interpreter: Interpreter, error: BaseException) -> ExecutionResult:
    """Say whose fault an exception is: the code's, in its stderr, or the interpreter's."""
    words = f"{type(error).__name__}: {error}"
    if _keeps_nothing(interpreter):  # it rewrites the code by itself, and breaks in many ways on what it can't
        if isinstance(error, UnboundLocalError):
            return ExecutionResult("", "", 0)  # how it takes code without a statement
        outside = OSError | MemoryError | import_camel().InterpreterError
        is_about_code = not isinstance(error, outside)
    elif isinstance(error, import_camel().InterpreterError):
        is_about_code = not _is_one_of(interpreter, *_OUTSIDE)
    else:  # a UnicodeError is about the code's text, or what it printed
        is_about_code = _is_one_of(interpreter, "InternalPythonInterpreter") or isinstance(error, UnicodeError)
    return ExecutionResult("", f"{words}\n", 1) if is_about_code else infra_failure(words)


def _run(interpreter: Interpreter, code: str, timeout_s: float) -> ExecutionResult:
    began_at = time.monotonic()
    try:
        with _limited(interpreter, timeout_s) as one:
            result = _result_of_answer(one, one.run(code, "python"), timeout_s)
    except BaseException as e:  # code that runs in this process may raise anything, SystemExit included
        result = _result_of_error(interpreter, e)
    return replace(result, duration_s=time.monotonic() - began_at)


def _in_daemon(work: Callable[..., Any], *given: object) -> Future[Any]:
    """What a function gives, from a thread of its own, which does not keep the process from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work(*given))
        except Exception as e:  # the user's code that makes an interpreter may raise anything
            future.set_exception(e)

    threading.Thread(target=run, name="camel-interpreter", daemon=True).start()
    return future


_OWN_LIMIT_MARGIN_S: Final = 5.0  # for an interpreter that ends the code by itself
_START_LIMIT_S: Final = 600.0  # the first container may need its image built
_POLL_S: Final = 0.05  # how soon the end of an abandoned thread is seen


class CamelExecutor(LoopExecutor):
    """Runs each piece of code on a camel interpreter, in a daemon thread.

    How far the code is isolated is the interpreter's matter. `SubprocessInterpreter` isolates nothing: the code sees
    the environment variables, the files, the working directory and the stdin of this process.

    Each call gets an interpreter of its own, so that nothing is kept between calls, unless `reuse` is set or an
    instance was given. An instance of `SubprocessInterpreter` keeps nothing and is copied for each call; any other
    instance is used by one call at a time, and what it remembers is kept.

    Cancelling `run` stops waiting: camel can't end the code, which runs on to the interpreter's own limit.
    Only `SubprocessInterpreter` is given the call's. Code that another one doesn't end at the time limit is left behind
    in its thread; while there are `max_concurrency` of those, calls end in an `infra_error`.

    Args:
        interpreter: A class of `camel.interpreters` by name ("SubprocessInterpreter") or dotted path, a class, a
            function without arguments that makes an interpreter, or an instance.
        options: The constructor's arguments, for a name, a path or a class. Not to ask for confirmation, not to print
            what the code prints, and to raise errors are the defaults here, where the constructor knows them.
        timeout_s: Default limit in wall-clock seconds, from the start of the interpreter's `run`; a call may name its
            own.
        max_output_chars: Characters kept of stdout and of stderr, half from each end.
        max_concurrency: Calls at once; the rest wait. 1 for code that runs in this process.
        reuse: Keep interpreters between calls, with whatever they remember: for those that are slow to start.

    Raises:
        ConfigError: camel-ai is not installed, there is no such interpreter, or an argument can't be used.
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
        self._make = _maker(interpreter, options)
        check_positive(max_concurrency=max_concurrency)
        if isinstance(interpreter, import_camel().BaseInterpreter) and not _keeps_nothing(interpreter):
            max_concurrency = 1
        super().__init__(timeout_s, max_output_chars, max_concurrency)
        if isinstance(self._make, functools.partial) and isinstance(self._make.func, type):
            self._check_alone(self._make.func)
        self._reuse = reuse
        self._idle: list[Interpreter] = []
        self._left_behind: list[tuple[Future[Any], float]] = []  # and when each should have ended

    async def _attempt(self, code: str, timeout_s: float) -> ExecutionResult:
        """One call, in threads of its own."""
        while len(self._still_left_behind()) >= self._max_concurrency:
            if all(due_at <= time.monotonic() for _, due_at in self._left_behind):
                return infra_failure(
                    f"{self._max_concurrency} threads are held by code that does not end; use an interpreter that "
                    "ends it"
                )
            await asyncio.sleep(_POLL_S)
        try:
            interpreter = await self._awaited(_in_daemon(self._taken), _START_LIMIT_S)
        except ConfigError:
            raise
        except TimeoutError:
            return infra_failure(f"no interpreter was made in {_START_LIMIT_S:g} s")
        except Exception as e:  # the user's code that makes an interpreter may raise anything
            return infra_failure(f"{type(e).__name__}: {e}")
        limit_s = timeout_s + (_OWN_LIMIT_MARGIN_S if _keeps_nothing(interpreter) else 0.0)
        try:
            result: ExecutionResult = await self._awaited(_in_daemon(_run, interpreter, code, timeout_s), limit_s)
        except TimeoutError:
            killed_by = f"time limit of {timeout_s:g} s"
            return ExecutionResult("", "", 1, timed_out=True, killed_by=killed_by, duration_s=limit_s)
        if self._reuse and not result.timed_out:
            self._idle.append(interpreter)
        stdout, stderr = (shorten(text, self._max_output_chars) for text in (result.stdout, result.stderr))
        truncated = (stdout, stderr) != (result.stdout, result.stderr)
        return replace(result, stdout=stdout, stderr=stderr, truncated=truncated)

    async def _awaited(self, future: Future[Any], limit_s: float) -> Any:  # noqa: ANN401 - an interpreter or a result
        """Wait for a thread for a limited time; one that has not ended is left behind."""
        due_at = time.monotonic() + limit_s
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), limit_s)
        finally:
            if not future.done():
                self._left_behind.append((future, due_at))

    def _still_left_behind(self) -> list[tuple[Future[Any], float]]:
        self._left_behind = [(future, due_at) for future, due_at in self._left_behind if not future.done()]
        return self._left_behind

    def _taken(self) -> Interpreter:
        """An interpreter for one call; in the call's thread, since to make one may take long."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        made = self._make()
        _check_asks_nothing(made)
        self._check_alone(type(made))
        return made

    def _check_alone(self, kind: type) -> None:
        """Refuse to run several pieces of code in this process at once: they would read each other's output."""
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
