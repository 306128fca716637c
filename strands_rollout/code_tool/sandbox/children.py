"""The supervisor's side of its children, and of the fork server that makes them."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from strands_rollout.code_tool.sandbox import DONE, FAILED, READY, STARTED, frame, python_command
from strands_rollout.code_tool.sandbox.code_runner import CappedOutput

_CHUNK_BYTES: Final = 65536
_DRAIN_S: Final = 0.5  # a process that escaped in a weaker mode may hold the pipes open for ever


class RunningChild:
    """A process that runs one piece of code, or a session's pieces one after the other."""

    def __init__(self, place: int, max_output_chars: int, max_output_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        self.place = place
        self.pid: int | None = None  # once it is known
        self.user: int | None = None  # where that is not ours
        self._process: int | None = None
        self.is_ending = False  # it has been killed, which may take the kernel some time
        self.thread_limit = 0  # from so many threads of its user on it can start no more, where the user is ours
        self.is_broken = False  # the code has written to the control socket: nothing there can be believed any more
        self.ready: asyncio.Future[None] = loop.create_future()  # it waits for code, or why it never will
        self.ended: asyncio.Future[int] = loop.create_future()  # with its exit code
        self.alarm: asyncio.Future[None] = loop.create_future()  # it is broken, or has printed too much
        self._max_output_chars = max_output_chars
        self._max_output_bytes = max_output_bytes
        self._started: asyncio.Future[None] = loop.create_future()
        self._done: asyncio.Future[int] = loop.create_future()
        self._control, self._child_control = socket.socketpair()
        self._stdout, self._child_stdout = os.pipe()
        self._stderr, self._child_stderr = os.pipe()
        self._open = {self._stdout, self._stderr}
        self._drained = loop.create_future()
        self._outputs: dict[int, CappedOutput] = {}
        self._new_outputs()
        self._control.settimeout(0)
        loop.add_reader(self._control, self._read_control)
        for pipe in (self._stdout, self._stderr):
            os.set_blocking(pipe, False)
            loop.add_reader(pipe, self._read_output, pipe)

    def descriptors(self) -> list[int]:
        """What the child is to get: stdout, stderr, control; to be closed here once it has them."""
        return [self._child_stdout, self._child_stderr, self._child_control.fileno()]

    def close_childs_ends(self) -> None:
        """Close them here: only the child holds them from now on."""
        self._child_control.close()
        os.close(self._child_stdout)
        os.close(self._child_stderr)

    def has_forked(self, pid: int, user: int | None) -> None:
        """Take note of its process."""
        self.pid, self.user = pid, user
        with contextlib.suppress(OSError, AttributeError):  # an old kernel, a container's filter, or not Linux
            self._process = os.pidfd_open(pid)

    def kill(self) -> bool:
        """End it at once; False where only its parent can do that."""
        self.is_ending = True
        if self._process is None:
            return False
        try:
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        except OSError as e:
            return isinstance(e, ProcessLookupError)
        return True

    async def start(self, code: str, *, session: bool) -> None:
        """Send code to a child that is ready; returns when it starts, or when the child has given up on it."""
        loop = asyncio.get_running_loop()
        self._started, self._done = loop.create_future(), loop.create_future()
        self._new_outputs()
        with contextlib.suppress(OSError):  # it has been killed: see `ended`
            await loop.sock_sendall(self._control, frame({"code": code, "session": session}))
        await asyncio.wait((self._started, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if not self._started.done():
            self._read_control()  # what it wrote last may not have been looked at yet
        if not self._started.done() and self.ended.result() < 0:  # else it has said on stderr what kept it from reading
            raise RuntimeError(f"a process ended with {self.ended.result()} before its code was started")

    async def wait(self) -> int | None:
        """Wait for the end: the exit code of a session's piece of code, or None if the process itself has ended."""
        await asyncio.wait({self._done, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_S):
                    await asyncio.shield(self._drained)
            return None
        for pipe in list(self._open):
            self._read_all(pipe)
        for output in self._outputs.values():
            output.feed(b"", final=True)
        return self._done.result()

    @property
    def output_bytes(self) -> int:
        """Bytes that the current piece of code has printed."""
        return sum(output.total_bytes for output in self._outputs.values())

    def printed(self) -> dict[str, Any]:
        """What the current piece of code has printed, as fields of a result."""
        stdout, stderr = self._outputs[self._stdout], self._outputs[self._stderr]
        truncated = stdout.truncated or stderr.truncated
        return {"stdout": stdout.text(), "stderr": stderr.text(), "truncated": truncated}

    def close(self) -> None:
        """Close what is open; the process must have ended."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._control)
        self._control.close()
        if self._process is not None:
            os.close(self._process)
            self._process = None
        for pipe in list(self._open):
            self._close_output(pipe)

    def _new_outputs(self) -> None:
        if self.alarm.done() and not self.is_broken:
            self.alarm = asyncio.get_running_loop().create_future()
        self._outputs = {pipe: CappedOutput(self._max_output_chars) for pipe in (self._stdout, self._stderr)}

    def _read_control(self) -> None:
        try:
            message = self._control.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            asyncio.get_running_loop().remove_reader(self._control)
        elif self.ready.done():
            self._take(message)
        elif message == READY:
            self.ready.set_result(None)
        elif message.startswith(FAILED):
            self.ready.set_exception(RuntimeError(message[1:].decode(errors="replace")))

    def _take(self, message: bytes) -> None:
        """STARTED, DONE, or both; anything else can only be the code's own."""
        if message.startswith(STARTED):
            _resolve(self._started, None)
            message = message[1:]
        if len(message) == 2 and message.startswith(DONE):
            _resolve(self._done, message[1])
        elif message:
            self.is_broken = True
            _resolve(self.alarm, None)
            asyncio.get_running_loop().remove_reader(self._control)

    def _read_output(self, pipe: int) -> None:
        try:
            chunk = os.read(pipe, _CHUNK_BYTES)
        except BlockingIOError:
            return
        self._outputs[pipe].feed(chunk, final=not chunk)
        if self.output_bytes > self._max_output_bytes:
            _resolve(self.alarm, None)
        if not chunk:
            self._close_output(pipe)

    def _read_all(self, pipe: int) -> None:
        """What is in the pipe now: code that is done has written all of it before it said so."""
        for _ in range(64):  # a thread that prints for ever must not hold everybody up
            before = self._outputs[pipe].total_bytes
            self._read_output(pipe)
            if self._outputs[pipe].total_bytes == before:
                return

    def _close_output(self, pipe: int) -> None:
        asyncio.get_running_loop().remove_reader(pipe)
        os.close(pipe)
        self._open.discard(pipe)
        if not self._open:
            _resolve(self._drained, None)


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


_MAX_MESSAGE: Final = 65536
# packets keep their borders and an end is seen; macOS has none, and there the fork server looks for its parent
_PACKETS: Final = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM


class ForkServerLink:
    """One fork server. When it ends after it was up, this process does."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        self.facts: asyncio.Future[dict[str, Any]] = loop.create_future()  # what it says of itself when it is up
        self._children: dict[int, RunningChild] = {}
        self._unsent: deque[tuple[bytes, RunningChild | None]] = deque()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, _PACKETS)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - a fixed command
                python_command("strands_rollout.code_tool.sandbox.fork_server", theirs.fileno(), settings),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=(theirs.fileno(),),
            )
        self._socket.settimeout(0)
        loop.add_reader(self._socket, self._hear)

    def fork(self, child: RunningChild) -> None:
        """Fork a child into its place; its `ready` and `ended` report the rest."""
        self._children[child.place] = child
        self._post({"do": "fork", "place": child.place}, child)

    def signal(self, child: RunningChild, number: int) -> None:
        """Send a signal to a child, unless it has ended."""
        self._post({"do": "signal", "place": child.place, "signal": number})

    def limit_threads(self, child: RunningChild, number: int) -> None:
        """Set how many threads a child's user may have before the child can start no more, unless it has ended."""
        self._post({"do": "limit", "place": child.place, "threads": number})

    def orphans(self) -> set[int]:
        """Processes that code has started and that have lost their parent: they are the fork server's children."""
        pid = self._process.pid
        try:
            listed = Path(f"/proc/{pid}/task/{pid}/children").read_bytes().split()
        except OSError:
            return set()
        return {int(number) for number in listed} - {child.pid for child in self._children.values()}

    def _post(self, message: Mapping[str, Any], child: RunningChild | None = None) -> None:
        """Send a command, with the descriptors of a child that is to be forked, after those that wait already."""
        self._unsent.append((json.dumps(message).encode(), child))
        self._flush()

    def _flush(self) -> None:
        """Send what the socket takes now; the rest when it takes more."""
        loop = asyncio.get_running_loop()
        while self._unsent:
            message, child = self._unsent[0]
            try:
                socket.send_fds(self._socket, [message], child.descriptors() if child is not None else [])
            except BlockingIOError:
                loop.add_writer(self._socket, self._flush)
                return
            except OSError as e:
                if child is not None:
                    self._fail(child.place, f"the fork server can't be reached: {e}")
            self._unsent.popleft()
            if child is not None:
                child.close_childs_ends()
        if self._socket.fileno() >= 0:
            loop.remove_writer(self._socket)

    async def close(self) -> None:
        """End the fork server, which kills its children."""
        asyncio.get_running_loop().remove_reader(self._socket)
        asyncio.get_running_loop().remove_writer(self._socket)
        self._socket.close()
        try:
            await asyncio.to_thread(self._process.wait, 2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _hear(self) -> None:
        while True:
            try:
                message = self._socket.recv(_MAX_MESSAGE)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                asyncio.get_running_loop().remove_reader(self._socket)
                self._end()
                return
            self._take(json.loads(message))

    def _take(self, news: dict[str, Any]) -> None:
        if news["is"] == "up":
            self.facts.set_result(news)
        elif news["is"] == "forked":
            self._children[news["place"]].has_forked(news["pid"], news["user"])
        elif news["is"] == "failed":
            self._fail(news["place"], news["reason"])
        elif news["is"] == "ended":
            child = self._children.pop(news["place"])
            if not child.ready.done():
                child.ready.set_exception(RuntimeError(f"the child ended with {news['exit_code']} before it was ready"))
            child.ended.set_result(news["exit_code"])

    def _fail(self, place: int, reason: str) -> None:
        child = self._children.pop(place)
        child.ready.set_exception(RuntimeError(reason))
        child.ended.set_result(-1)

    def _end(self) -> None:
        """The fork server is gone: end its children, and this process, so that the executor starts both anew."""
        if not self.facts.done():
            self.facts.set_exception(RuntimeError("the fork server ended before it was up"))
            return
        for child in self._children.values():
            if child.pid is not None:
                with contextlib.suppress(OSError):
                    os.kill(child.pid, signal.SIGKILL)
        os._exit(1)
