"""Messages between the executor and its supervisor: a length of four bytes (big-endian), then JSON."""

from __future__ import annotations

import json
import struct
from typing import Any, Final

LENGTH: Final = struct.Struct("!I")


def frame(message: Any) -> bytes:  # noqa: ANN401 - JSON
    """The bytes of one message; text may hold lone surrogates."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body
