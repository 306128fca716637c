"""The sandbox's processes: the supervisor, the fork server, and the confined children that run code.

These modules import only the standard library and each other. Where model-written code runs, nothing else of
strands_rollout is loaded, except the `__init__` modules of the enclosing packages.

This module defines the command that starts a process, a child's control messages, and the frame of a JSON message. A
frame is a length of four bytes (big-endian), then the JSON. The JSON's strings may contain lone surrogates.
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
# a child's messages on its control socket; `fork_server.py` describes them
READY: Final = b"R"
FAILED: Final = b"E"
STARTED: Final = b"S"
DONE: Final = b"D"


def frame(message: object) -> bytes:
    """Encode one message as JSON, in a frame."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


class FrameReader:
    """Reader of framed JSON messages from a blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()

    def next(self) -> Any:  # noqa: ANN401 - JSON
        """Read the next message; return None at the end of the stream."""
        head = self._read(LENGTH.size)
        body = self._read(LENGTH.unpack(head)[0]) if head is not None else None
        return None if body is None else json.loads(body)

    def _read(self, size: int) -> bytes | None:
        while len(self._received) < size:
            chunk = self._connection.recv(_CHUNK_BYTES)
            if not chunk:
                return None
            self._received += chunk
        result = bytes(self._received[:size])
        del self._received[:size]
        return result


_PACKAGE_FOLDER: Final = str(Path(__file__).resolve().parents[3])


def python_command(module: str, link: int, settings: Mapping[str, Any]) -> list[str]:
    """Return a command that runs a module's `main()` without the package's folder in `sys.path`.

    Args:
        module: Dotted path of the module.
        link: Descriptor of a socket that the process inherits; the process's first command-line argument.
        settings: The process's second command-line argument, passed as JSON.
    """
    start = f"import sys; sys.path.append({_PACKAGE_FOLDER!r}); from {module} import main; sys.path.pop(); main()"
    return [sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", start, str(link), json.dumps(settings)]
