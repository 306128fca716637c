"""The supervisor's side of the template: starts it, has it fork children and signal them, hears what became of them."""

from __future__ import annotations

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
from typing import Any, Final

from strands_rollout.sandbox.inside.python_process import python_command
from strands_rollout.sandbox.inside.running_child import RunningChild

_MAX_MESSAGE: Final = 65536
# packets keep their borders and an end is seen; macOS has no such sockets, and the template looks for its parent there
_PACKETS: Final = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM


class TemplateLink:
    """One template process.

    Args:
        settings: For the template, in JSON's types.

    Attributes:
        facts: What the template says of itself; set when it is up. When it ends after that, this process does.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        self.facts: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._children: dict[int, RunningChild] = {}
        self._unsent: deque[tuple[bytes, RunningChild | None]] = deque()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, _PACKETS)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - a fixed command
                python_command("strands_rollout.sandbox.inside.template", theirs.fileno(), settings),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=(theirs.fileno(),),
            )
        self._socket.settimeout(0)
        loop.add_reader(self._socket, self._hear)

    def fork(self, child: RunningChild) -> None:
        """Fork a child into its place; its `ready` and `ended` tell the rest."""
        self._children[child.place] = child
        self._post({"do": "fork", "place": child.place}, child)

    def signal(self, child: RunningChild, number: int) -> None:
        """Send a signal to a child, unless it has ended."""
        self._post({"do": "signal", "place": child.place, "signal": number})

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
                    self._fail(child.place, f"the template can't be reached: {e}")
            self._unsent.popleft()
            if child is not None:
                child.close_childs_ends()
        if self._socket.fileno() >= 0:
            loop.remove_writer(self._socket)

    async def close(self) -> None:
        """End the template, which kills its children."""
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
            child = self._children[news["place"]]
            child.pid, child.user = news["pid"], news["user"]
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
        """The template is gone: end its children, and this process, so that the executor starts both anew."""
        if not self.facts.done():
            self.facts.set_exception(RuntimeError("the template process ended before it was up"))
            return
        for child in self._children.values():
            if child.pid is not None:
                with contextlib.suppress(OSError):
                    os.kill(child.pid, signal.SIGKILL)
        os._exit(1)
