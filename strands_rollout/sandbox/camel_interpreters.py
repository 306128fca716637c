"""camel-ai's interpreters: found by name, made without questions and noise, and what one of them answered.

`camel` is imported only inside functions. What is relied on, from the sources of camel-ai 0.2.90: `run(code, "python")
-> str`; `InterpreterError`, which the in-process interpreter raises for faults of the code, and the others for what
failed around it (no Python, no Docker daemon); `require_confirm` waits on stdin; `SubprocessInterpreter` answers
`stdout(stderr: ...)(Execution failed with return code N)`, ends that stderr with "Process timed out after N seconds and
was terminated.", rewrites the code with astor (which knows no `match` and no `except*`), breaks with an
UnboundLocalError on code without statements, and leaves a temporary directory behind at each call.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from strands_rollout.errors import ConfigError
from strands_rollout.sandbox.executor import ExecutionResult
from strands_rollout.sandbox.signal_words import signal_words

Interpreter = Any  # camel's classes are not known where camel is not installed

_HOME: Final = "camel.interpreters"
_DEFAULTS: Final[dict[str, Any]] = {"require_confirm": False, "print_stderr": False, "raise_error": True}
# Their InterpreterError is never about the code: what the code does wrong is in their answer.
_OUTSIDE: Final = ("DockerInterpreter", "JupyterKernelInterpreter", "E2BInterpreter", "MicrosandboxInterpreter")
_STATUS: Final = re.compile(r"\(Execution failed with return code (-?\d+)\)\Z")
_TIMED_OUT: Final = re.compile(r"\n?Process timed out after [\d.]+ seconds and was terminated\.\Z")
_SCRIPT: Final = re.compile(r'File "[^"\n]*temp_code\.py"')


def import_camel() -> Any:  # noqa: ANN401 - a module that may be absent
    """Import `camel.interpreters`.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(_HOME)
    except ImportError as e:
        raise ConfigError(
            f"a camel interpreter needs camel-ai, which can't be imported ({e}): pip install 'strands-rollout[camel]'"
        ) from e


def interpreter_maker(
    interpreter: Any,  # noqa: ANN401 - one of several kinds
    options: Mapping[str, Any] | None,
) -> tuple[Callable[[], Interpreter], type | None]:
    """What makes the interpreter of a call, and its class where that is known.

    Args:
        interpreter: A name, a dotted path, a class, a function without arguments, or an instance.
        options: The constructor's arguments, for a name, a path or a class.

    Raises:
        ConfigError: It is none of these, does not exist, or does not take the options.
    """
    camel = import_camel()
    found = _at_path(interpreter) if isinstance(interpreter, str) else interpreter
    if isinstance(found, type) and issubclass(found, camel.BaseInterpreter):
        return _maker_of_class(found, dict(options or {})), found
    if options:
        raise ConfigError(f"options {dict(options)!r:.200} were given with {found!r:.80}; expected a name or a class")
    if isinstance(found, camel.BaseInterpreter):
        check_interpreter(found)
        return (lambda: found), type(found)
    if callable(found):
        return found, None
    raise ConfigError(f"interpreter is {found!r:.80}; expected a name, class, function or instance of {_HOME}")


def _at_path(path: str) -> Any:  # noqa: ANN401 - whatever is there
    module_path, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_path or _HOME)
    except ImportError as e:
        raise ConfigError(f"there is no interpreter {path!r}: {e}") from e
    if not hasattr(module, name):
        known = [name for name in dir(import_camel()) if name.endswith("Interpreter")]
        raise ConfigError(f"there is no interpreter {path!r}; those of {_HOME} are {', '.join(known)}")
    return getattr(module, name)


def _maker_of_class(kind: type, options: dict[str, Any]) -> Callable[[], Interpreter]:
    accepted = inspect.signature(kind).parameters
    chosen = {name: value for name, value in _DEFAULTS.items() if name in accepted} | options
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise ConfigError(f"{kind.__name__} takes no option {unknown[0]!r}; it takes {', '.join(accepted) or 'none'}")
    if chosen.get("require_confirm"):
        raise ConfigError(f"{kind.__name__} with require_confirm=True would wait on stdin; expected False")
    return lambda: kind(**chosen)


def check_alone(kind: type | None, max_concurrency: int) -> None:
    """Refuse to run several pieces of code in this process at once: they would read each other's output.

    Raises:
        ConfigError: It would come to that.
    """
    if kind is not None and issubclass(kind, import_camel().InternalPythonInterpreter) and max_concurrency != 1:
        raise ConfigError(
            f"{kind.__name__} runs code in this process, where calls would read each other's output; "
            f"got max_concurrency={max_concurrency}, expected 1"
        )


def check_interpreter(interpreter: Interpreter) -> None:
    """Refuse an interpreter that would ask a question.

    Raises:
        ConfigError: It would.
    """
    if getattr(interpreter, "require_confirm", False):
        kind = type(interpreter).__name__
        raise ConfigError(
            f"{kind} has require_confirm=True and would wait on stdin; make it with require_confirm=False"
        )


def runs_in_this_process(interpreter: Interpreter) -> bool:
    """Whether an interpreter runs code in this process."""
    return isinstance(interpreter, import_camel().InternalPythonInterpreter)


def _is_one_of(interpreter: Interpreter, *names: str) -> bool:
    return isinstance(interpreter, tuple(getattr(import_camel(), name) for name in names))


def keeps_nothing(interpreter: Interpreter) -> bool:
    """Whether it remembers nothing and ends code by itself: each call may have a copy with its own time limit."""
    return isinstance(interpreter, import_camel().SubprocessInterpreter)


@contextlib.contextmanager
def limited(interpreter: Interpreter, timeout_s: float) -> Iterator[Interpreter]:
    """The interpreter for one call: with the call's time limit and nothing left behind, where it can have that."""
    if not keeps_nothing(interpreter):
        yield interpreter
        return
    one = copy.copy(interpreter)
    one.execution_timeout = timeout_s
    made: list[Path] = []
    create = getattr(one, "_create_temp_file", None)
    if callable(create):  # private: if it is gone, its directories stay, and nothing else is lost

        def create_and_remember(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - camel's signature
            path = create(*args, **kwargs)
            made.append(Path(path).parent)
            return path

        one._create_temp_file = create_and_remember
    try:
        yield one
    finally:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)


def result_of_answer(interpreter: Interpreter, answer: object, timeout_s: float) -> ExecutionResult:
    """Read what an interpreter returned: stdout, and stderr and the exit code where it marks them."""
    text = str(answer)
    if runs_in_this_process(interpreter):
        return ExecutionResult("" if text == "None" else text, "", 0)
    if not keeps_nothing(interpreter) and not _is_one_of(interpreter, "DockerInterpreter"):
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


def result_of_error(interpreter: Interpreter | None, error: BaseException) -> ExecutionResult:
    """Say whose fault an exception is: the code's, in its stderr, or the interpreter's."""
    words = f"{type(error).__name__}: {error}"
    if interpreter is not None and keeps_nothing(interpreter) and isinstance(error, UnboundLocalError):
        return ExecutionResult("", "", 0)  # how it takes code without a statement
    if interpreter is not None and _is_about_the_code(interpreter, error):
        return ExecutionResult("", f"{words}\n", 1)
    return ExecutionResult("", "", None, infra_error=words)


def _is_about_the_code(interpreter: Interpreter, error: BaseException) -> bool:
    if runs_in_this_process(interpreter):
        return True
    if isinstance(error, import_camel().InterpreterError):
        return not keeps_nothing(interpreter) and not _is_one_of(interpreter, *_OUTSIDE)
    if keeps_nothing(
        interpreter
    ):  # it parses and rewrites the code by itself, and breaks in many ways on what it can't
        return not isinstance(error, OSError | MemoryError)
    return isinstance(error, UnicodeError)  # the code's text, or what it printed
