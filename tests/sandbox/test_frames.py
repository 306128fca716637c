"""Frames on a socket are read as they were written, however the stream was cut."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from strands_rollout.sandbox.inside.frames import FrameReader, frame

MESSAGES: list[Any] = [{"id": 1}, "\ud800", [], {"code": "x" * 200_000}, None, {"id": 2}]


def read_all(pieces: list[bytes]) -> list[Any]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = FrameReader(ours)

        def write() -> None:
            for piece in pieces:
                theirs.sendall(piece)
            theirs.shutdown(socket.SHUT_WR)

        writing = threading.Thread(target=write)
        writing.start()
        found = [reader.next() for _ in range(len(MESSAGES) + 1)]
        writing.join()
    return found


@pytest.mark.parametrize("size", [1, 3, 4, 5, 70_000, 10**7])
def test_messages_come_whole_and_in_order_however_they_are_cut(size: int) -> None:
    messages = [message for message in MESSAGES if size > 5 or message != MESSAGES[3]]
    stream = b"".join(map(frame, messages))
    found = read_all([stream[start : start + size] for start in range(0, len(stream), size)])
    assert found[: len(messages)] == messages
    assert found[len(messages) :] == [None] * (len(MESSAGES) + 1 - len(messages))


@pytest.mark.parametrize("kept", [1, 4, 6])
def test_a_stream_that_ends_in_a_message_has_ended(kept: int) -> None:
    assert read_all([frame({"id": 1}), frame({"id": 2})[:kept]])[:2] == [{"id": 1}, None]
