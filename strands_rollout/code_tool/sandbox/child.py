"""What a forked child does: take its descriptors, be confined, say so, then run the code that it is sent.

Its control socket speaks with the supervisor. The child writes READY, or FAILED and a reason in JSON; then, for each
piece of code that it is sent in a frame (`{"code": ..., "session": false}`), STARTED, then DONE and one byte, the exit
code. Without a session it ends after that; the supervisor need not wait for it, since the kernel takes milliseconds to
free the memory of such a process. Code can find the socket and write DONE itself: its call is over then, with an
exit code of its choice, as after `os._exit`; what it does then is ended, or stopped until the session's next call.
"""

import _sitebuiltins
import atexit
import builtins
import contextlib
import dbm.dumb
import gc
import itertools
import json
import multiprocessing.context
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Collection
from typing import Final

from strands_rollout.code_tool.sandbox import code_runner
from strands_rollout.code_tool.sandbox.confinement import Confinement, LayerError, Place
from strands_rollout.code_tool.sandbox.protocol import FrameReader

READY: Final = b"R"
FAILED: Final = b"E"
STARTED: Final = b"S"
DONE: Final = b"D"
_CONTROL: Final = 3
_EXCEPTION: Final = 1
_LOCKS: Final = ("Barrier", "BoundedSemaphore", "Condition", "Event", "Lock", "RLock", "Semaphore")


def become_child(confinement: Confinement, place: Place, descriptors: tuple[int, int, int]) -> None:
    """Turn a fork of the fork server into a process that runs code; never returns."""
    try:
        _take_descriptors(descriptors, confinement.kept_descriptors(), place)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        confinement.apply(place)
        if place.ruleset is not None:
            place.ruleset.close()
        _look_fresh("/" if confinement.changes_root else place.folder)
        if "syscalls" in confinement.enforced:
            _replace_locks()
        os.write(_CONTROL, READY)
    except LayerError as e:
        _fail(e.layer, str(e))
    except BaseException as e:  # whatever it is, this fork must not return into the fork server's loop
        _fail(None, f"{type(e).__name__}: {e}")
    try:
        _serve(socket.socket(fileno=_CONTROL))
    except BaseException as e:  # code that is too long for the memory, or that broke what reads the next
        with contextlib.suppress(BaseException):
            os.write(2, f"{type(e).__name__}: the next code can't be read. {e}\n".encode())
    finally:
        os._exit(_EXCEPTION)


def _take_descriptors(descriptors: tuple[int, int, int], kept: Collection[int], place: Place) -> None:
    """Have nothing open but 0 to 3, the kept ones and the ruleset."""
    os.setsid()
    for target, source in enumerate((os.open(os.devnull, os.O_RDONLY), *descriptors)):
        os.dup2(source, target)
    start = _CONTROL + 1
    ruleset = [] if place.ruleset is None else [place.ruleset.fd]
    for number in sorted([*kept, *ruleset]):
        os.closerange(start, number)
        start = number + 1
    # up to the highest that is open: where the kernel can't close a range, each number is a system call
    os.closerange(start, max(start, 1 + max(map(int, os.listdir("/dev/fd")))))  # noqa: PTH208


def _look_fresh(home: str) -> None:
    """Undo what a fork shares with all other forks: environment, random numbers, a known temporary directory."""
    os.environ.update(HOME=home, TMPDIR=home, PWD=home)
    tempfile.tempdir = None
    os.path.realpath = _real_path  # type: ignore[assignment] # one for all kinds of paths
    # what these do is refused, and shutil.copy and shelve would fail with them
    shutil.copymode = shutil.copystat = dbm.dumb._Database._chmod = _copy_nothing  # type: ignore[attr-defined]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment] # `site`, which makes them, is not imported
    builtins.help = _sitebuiltins._Helper()
    # not those of the fork server: they remember what its descriptors 1 and 2 were
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: SIM115
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(int.from_bytes(os.urandom(4), "little"))
    sympy_random = sys.modules.get("sympy.core.random")
    if sympy_random is not None:
        sympy_random.seed()
    gc.enable()


def _replace_locks() -> None:
    """Give multiprocessing, whose ThreadPool takes locks, those of threads: its own are files in /dev/shm.

    Only for a process that can start no others.
    """
    for name in _LOCKS:
        setattr(multiprocessing.context.BaseContext, name, staticmethod(getattr(threading, name)))
        setattr(multiprocessing, name, getattr(threading, name))


def _real_path(path: str | bytes | os.PathLike[str], *, strict: object = False) -> str | bytes:
    """Stand in for `os.path.realpath`, which would fail at any link: links can't be read."""
    if strict is True:  # newer Pythons have other values, which let files be missing
        os.lstat(path)
    return os.path.abspath(path)  # noqa: PTH100


def _copy_nothing(*_: object, **__: object) -> None:
    """Stand in for the copying of permissions and times."""


def _serve(control: socket.socket) -> None:
    """Run what is sent: one piece of code, or in a session one after the other, until the socket closes."""
    namespace = code_runner.prepare_interpreter().__dict__
    orders = FrameReader(control)
    for number in itertools.count(1):
        control.settimeout(None)  # earlier code may have made it non-blocking
        order = orders.next()
        if order is None:
            break
        os.write(_CONTROL, STARTED)
        name = f"<code {number}>" if order["session"] else code_runner.SOURCE_NAME
        exit_code = _run(order["code"], namespace, name)
        if not order["session"]:
            _finish()
        with contextlib.suppress(OSError):  # the code may have closed it; the end of the process has the same meaning
            os.write(_CONTROL, DONE + bytes([exit_code]))
        if not order["session"]:
            os._exit(exit_code)
    os._exit(0)


def _run(code: str, namespace: dict[str, object], name: str) -> int:
    """Run one piece of code and show its error, if any; returns the exit code that a script would have."""
    try:
        code_runner.run_code(code, namespace, name)
    except SystemExit as e:  # what the interpreter makes of `sys.exit(...)`
        if e.code is None or isinstance(e.code, int):
            return (e.code or 0) & 0xFF
        with contextlib.suppress(Exception):  # stderr is the code's to break
            print(e.code, file=sys.stderr)
        return _EXCEPTION
    except BaseException as e:  # the code may raise anything, KeyboardInterrupt included
        with contextlib.suppress(BaseException):  # the code may have replaced the hook, and closed the streams
            sys.excepthook(type(e), e, e.__traceback__)
        return _EXCEPTION
    finally:
        _flush()
    return 0


def _finish() -> None:
    """Do what the interpreter does at its end, but for the costly taking apart of all that was imported."""
    with contextlib.suppress(BaseException):  # what the code registered may raise anything
        threading._shutdown()  # type: ignore[attr-defined] # waits for the code's threads, as the interpreter does
    with contextlib.suppress(BaseException):  # as above
        atexit._run_exitfuncs()
    _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the streams are the code's to close or replace
            stream.flush()


def _fail(layer: str | None, reason: str) -> None:
    with contextlib.suppress(OSError):
        os.write(_CONTROL, FAILED + json.dumps({"layer": layer, "reason": reason}).encode())
    os._exit(1)
