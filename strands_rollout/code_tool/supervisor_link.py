"""The executor's side of the supervisor process: its scratch directory, its start, and the exchange of messages.

One thread reads the socket, and a second writes what the socket does not accept immediately. An event loop therefore
never waits for the supervisor, even if the supervisor is busy or stopped.
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
_LOCK_DELAY_S: Final = 60.0  # the owner of a younger directory may be alive, but may not have locked it yet


class ScratchRoot:
    """An executor's scratch directory, locked while the executor lives.

    The directory is made in `parent`. Without a `parent`, it is made in the temporary directory, or for root in /tmp if
    other users can enter /tmp but not the temporary directory. Directories left there by dead executors of the same
    user are deleted.

    Raises:
        SandboxError: The directory can't be made, or the disk is almost full.
    """

    def __init__(self, parent: str | None = None) -> None:
        folder = parent or _default_parent()
        try:
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=folder)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(self.path).chmod(0o711)
        except OSError as e:
            raise SandboxError(
                f"can't make a scratch directory in {folder!r}: {e}; set scratch_dir to another folder"
            ) from e
        if scratch.is_scarce(scratch.free_space(self.path)):
            self.delete()
            raise SandboxError(
                f"the disk of {folder!r} is almost full; free some space, or set scratch_dir to a folder on another "
                "disk"
            )
        _delete_abandoned(Path(folder))

    def delete(self) -> None:
        """Delete the directory and everything in it. Safe to call twice."""
        scratch.delete(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _default_parent() -> str:
    chosen = tempfile.gettempdir()
    # only root runs the code as another user
    if os.geteuid() != 0 or _others_can_pass(chosen) or not _others_can_pass("/tmp"):  # noqa: S108
        return chosen
    return "/tmp"  # noqa: S108 - mkdtemp makes a directory of our own in it


def _others_can_pass(folder: str) -> bool:
    real = Path(os.path.realpath(folder))
    return real.is_dir() and all(path.stat().st_mode & stat.S_IXOTH for path in (real, *real.parents))


def _delete_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _LOCK_DELAY_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                scratch.delete(str(folder))
            finally:
                os.close(lock)


_START_TIMEOUT_S: Final = 120.0
_STOP_TIMEOUT_S: Final = 10.0
_INHERITED_VARIABLES: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL")  # Python may need them


class SupervisorGoneError(Exception):
    """The supervisor process ended before it answered."""


class SupervisorLink:
    """A supervisor process and the socket to it.

    The constructor and `close` block; call them in a thread.

    Raises:
        SandboxError: The supervisor did not start.
        OSError, RuntimeError: This process lacks descriptors, memory or threads.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._ids = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._lock = threading.Lock()
        self.is_gone = False  # True if the process has ended or is about to
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._is_writing = False  # True if the writer thread has unsent bytes: new requests must queue behind them
        self._socket, theirs = socket.socketpair()
        self._messages = FrameReader(self._socket)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - read if the start fails
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            with theirs:
                self._process = _start_supervisor(settings, theirs, self._stderr)
            self.facts = self._receive_facts()
            for work in (self._write, self._read):
                threading.Thread(target=work, name="code-executor", daemon=True).start()
            on_failure.pop_all()

    async def run(self, code: str, timeout_s: float, session: str | None) -> dict[str, Any]:
        """Have the supervisor run code, and return the fields of an `ExecutionResult`.

        Raises:
            SupervisorGoneError: The supervisor ended before it answered.
        """
        request = {"do": "run", "code": code, "timeout_s": timeout_s, "session": session}
        result: dict[str, Any] = await self._request(request)
        return result

    async def close_session(self, session: str) -> None:
        """End a session's interpreter and delete its files.

        Raises:
            SupervisorGoneError: The supervisor ended before it answered.
        """
        await self._request({"do": "close_session", "session": session})

    def cancel_orphaned_calls(self) -> None:
        """Cancel calls whose event loop has been closed: nothing waits for their answers any more."""
        for number, answer in list(self._answers.items()):
            if answer.get_loop().is_closed() and self._answers.pop(number, None) is not None:
                self._send(frame({"do": "cancel", "id": number}))

    def kill(self) -> None:
        """Kill the process immediately; waiting calls raise SupervisorGoneError."""
        self.is_gone = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process and all code that it runs. Safe to call twice."""
        self.is_gone = True
        self._unsent.put(None)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._process is not None:
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close this process's descriptors without ending the supervisor.

        A forked process calls this method, since its parent owns the supervisor.
        """
        self._socket.close()
        self._stderr.close()

    async def _request(self, request: dict[str, Any]) -> Json:
        number = next(self._ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self.is_gone:
                raise SupervisorGoneError
            self._answers[number] = answer
        self._send(frame(request | {"id": number}))
        try:
            return await answer
        except asyncio.CancelledError:
            self._send(frame({"do": "cancel", "id": number}))
            raise
        finally:
            self._answers.pop(number, None)

    def _send(self, request: bytes) -> None:
        with self._sending, contextlib.suppress(OSError):  # the reader thread notices the end of the process
            if not self._is_writing:
                with contextlib.suppress(BlockingIOError):
                    request = request[self._socket.send(request, socket.MSG_DONTWAIT) :]
            if request:
                self._is_writing = True
                self._unsent.put(request)

    def _receive_facts(self) -> dict[str, Any]:
        """Return the fork server's report: `enforced`, `missing` and `start_s`, as in `SandboxReport`."""
        self._socket.settimeout(_START_TIMEOUT_S)
        try:
            message = self._messages.next()
        except TimeoutError:
            message = {"failure": f"no report came within {_START_TIMEOUT_S:g} s"}
        except OSError as e:
            message = {"failure": str(e)}
        self._socket.settimeout(None)
        if message is None or "facts" not in message:
            self.kill()
            reason = (message or {}).get("failure", "the process ended")
            self._stderr.seek(0)
            stderr = self._stderr.read().decode(errors="replace").strip()
            tail = f"; stderr ends with: {stderr[-1500:]}" if stderr else ""
            raise SandboxError(f"the code sandbox did not start: {reason}{tail}")
        facts: dict[str, Any] = message["facts"]
        return facts

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (request := self._unsent.get()) is not None:
                self._socket.sendall(request)
                with self._sending:
                    self._is_writing = not self._unsent.empty()

    def _read(self) -> None:
        try:
            while (message := self._messages.next()) is not None:
                if "warning" in message:
                    logger.warning("code sandbox: %s", message["warning"])
                    continue
                answer = self._answers.get(message["id"])
                if answer is not None:
                    _settle(answer, answer.set_result, message["result"])
        except (OSError, ValueError):
            pass
        finally:
            with self._lock:
                self.is_gone = True
                unanswered = list(self._answers.values())
            self._unsent.put(None)
            for answer in unanswered:
                _settle(answer, answer.set_exception, SupervisorGoneError())


def _settle(answer: asyncio.Future[Any], settle: Callable[[Any], None], outcome: object) -> None:
    def settle_unless_done() -> None:
        if not answer.done():
            settle(outcome)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        answer.get_loop().call_soon_threadsafe(settle_unless_done)


def _start_supervisor(settings: Mapping[str, Any], link: socket.socket, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    # code can see only these variables of this process
    inherited = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # with a fixed hash seed, sets print in the same order in every run: the policy trains on reproducible results
    fixed = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONHASHSEED": "0"}
    # without this, macOS kills a forked process that uses libraries loaded by its parent
    macos = {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"} if sys.platform == "darwin" else {}
    return subprocess.Popen(  # noqa: S603 - a fixed command
        python_command("strands_rollout.code_tool.sandbox.supervisor", link.fileno(), settings),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env={"LANG": "C.UTF-8", **inherited, **one_thread, **fixed, **macos},
        pass_fds=(link.fileno(),),
        start_new_session=True,  # a Ctrl-C in the terminal must not reach the supervisor
    )


Isolation = Literal["full", "files", "seccomp", "rlimits"]

# the layers that each mode demands, strongest mode first; "programs" is a layer only if code may start programs
LAYERS: Final[dict[Isolation, tuple[str, ...]]] = {
    "full": ("limits", "user", "files", "syscalls"),
    "files": ("limits", "user", "files", "programs"),
    "seccomp": ("limits", "syscalls"),
    "rlimits": ("limits",),
}


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """The layers that a started sandbox enforces, the missing layers, and the duration of its start.

    Attributes:
        enforced: Layer ("limits", "user", "files", "syscalls"; "programs" if code may start programs) -> mechanism.
        missing: Layer -> reason why it is missing.
        isolation: Strongest mode without missing layers; "rlimits" if there is no such mode.
        start_s: Duration of the start in seconds.
    """

    enforced: dict[str, str]
    missing: dict[str, str]
    isolation: Isolation
    start_s: float


class SandboxProcesses:
    """A supervisor process and its scratch directory; usable only in the process that started the supervisor."""

    def __init__(self, settings: dict[str, Any], scratch_dir: str | None) -> None:
        self.pid = os.getpid()
        self._closed = False
        self._root = ScratchRoot(scratch_dir)
        settings["root"] = settings["fork_server"]["root"] = self._root.path
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._root.delete)
            self.link = SupervisorLink(settings)
            on_failure.pop_all()
        enforced, missing, start_s = (self.link.facts[name] for name in ("enforced", "missing", "start_s"))
        available = (mode for mode, layers in LAYERS.items() if mode == "rlimits" or not set(layers) & set(missing))
        self.report = SandboxReport(enforced, missing, next(available), start_s)

    @property
    def is_usable(self) -> bool:
        """Return whether the supervisor runs and this process started it; False in a fork of that process."""
        return self.pid == os.getpid() and not self.link.is_gone

    def close(self) -> None:
        """End the supervisor and delete its files; in a fork, only close descriptors. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self.pid != os.getpid():
            self.link.close_descriptors()
            return
        self.link.close()
        self._root.delete()
