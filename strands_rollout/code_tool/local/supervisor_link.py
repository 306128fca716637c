"""The executor's side of the supervisor process: starts it, sends orders, hands answers to whoever waits.

One thread reads, and one writes what the socket does not take at once: no event loop ever waits for the process,
however busy or stopped it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any, Final

from strands_rollout.errors import SandboxError
from strands_rollout.sandbox.inside.frames import FrameReader, frame
from strands_rollout.sandbox.inside.python_process import python_command

_START_LIMIT_S: Final = 120.0
_STOP_LIMIT_S: Final = 10.0
_KEPT_VARIABLES: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL")  # what Python may need to start


class SupervisorGoneError(Exception):
    """The supervisor process has ended before it answered."""


class SupervisorLink:
    """One supervisor process. Blocking to make and to close: belongs in a thread.

    Args:
        settings: For the supervisor, in JSON's types.

    Attributes:
        facts: What the template says of itself: `enforced`, `missing`, `start_s`.

    Raises:
        SandboxError: It did not start.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._ids = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._lock = threading.Lock()
        self._gone = False
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._is_writing = False  # the thread has something to write, after which all else has to come
        self._socket, theirs = socket.socketpair()
        self._news = FrameReader(self._socket)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has ended
        self._process: subprocess.Popen[bytes] | None = None
        try:
            with theirs:
                self._process = _start(settings, theirs, self._errors)
            self.facts: dict[str, Any] = self._hear_facts()
            for work in (self._write, self._read):
                threading.Thread(target=work, name="code-executor", daemon=True).start()
        except BaseException:  # whatever it was, nothing must be left of it
            self.close()
            raise

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, or is about to."""
        return self._gone

    async def run(self, code: str, timeout_s: float, session: str | None) -> dict[str, Any]:
        """Have code run; the fields of an `ExecutionResult`.

        Raises:
            SupervisorGoneError: The process ended.
        """
        order = {"do": "run", "code": code, "timeout_s": timeout_s, "session": session}
        result: dict[str, Any] = await self._ask(order)
        return result

    async def close_session(self, session: str) -> None:
        """End a session.

        Raises:
            SupervisorGoneError: The process ended, and the session with it.
        """
        await self._ask({"do": "close_session", "session": session})

    def kill(self) -> None:
        """End the process at once: whoever waits is told."""
        self._gone = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process, and with it all that it runs. Safe to call twice."""
        self._gone = True
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

    async def _ask(self, order: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
        number = next(self._ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._gone:
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
        self._socket.settimeout(_START_LIMIT_S)
        try:
            news = self._news.next()
        except OSError as e:
            news = {"failure": str(e)}
        self._socket.settimeout(None)
        if news is None or "facts" not in news:
            self.kill()
            reason = (news or {}).get("failure", "it ended")
            raise SandboxError(f"the code sandbox did not start: {reason}{self._last_errors()}")
        facts: dict[str, Any] = news["facts"]
        return facts

    def _last_errors(self) -> str:
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        return f"; its last words were: {text[-1500:]}" if text else ""

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (order := self._unsent.get()) is not None:
                self._socket.sendall(order)
                with self._sending:
                    self._is_writing = not self._unsent.empty()

    def _read(self) -> None:
        try:
            while (news := self._news.next()) is not None:
                answer = self._answers.get(news["id"])
                if answer is not None:
                    _call(answer, answer.set_result, news["result"])
        except (OSError, ValueError):
            pass
        finally:
            with self._lock:
                self._gone = True
                unanswered = list(self._answers.values())
            self._unsent.put(None)
            for answer in unanswered:
                _call(answer, answer.set_exception, SupervisorGoneError())


def _call(answer: asyncio.Future[Any], settle: Callable[[Any], None], outcome: object) -> None:
    """Settle an answer on the loop of whoever waits for it, unless nobody does any more."""

    def unless_done() -> None:
        if not answer.done():
            settle(outcome)

    with contextlib.suppress(RuntimeError):  # its loop is closed
        answer.get_loop().call_soon_threadsafe(unless_done)


def _start(settings: Mapping[str, Any], link: socket.socket, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - a fixed command
        python_command("strands_rollout.sandbox.inside.service", link.fileno(), settings),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=_environment(),
        pass_fds=(link.fileno(),),
        start_new_session=True,  # a Ctrl-C in the terminal is the trainer's alone
    )


def _environment() -> dict[str, str]:
    """Everything that code can see of the trainer's environment; one thread per numeric library."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # the same order of sets in every run: what differs from run to run is noise for who learns from it
    fixed = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONHASHSEED": "0"}
    # macOS would end a fork that uses what its parent has loaded
    macos = {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"} if sys.platform == "darwin" else {}
    return {"LANG": "C.UTF-8", **kept, **one_thread, **fixed, **macos}
