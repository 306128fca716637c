"""Run code, format its errors, and cap its output, in the local sandbox and in remote sandboxes.

Remote sandboxes get the source of this file, so it must run on Python 3.8 and import nothing from this package. It must
import little, because every call pays for the imports.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import os
import re
import signal
import sys
import threading
import types
import warnings
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import traceback


SOURCE_NAME = "<code>"
_sources: dict[str, str] = {}  # file name -> text of each piece of code, for tracebacks
_folders: list[str] = []  # the working folder with a trailing slash; tracebacks also show modules in it


def _shown_name(filename: str) -> str | None:
    """Return the name that a traceback shows for one of the code's own files; return None for any other file."""
    if filename in _sources:
        return filename
    folder = next((folder for folder in _folders if filename.startswith(folder)), None)
    # check that the file exists: after a change of root, modules imported earlier also seem to lie below the new root
    return None if folder is None or not os.path.exists(filename) else filename[len(folder) :]  # noqa: PTH110


def remove_foreign_frames(error: traceback.TracebackException) -> None:
    """Remove frames that are not the code's own from an error and its causes; make the code's file names relative."""
    pending: list[traceback.TracebackException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None:
            continue
        current.stack[:] = [frame for frame in current.stack if _shown_name(frame.filename) is not None]
        for item in (*current.stack, current):  # a syntax error has a file name itself
            name = getattr(item, "filename", None)
            if isinstance(name, str) and _shown_name(name) is not None:
                item.filename = _shown_name(name)
        pending += [current.__cause__, current.__context__, *(getattr(current, "exceptions", None) or [])]


def format_error(kind: type[BaseException], value: BaseException | None, trace: types.TracebackType | None) -> str:
    """Format a traceback with the source lines of the code's own frames, without paths of this machine."""
    import linecache
    import traceback

    for name, code in _sources.items():
        linecache.cache[name] = (len(code), None, (code + "\n").splitlines(keepends=True), name)
    error = traceback.TracebackException(kind, value or kind(), trace)
    remove_foreign_frames(error)
    has_frames = bool(error.stack) or error.__cause__ or error.__context__ or getattr(error, "exceptions", None)
    text = "".join(error.format() if has_frames else error.format_exception_only())
    path = getattr(value, "path", None) if isinstance(value, ImportError) else None
    return text.replace(f" ({path})", "") if path else text


def report_error(kind: type[BaseException], value: BaseException | None, trace: types.TracebackType | None) -> None:
    """Print an error to stderr; installed as `sys.excepthook`."""
    with contextlib.suppress(Exception):  # the code may have closed, detached or replaced the stream
        sys.stdout.flush()
    sys.stderr.write(format_error(kind, value, trace))


def report_thread_error(args: threading.ExceptHookArgs) -> None:
    """Print the error of a thread to stderr, except SystemExit; installed as `threading.excepthook`."""
    if args.exc_type is not SystemExit:
        report_error(args.exc_type, args.exc_value, args.exc_traceback)


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning without the path of its file; installed as `warnings.formatwarning`."""
    del line
    where = f" (line {lineno})" if filename in _sources else ""
    return f"{category.__name__}: {message}{where}\n"


def prepare_interpreter() -> types.ModuleType:
    """Set up streams, hooks and imports, and return the empty `__main__` module in which the code will run."""
    sys.set_int_max_str_digits(0)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.argv = [SOURCE_NAME]
    sys.excepthook = report_error
    threading.excepthook = report_thread_error
    warnings.formatwarning = format_warning
    _enable_fresh_imports(os.getcwd())  # noqa: PTH109 - pathlib is slow to import
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    return main


def _enable_fresh_imports(folder: str) -> None:
    """Make modules in a folder importable as soon as they are written.

    Python lists a folder again only if its modification time has changed, and compares a module's modification time
    with its bytecode in whole seconds. So code that writes a module and imports it at once could get an old version.
    """
    from importlib import machinery

    class FreshFinder(machinery.FileFinder):
        def find_spec(self, fullname: str, target: types.ModuleType | None = None) -> machinery.ModuleSpec | None:
            self.invalidate_caches()
            return super().find_spec(fullname, target)

    prefix = folder.rstrip("/") + "/"

    def find_in(path: str) -> FreshFinder:
        if not (path + "/").startswith(prefix):
            raise ImportError(path)
        return FreshFinder(
            path,
            (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
            (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
        )

    sys.dont_write_bytecode = True
    sys.path_hooks.insert(0, find_in)
    sys.path.insert(0, folder)
    _folders[:] = [prefix]


def run_code(code: str, namespace: dict[str, object], name: str = SOURCE_NAME) -> None:
    """Execute the code; if it ends with an expression, print the value, unless it is None."""
    _sources[name] = code
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), namespace)  # noqa: S102 - the purpose of this program
    if isinstance(last, ast.Expr):
        expression = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
        value = eval(expression, namespace)  # noqa: S307 - the purpose of this program
        if value is not None:
            print(repr(value))


# no real count has more than 15 digits, but the code may print a false marker with any number of digits
_MARKER: Final = re.compile(r"\n\.\.\. \[([0-9]{1,15}) characters dropped\] \.\.\.\n")


def _marker(dropped_chars: int) -> str:
    return f"\n... [{dropped_chars} characters dropped] ...\n"


def shorten(text: str, max_chars: int) -> str:
    """Replace the middle of a text longer than `max_chars` with a marker that has the number of dropped characters.

    If the dropped middle has the marker of an earlier cut, the number includes the characters dropped then. The result
    has `max_chars` characters and the marker (at most 50 characters).
    """
    if len(text) <= max_chars:
        return text
    head_chars = max_chars // 2
    tail_start = len(text) - (max_chars - head_chars)
    dropped_chars = tail_start - head_chars
    for earlier in _MARKER.finditer(text, head_chars, tail_start):
        dropped_chars += int(earlier[1]) - len(earlier[0])
    return text[:head_chars] + _marker(dropped_chars) + text[tail_start:]


class CappedOutput:
    """The beginning and the end of a stream's text, `max_chars` characters in all; the rest is dropped."""

    def __init__(self, max_chars: int) -> None:
        self._head_chars = max_chars // 2
        self._tail_chars = max_chars - self._head_chars
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._head = ""
        self._tail = ""
        self._dropped_chars = 0
        self.total_bytes = 0

    @property
    def truncated(self) -> bool:
        """Return whether characters were dropped."""
        return self._dropped_chars > 0

    def feed(self, chunk: bytes, *, final: bool = False) -> None:
        """Add the next bytes; at the end of the stream (`final`) an incomplete character becomes U+FFFD."""
        self.total_bytes += len(chunk)
        text = self._decoder.decode(chunk, final)
        missing = self._head_chars - len(self._head)
        self._head += text[:missing]
        self._tail += text[missing:]
        surplus = len(self._tail) - self._tail_chars
        if surplus > 0:
            self._dropped_chars += surplus
            self._tail = self._tail[surplus:]

    def text(self) -> str:
        """Return head and tail, with a marker between them if characters were dropped."""
        return self._head + (_marker(self._dropped_chars) if self.truncated else "") + self._tail


_SIGNAL_TEXTS: Final = {
    "SIGKILL": "SIGKILL (probably out of memory)",
    "SIGSEGV": "SIGSEGV (crash)",
    "SIGABRT": "SIGABRT (abort)",
    "SIGXCPU": "SIGXCPU (CPU time limit)",
    "SIGXFSZ": "SIGXFSZ (file size limit)",
    "SIGSYS": "SIGSYS (forbidden system call)",
}


def describe_signal(exit_code: int) -> str | None:
    """Describe the signal behind a negative exit code; return None for any other exit code."""
    if exit_code >= 0:
        return None
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
    return _SIGNAL_TEXTS.get(name, name)
