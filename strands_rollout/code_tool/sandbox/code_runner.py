"""How code is run, what is shown of its errors and its end, and what is kept of its output, here and remotely.

For the sandbox's child and the program for remote sandboxes, which is sent this file: Python 3.8 and its standard
library. Must import little, and nothing of this package: every import is paid on every call.
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
_sources: dict[str, str] = {}  # what tracebacks may show: the text of each piece of code, by its file name
_folders: list[str] = []  # and the code's own modules, in the folder that it works in; with a slash at the end


def _shown_name(filename: str) -> str | None:
    """How a file of the code's own is called in a traceback; None for others, whose paths are the machine's."""
    if filename in _sources:
        return filename
    folder = next((folder for folder in _folders if filename.startswith(folder)), None)
    # it exists: where the root directory was changed, what was imported before has names below it too
    return None if folder is None or not os.path.exists(filename) else filename[len(folder) :]  # noqa: PTH110


def own_frames_only(error: traceback.TracebackException) -> None:
    """Drop every frame that is not the code's own, in the whole chain of causes; its modules lose their folder."""
    pending: list[traceback.TracebackException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None:
            continue
        current.stack[:] = [frame for frame in current.stack if _shown_name(frame.filename) is not None]
        for place in (*current.stack, current):  # an error itself has a file where it is one of syntax
            name = getattr(place, "filename", None)
            if isinstance(name, str) and _shown_name(name) is not None:
                place.filename = _shown_name(name)
        pending += [current.__cause__, current.__context__, *(getattr(current, "exceptions", None) or [])]


def format_error(kind: type[BaseException], value: BaseException | None, trace: types.TracebackType | None) -> str:
    """The traceback as the author of the code would want it: own frames with their source lines, no machine paths."""
    import linecache
    import traceback

    for name, code in _sources.items():
        linecache.cache[name] = (len(code), None, (code + "\n").splitlines(keepends=True), name)
    error = traceback.TracebackException(kind, value or kind(), trace)
    own_frames_only(error)
    has_frames = bool(error.stack) or error.__cause__ or error.__context__ or getattr(error, "exceptions", None)
    text = "".join(error.format() if has_frames else error.format_exception_only())
    path = getattr(value, "path", None) if isinstance(value, ImportError) else None
    return text.replace(f" ({path})", "") if path else text


def report_error(kind: type[BaseException], value: BaseException | None, trace: types.TracebackType | None) -> None:
    """Stand in for `sys.excepthook`."""
    with contextlib.suppress(Exception):  # the stream is the code's to close, detach or replace
        sys.stdout.flush()
    sys.stderr.write(format_error(kind, value, trace))


def report_thread_error(args: threading.ExceptHookArgs) -> None:
    """Stand in for `threading.excepthook`."""
    if args.exc_type is not SystemExit:
        report_error(args.exc_type, args.exc_value, args.exc_traceback)


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Stand in for `warnings.formatwarning`, without machine paths."""
    del line
    where = f" (line {lineno})" if filename in _sources else ""
    return f"{category.__name__}: {message}{where}\n"


def prepare_interpreter() -> types.ModuleType:
    """Make this interpreter look fresh, and return the empty `__main__` in which the code will run."""
    sys.set_int_max_str_digits(0)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.argv = [SOURCE_NAME]
    sys.excepthook = report_error
    threading.excepthook = report_thread_error
    warnings.formatwarning = format_warning
    _import_from(os.getcwd())  # noqa: PTH109 - pathlib is slow to import
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    return main


def _import_from(folder: str) -> None:
    """Let modules be imported that lie in a folder, as it is at that moment.

    Python remembers what was in a folder by the time of its last change, and a module's bytecode by the second of its:
    of what code writes and imports right away it would see the state before.
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
    """Execute the code and print the value of its last expression unless that is None."""
    _sources[name] = code
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), namespace)  # noqa: S102 - it is what this program is for
    if isinstance(last, ast.Expr):
        expression = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
        value = eval(expression, namespace)  # noqa: S307 - as above
        if value is not None:
            print(repr(value))


# no more digits than any text has characters: what looks like a marker may be the code's own
_MARKER: Final = re.compile(r"\n\.\.\. \[([0-9]{1,15}) characters dropped\] \.\.\.\n")


def _marker(dropped_chars: int) -> str:
    return f"\n... [{dropped_chars} characters dropped] ...\n"


def shorten(text: str, max_chars: int) -> str:
    """Cut the middle out of a text longer than `max_chars`, with a marker that says how many characters went.

    A marker of an earlier cut that goes with the middle is counted as what it stood for. The result is longer than
    `max_chars` by the marker (at most 50 characters).
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
    """Collects one stream's bytes in bounded memory: at most about twice `max_chars` characters are held."""

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
        """Whether characters were dropped."""
        return self._dropped_chars > 0

    def feed(self, chunk: bytes, *, final: bool = False) -> None:
        """Take the next bytes; `final` marks the end of the stream, where an unfinished character becomes U+FFFD."""
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
        """What was kept, with the marker in place of what was dropped."""
        return self._head + (_marker(self._dropped_chars) if self.truncated else "") + self._tail


_WORDS: Final = {
    "SIGKILL": "SIGKILL (probably out of memory)",
    "SIGSEGV": "SIGSEGV (crash)",
    "SIGABRT": "SIGABRT (abort)",
    "SIGXCPU": "SIGXCPU (CPU time limit)",
    "SIGXFSZ": "SIGXFSZ (file size limit)",
    "SIGSYS": "SIGSYS (forbidden system call)",
}


def signal_words(exit_code: int) -> str | None:
    """Name the signal behind a negative exit code; None for a code that the program chose."""
    if exit_code >= 0:
        return None
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
    return _WORDS.get(name, name)
