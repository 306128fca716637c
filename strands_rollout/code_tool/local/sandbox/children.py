"""One child as its supervisor sees it: what it prints, whether it is ready, when it has ended.

Knows descriptors and the child's side of the control socket; nothing of time limits or queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Any, Final

from strands_rollout.sandbox.capped_output import CappedOutput
from strands_rollout.sandbox.inside.child import DONE, FAILED, READY, STARTED
from strands_rollout.sandbox.inside.frames import frame

_CHUNK_BYTES: Final = 65536
_DRAIN_S: Final = 0.5  # a process that escaped in a weaker mode may hold the pipes open for ever


class RunningChild:
    """A process that runs one piece of code, or a session's pieces one after the other.

    Args:
        place: The number of its place.
        max_output_chars: Characters kept of each stream.

    Attributes:
        ready: Done when it waits for code; an exception says why it never will.
        ended: Done with its exit code.
        pid: Its process, once it is known.
        user: The user that it is, where that is not ours.
        is_broken: Whether the code has written to the control socket, which nothing can be believed from then on.
    """

    def __init__(self, place: int, max_output_chars: int) -> None:
        loop = asyncio.get_running_loop()
        self.place = place
        self.pid: int | None = None
        self.user: int | None = None
        self.is_broken = False
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        self._max_output_chars = max_output_chars
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

    async def start(self, code: str, *, session: bool) -> None:
        """Send code to a child that is ready; returns when it starts.

        Raises:
            RuntimeError: The process ended before.
        """
        loop = asyncio.get_running_loop()
        self._started, self._done = loop.create_future(), loop.create_future()
        self._new_outputs()
        with contextlib.suppress(OSError):  # it has been killed: `ended` tells
            await loop.sock_sendall(self._control, frame({"code": code, "session": session}))
        await asyncio.wait((self._started, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if not self._started.done():
            self._read_control()  # what it wrote last may not have been looked at yet
        if not self._started.done():
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
        return {
            "stdout": stdout.text(),
            "stderr": stderr.text(),
            "truncated": stdout.truncated or stderr.truncated,
        }

    def close(self) -> None:
        """Close what is open; the process must have ended."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._control)
        self._control.close()
        for pipe in list(self._open):
            self._close_output(pipe)

    def _new_outputs(self) -> None:
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
            asyncio.get_running_loop().remove_reader(self._control)

    def _read_output(self, pipe: int) -> None:
        try:
            chunk = os.read(pipe, _CHUNK_BYTES)
        except BlockingIOError:
            return
        self._outputs[pipe].feed(chunk, final=not chunk)
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
