"""Messages on a stream: a length of four bytes (big-endian), then JSON. Text may hold lone surrogates."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, Final

LENGTH: Final = struct.Struct("!I")
_CHUNK_BYTES: Final = 1 << 16


def frame(message: Any) -> bytes:  # noqa: ANN401 - JSON
    """The bytes of one message."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


class FrameReader:
    """The messages of a blocking socket, in order.

    Args:
        connection: Nobody else reads from it: what comes together is received together.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()

    def next(self) -> Any:  # noqa: ANN401 - JSON
        """The next message; None where the stream has ended.

        Raises:
            OSError: The connection is broken, or its time limit is over.
        """
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
