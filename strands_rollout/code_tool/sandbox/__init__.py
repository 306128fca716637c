"""The sandbox's own processes: supervisor, fork server and the confined children that run code.

Imports the standard library and itself only: nothing else of the package is loaded where model-written code runs. Here
is how the processes are started, and what they send each other: a message on a stream is a length of four bytes
(big-endian), then JSON. Text may hold lone surrogates.
"""

import json
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

LENGTH: Final = struct.Struct("!I")
_CHUNK_BYTES: Final = 1 << 16
# what a child writes to its control socket; see `fork_server.py`
READY: Final = b"R"
FAILED: Final = b"E"
STARTED: Final = b"S"
DONE: Final = b"D"


def frame(message: object) -> bytes:
    """The bytes of one message."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


class FrameReader:
    """The messages of a blocking socket, in order."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()

    def next(self) -> Any:  # noqa: ANN401 - JSON
        """The next message; None where the stream has ended."""
        head = self._take(LENGTH.size)
        body = self._take(LENGTH.unpack(head)[0]) if head is not None else None
        return None if body is None else json.loads(body)

    def _take(self, size: int) -> bytes | None:
        while len(self._received) < size:
            chunk = self._connection.recv(_CHUNK_BYTES)
            if not chunk:
                return None
            self._received += chunk
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken


_PACKAGE_FOLDER: Final = str(Path(__file__).resolve().parents[3])


def python_command(module: str, link: int, settings: Mapping[str, Any]) -> list[str]:
    """A command that runs a module's `main()`; the package can't be imported by its name any more by then."""
    start = f"import sys; sys.path.append({_PACKAGE_FOLDER!r}); from {module} import main; sys.path.pop(); main()"
    return [sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", start, str(link), json.dumps(settings)]
