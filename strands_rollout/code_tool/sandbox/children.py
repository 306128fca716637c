"""The supervisor's links to its children and to the fork server that forks them."""

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
_DRAIN_TIMEOUT_S: Final = 0.5  # in a weaker mode, a process that escaped may hold the pipes open forever


class RunningChild:
    """A process, its pipes and its output. It runs one piece of code, or a session's pieces one after the other."""

    def __init__(self, slot: int, max_output_chars: int, max_output_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        self.slot = slot
        self.pid: int | None = None  # None until it has been forked
        self.user: int | None = None  # None until it has been forked, or if it runs as the supervisor's user
        self._pidfd: int | None = None
        self.is_ending = False  # it has been killed, but may not have ended yet
        self.thread_limit = 0  # the soft RLIMIT_NPROC that the supervisor last set; 0 if it has set none
        self.is_broken = False  # the code has written to the control socket, which is not trusted any more
        # `ready` is done once the child waits for code; if forking or preparing the child failed, it has an exception
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()  # the exit code; -1 if no process could be forked
        self.alarm: asyncio.Future[None] = loop.create_future()  # the child is broken, or has printed too much
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
        """Return the descriptors to send to the child: stdout, stderr, control."""
        return [self._child_stdout, self._child_stderr, self._child_control.fileno()]

    def close_child_descriptors(self) -> None:
        """Close this process's copies of `descriptors` after they have been sent."""
        self._child_control.close()
        os.close(self._child_stdout)
        os.close(self._child_stderr)

    def on_forked(self, pid: int, user: int | None) -> None:
        """Record the child's pid and user, and open a pidfd."""
        self.pid, self.user = pid, user
        with contextlib.suppress(OSError, AttributeError):  # an old kernel, a container's filter, or not Linux
            self._pidfd = os.pidfd_open(pid)

    def kill(self) -> bool:
        """Kill the process immediately; return False if only its parent, the fork server, can do that."""
        self.is_ending = True
        if self._pidfd is None:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except OSError as e:
            return isinstance(e, ProcessLookupError)
        return True

    async def start(self, code: str, *, session: bool) -> None:
        """Send code to a child that is ready, and wait until the code starts.

        Also returns if the child exits by itself before the code starts. The child's stderr then has the reason, for
        example that the child can't read the code.

        Raises:
            RuntimeError: A signal ended the child before the code started.
        """
        loop = asyncio.get_running_loop()
        self._started, self._done = loop.create_future(), loop.create_future()
        self._new_outputs()
        with contextlib.suppress(OSError):  # the child has been killed, which `ended` reports
            await loop.sock_sendall(self._control, frame({"code": code, "session": session}))
        await asyncio.wait((self._started, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if not self._started.done():
            self._read_control()  # the child's last message may not have been read yet
        if not self._started.done() and self.ended.result() < 0:  # otherwise its stderr has the reason
            raise RuntimeError(f"a process ended with exit code {self.ended.result()} before its code was started")

    async def wait(self) -> int | None:
        """Wait for the end of the code; return its exit code, or None if the process itself has ended."""
        await asyncio.wait({self._done, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                    await asyncio.shield(self._drained)
            return None
        for pipe in list(self._open):
            self._drain_pipe(pipe)
        for output in self._outputs.values():
            output.feed(b"", final=True)
        return self._done.result()

    @property
    def output_bytes(self) -> int:
        """Return how many bytes the current piece of code has printed."""
        return sum(output.total_bytes for output in self._outputs.values())

    def output_fields(self) -> dict[str, Any]:
        """Return the output of the current piece of code, as fields of an `ExecutionResult`."""
        stdout, stderr = self._outputs[self._stdout], self._outputs[self._stderr]
        truncated = stdout.truncated or stderr.truncated
        return {"stdout": stdout.text(), "stderr": stderr.text(), "truncated": truncated}

    def close(self) -> None:
        """Close all descriptors; the process must have ended."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._control)
        self._control.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
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
            self._handle_message(message)
        elif message == READY:
            self.ready.set_result(None)
        elif message.startswith(FAILED):
            self.ready.set_exception(RuntimeError(message[1:].decode(errors="replace")))

    def _handle_message(self, message: bytes) -> None:
        if message.startswith(STARTED):
            _resolve(self._started, None)
            message = message[1:]
        if len(message) == 2 and message.startswith(DONE):
            _resolve(self._done, message[1])
        elif message:  # written by the code
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

    def _drain_pipe(self, pipe: int) -> None:
        """Read the bytes that are in the pipe now. A child that has reported DONE has written all its output."""
        for _ in range(64):  # bounded: a thread that prints forever must not block the event loop
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
# SEQPACKET keeps message boundaries and reports the end of the peer; on macOS, which lacks it, the fork server polls
# its parent instead
_PACKETS: Final = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM


class ForkServerLink:
    """The fork server and the socket to it. If the fork server dies after its start, this process ends."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        self.facts: asyncio.Future[dict[str, Any]] = loop.create_future()  # the fork server's report when it is up
        self._start_fault = "the fork server ended before it was up"
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
        loop.add_reader(self._socket, self._receive)

    def fork(self, child: RunningChild) -> None:
        """Have the fork server fork a child into its slot; the child's `ready` and `ended` report the outcome."""
        self._children[child.slot] = child
        self._post({"do": "fork", "slot": child.slot}, child)

    def signal(self, child: RunningChild, number: int) -> None:
        """Send a signal to a child, unless it has ended."""
        self._post({"do": "signal", "slot": child.slot, "signal": number})

    def limit_threads(self, child: RunningChild, number: int) -> None:
        """Set the child's soft RLIMIT_NPROC, unless it has ended."""
        self._post({"do": "limit", "slot": child.slot, "threads": number})

    @property
    def is_forking(self) -> bool:
        """True until the fork server has reported the process of each child."""
        return any(child.pid is None for child in self._children.values())

    def orphans(self) -> set[int]:
        """List the code's orphaned processes, which the fork server has adopted.

        While `is_forking`, the list may contain new children.
        """
        pid = self._process.pid
        try:
            listed = Path(f"/proc/{pid}/task/{pid}/children").read_bytes().split()
        except OSError:
            return set()
        return {int(number) for number in listed} - {child.pid for child in self._children.values()}

    def _post(self, message: Mapping[str, Any], child: RunningChild | None = None) -> None:
        self._unsent.append((json.dumps(message).encode(), child))
        self._flush()

    def _flush(self) -> None:
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
                    self._fail(child.slot, f"the fork server can't be reached: {e}")
            self._unsent.popleft()
            if child is not None:
                child.close_child_descriptors()
        if self._socket.fileno() >= 0:
            loop.remove_writer(self._socket)

    async def close(self) -> None:
        """Stop the fork server, which kills its children."""
        asyncio.get_running_loop().remove_reader(self._socket)
        asyncio.get_running_loop().remove_writer(self._socket)
        self._socket.close()
        try:
            await asyncio.to_thread(self._process.wait, 2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self) -> None:
        while True:
            try:
                message = self._socket.recv(_MAX_MESSAGE)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                asyncio.get_running_loop().remove_reader(self._socket)
                self._on_fork_server_death()
                return
            self._handle_event(json.loads(message))

    def _handle_event(self, event: dict[str, Any]) -> None:
        if event["is"] == "up":
            self.facts.set_result(event)
        elif event["is"] == "broken":
            self._start_fault = event["reason"]
        elif event["is"] == "forked":
            self._children[event["slot"]].on_forked(event["pid"], event["user"])
        elif event["is"] == "failed":
            self._fail(event["slot"], event["reason"])
        elif event["is"] == "ended":
            child = self._children.pop(event["slot"])
            if not child.ready.done():
                reason = f"the child ended with exit code {event['exit_code']} before it was ready"
                child.ready.set_exception(RuntimeError(reason))
            child.ended.set_result(event["exit_code"])

    def _fail(self, slot: int, reason: str) -> None:
        child = self._children.pop(slot)
        child.ready.set_exception(RuntimeError(reason))
        child.ended.set_result(-1)

    def _on_fork_server_death(self) -> None:
        """Kill the children and end this process, so that the executor starts both processes again."""
        if not self.facts.done():
            self.facts.set_exception(RuntimeError(self._start_fault))
            return
        for child in self._children.values():
            if child.pid is not None:
                with contextlib.suppress(OSError):
                    os.kill(child.pid, signal.SIGKILL)
        os._exit(1)
