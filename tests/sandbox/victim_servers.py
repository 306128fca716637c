"""Servers on the loopback interface and on unix sockets: nothing that a sandbox does may reach them."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from attack_targets import Stage, Target


class Server(Target):
    """Listens, and remembers whether anybody came.

    Args:
        stage: Where.
        family: "tcp", "udp", "path" (a unix socket with a file that all may write to) or "abstract".
        kind: "stream" or "dgram".
    """

    def __init__(self, stage: Stage, family: str, kind: str = "stream") -> None:
        super().__init__()
        self._reached = False
        unix = family in ("path", "abstract")
        kind_number = socket.SOCK_DGRAM if kind == "dgram" else socket.SOCK_STREAM
        self._socket = socket.socket(socket.AF_UNIX if unix else socket.AF_INET, kind_number)
        path = str(stage.folder / self.name)
        address = {"path": path, "abstract": f"\0{self.name}"}.get(family, ("127.0.0.1", 0))
        self._socket.bind(address)
        if family == "path":
            Path(path).chmod(0o777)
        if kind == "stream":
            self._socket.listen()
        self._socket.setblocking(False)
        self._kind = kind
        self.facts |= {"address": self._socket.getsockname() if not unix else address}

    def seen(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            if self._kind == "stream":
                self._socket.accept()[0].close()
            else:
                self._socket.recv(100)
            self._reached = True
        return self._reached

    def close(self) -> None:
        self._socket.close()
        if isinstance(self.facts["address"], str) and self.facts["address"].startswith("/"):
            Path(self.facts["address"]).unlink()


class HandleCatcher(Server):
    """A unix socket that was reached only when a descriptor came over it."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, "path", "dgram")

    def seen(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            _, handles, _, _ = socket.recv_fds(self._socket, 100, 4)
            self._reached = self._reached or bool(handles)
            for handle in handles:
                os.close(handle)
        return self._reached


class Caller(Target):
    """Tries to reach a server that the sandbox opens at `port`."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        del stage
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = free.getsockname()
        self.facts |= {"address": self._address}

    def seen(self) -> bool:
        with socket.socket() as client:
            client.settimeout(1)
            return client.connect_ex(self._address) == 0
