"""The executor's side of the supervisor process: its scratch directory, its start, orders and answers.

One thread reads, and one writes what the socket does not take at once: no event loop ever waits for the process,
however busy or stopped it is.
"""

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import queue
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal

from strands_rollout.code_tool.sandbox import FrameReader, frame, python_command, scratch
from strands_rollout.errors import SandboxError
from strands_rollout.files.json_codec import Json

logger = logging.getLogger(__name__)

_PREFIX: Final = "strands-rollout-code-"
_YOUNG_S: Final = 60.0  # a directory that is this young may be about to be locked


class ScratchRoot:
    """A directory for an executor's files: in the parent, else in the temporary one, or in /tmp if that is closed."""

    def __init__(self, parent: str | None = None) -> None:
        folder = parent or _default_parent()
        try:
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=folder)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(self.path).chmod(0o711)
        except OSError as e:
            raise SandboxError(f"can't make a scratch directory in {folder!r}: {e}; name another as scratch_dir") from e
        if scratch.is_scarce(scratch.free_space(self.path)):
            self.delete()
            raise SandboxError(f"the disk of {folder!r} is almost full; name another folder as scratch_dir")
        _delete_abandoned(Path(folder))

    def delete(self) -> None:
        """Delete it with all it holds. Safe to call twice."""
        scratch.delete(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _default_parent() -> str:
    """Code runs as another user where we are root, and names its files by absolute paths."""
    chosen = tempfile.gettempdir()
    if os.geteuid() != 0 or _others_can_pass(chosen) or not _others_can_pass("/tmp"):  # noqa: S108
        return chosen
    return "/tmp"  # noqa: S108 - a directory of our own is made in it, by mkdtemp


def _others_can_pass(folder: str) -> bool:
    here = Path(os.path.realpath(folder))
    return here.is_dir() and all(place.stat().st_mode & stat.S_IXOTH for place in (here, *here.parents))


def _delete_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _YOUNG_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                scratch.delete(str(folder))
            finally:
                os.close(lock)


_START_LIMIT_S: Final = 120.0
_STOP_LIMIT_S: Final = 10.0
_KEPT_VARIABLES: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL")  # what Python may need to start


class SupervisorGoneError(Exception):
    """The supervisor process has ended before it answered."""


class SupervisorLink:
    """One supervisor process. Blocking to make and to close: belongs in a thread."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._ids = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._lock = threading.Lock()
        self.is_gone = False  # the process has ended, or is about to
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._is_writing = False  # the thread has something to write, after which all else has to come
        self._socket, theirs = socket.socketpair()
        self._news = FrameReader(self._socket)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has ended
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.ExitStack() as unless_started:
            unless_started.callback(self.close)
            with theirs:
                self._process = _start(settings, theirs, self._errors)
            self.facts = self._hear_facts()
            for work in (self._write, self._read):
                threading.Thread(target=work, name="code-executor", daemon=True).start()
            unless_started.pop_all()

    async def run(self, code: str, timeout_s: float, session: str | None) -> dict[str, Any]:
        """Have code run; the fields of an `ExecutionResult`."""
        order = {"do": "run", "code": code, "timeout_s": timeout_s, "session": session}
        result: dict[str, Any] = await self._ask(order)
        return result

    async def close_session(self, session: str) -> None:
        """End a session."""
        await self._ask({"do": "close_session", "session": session})

    def cancel_unheard(self) -> None:
        """Cancel the calls whose event loop has been closed: nobody waits for their answers any more."""
        for number, answer in list(self._answers.items()):
            if answer.get_loop().is_closed() and self._answers.pop(number, None) is not None:
                self._send(frame({"do": "cancel", "id": number}))

    def kill(self) -> None:
        """End the process at once; calls that wait raise SupervisorGoneError."""
        self.is_gone = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process, and with it all that it runs. Safe to call twice."""
        self.is_gone = True
        self._unsent.put(None)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._process is not None:
            try:
                self._process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.forget()

    def forget(self) -> None:
        """Close what this process holds of it, which is all that a fork may do: the supervisor is not its own."""
        self._socket.close()
        self._errors.close()

    async def _ask(self, order: dict[str, Any]) -> Json:
        number = next(self._ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self.is_gone:
                raise SupervisorGoneError
            self._answers[number] = answer
        self._send(frame(order | {"id": number}))
        try:
            return await answer
        except asyncio.CancelledError:
            self._send(frame({"do": "cancel", "id": number}))
            raise
        finally:
            self._answers.pop(number, None)

    def _send(self, order: bytes) -> None:
        """Write what the socket takes now, and leave the rest to the thread; orders stay in their order."""
        with self._sending, contextlib.suppress(OSError):  # an end of the process is heard by reading
            if not self._is_writing:
                with contextlib.suppress(BlockingIOError):
                    order = order[self._socket.send(order, socket.MSG_DONTWAIT) :]
            if order:
                self._is_writing = True
                self._unsent.put(order)

    def _hear_facts(self) -> dict[str, Any]:
        """What the fork server says of itself: `enforced`, `missing`, `start_s`."""
        self._socket.settimeout(_START_LIMIT_S)
        try:
            news = self._news.next()
        except OSError as e:
            news = {"failure": str(e)}
        self._socket.settimeout(None)
        if news is None or "facts" not in news:
            self.kill()
            reason = (news or {}).get("failure", "it ended")
            self._errors.seek(0)
            text = self._errors.read().decode(errors="replace").strip()
            last_words = f"; its last words were: {text[-1500:]}" if text else ""
            raise SandboxError(f"the code sandbox did not start: {reason}{last_words}")
        facts: dict[str, Any] = news["facts"]
        return facts

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (order := self._unsent.get()) is not None:
                self._socket.sendall(order)
                with self._sending:
                    self._is_writing = not self._unsent.empty()

    def _read(self) -> None:
        try:
            while (news := self._news.next()) is not None:
                if "warning" in news:
                    logger.warning("code sandbox: %s", news["warning"])
                    continue
                answer = self._answers.get(news["id"])
                if answer is not None:
                    _call(answer, answer.set_result, news["result"])
        except (OSError, ValueError):
            pass
        finally:
            with self._lock:
                self.is_gone = True
                unanswered = list(self._answers.values())
            self._unsent.put(None)
            for answer in unanswered:
                _call(answer, answer.set_exception, SupervisorGoneError())


def _call(answer: asyncio.Future[Any], settle: Callable[[Any], None], outcome: object) -> None:
    """Settle an answer on the loop that waits for it, unless it was cancelled."""

    def unless_done() -> None:
        if not answer.done():
            settle(outcome)

    with contextlib.suppress(RuntimeError):  # its loop is closed
        answer.get_loop().call_soon_threadsafe(unless_done)


def _start(settings: Mapping[str, Any], link: socket.socket, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    # everything that code can see of the trainer's environment; one thread per numeric library
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # the same order of sets in every run: what differs from run to run is noise for who learns from it
    fixed = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONHASHSEED": "0"}
    # macOS would end a fork that uses what its parent has loaded
    macos = {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"} if sys.platform == "darwin" else {}
    return subprocess.Popen(  # noqa: S603 - a fixed command
        python_command("strands_rollout.code_tool.sandbox.supervisor", link.fileno(), settings),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env={"LANG": "C.UTF-8", **kept, **one_thread, **fixed, **macos},
        pass_fds=(link.fileno(),),
        start_new_session=True,  # a Ctrl-C in the terminal is the trainer's alone
    )


Isolation = Literal["full", "files", "seccomp", "rlimits"]

# what each mode asks for, strongest first; `programs` where code may start some, and there is no such layer otherwise
LAYERS: Final[dict[Isolation, tuple[str, ...]]] = {
    "full": ("limits", "user", "files", "syscalls"),
    "files": ("limits", "user", "files", "programs"),
    "seccomp": ("limits", "syscalls"),
    "rlimits": ("limits",),
}


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """What a started sandbox enforces.

    Attributes:
        enforced: Layer ("limits", "user", "files", "syscalls"; "programs" where code may start some) -> how.
        missing: Layer -> why it is not there.
        isolation: The strongest mode that this is enough for.
        start_s: Seconds that it took to start.
    """

    enforced: dict[str, str]
    missing: dict[str, str]
    isolation: Isolation
    start_s: float


class SandboxProcesses:
    """A supervisor process with the directory in which it works, of the process that started it."""

    def __init__(self, settings: dict[str, Any], scratch_dir: str | None) -> None:
        self.pid = os.getpid()
        self._closed = False
        self._root = ScratchRoot(scratch_dir)
        settings["root"] = settings["fork_server"]["root"] = self._root.path
        with contextlib.ExitStack() as unless_started:
            unless_started.callback(self._root.delete)
            self.link = SupervisorLink(settings)
            unless_started.pop_all()
        enforced, missing, start_s = (self.link.facts[name] for name in ("enforced", "missing", "start_s"))
        fitting = (mode for mode, layers in LAYERS.items() if mode == "rlimits" or not set(layers) & set(missing))
        self.report = SandboxReport(enforced, missing, next(fitting), start_s)

    @property
    def is_ours(self) -> bool:
        """Whether it can be used: it runs, and this process is not a fork of the one that started it."""
        return self.pid == os.getpid() and not self.link.is_gone

    def close(self) -> None:
        """End it and delete its files, unless another process started it. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self.pid != os.getpid():
            self.link.forget()
            return
        self.link.close()
        self._root.delete()
