"""Messages on a stream: a length of four bytes (big-endian), then JSON. Text may hold lone surrogates."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, Final

LENGTH: Final = struct.Struct("!I")
_CHUNK_BYTES: Final = 1 << 20


def frame(message: Any) -> bytes:  # noqa: ANN401 - JSON
    """The bytes of one message."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> Any:  # noqa: ANN401 - JSON
    """The next message of a blocking socket; None where the stream has ended.

    Raises:
        OSError: The connection is broken, or its time limit is over.
    """
    head = _receive_exactly(connection, LENGTH.size)
    body = _receive_exactly(connection, LENGTH.unpack(head)[0]) if head is not None else None
    return None if body is None else json.loads(body)


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        chunk = connection.recv(min(size - len(received), _CHUNK_BYTES))
        if not chunk:
            return None
        received += chunk
    return bytes(received)
