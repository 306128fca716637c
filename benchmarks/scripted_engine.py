"""An engine that answers at once what a script says, as light as a server can be.

Run as a process of its own: `python -m strands_rollout.bench.scripted_engine SCRIPTS... [--core N] [--any-input]`; it
prints its port and ends with its stdin. HTTP/1.1 with content lengths, as all measured clients speak it, and no more.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import orjson

from strands_rollout.bench.answer_bodies import http_answer
from strands_rollout.bench.answer_script import load_scripts
from strands_rollout.bench.processor_cores import pin_to
from strands_rollout.bench.script_book import ScriptBook, UnexpectedRequestError

CONTEXT_LENGTH: Final = 131_072
_INFO: Final = http_answer(
    orjson.dumps(
        {
            "model_path": "scripted",
            "tokenizer_path": "scripted",
            "weight_version": "default",
            "has_image_understanding": False,
            "context_length": CONTEXT_LENGTH,
            "object": "list",
            "data": [{"id": "scripted", "object": "model", "max_model_len": CONTEXT_LENGTH}],
        }
    )
)


class Counters:
    """What crossed the wire.

    Attributes:
        requests: Generations.
        bytes_in: What clients sent, heads included.
        bytes_out: What was sent to them.
        connections: How many were opened.
    """

    def __init__(self) -> None:
        self.requests = self.bytes_in = self.bytes_out = self.connections = 0


class _Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, book: ScriptBook, counters: Counters) -> None:
        self._book, self._counters = book, counters
        self._received = bytearray()
        self._needed = 0
        self._transport: asyncio.Transport
        self._streaming: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._counters.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self._streaming is not None:
            self._streaming.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < self._needed:
            return
        head_end = self._received.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = bytes(self._received[:head_end])
        self._needed = head_end + 4 + _content_length(head)
        if len(self._received) < self._needed:
            return
        body = bytes(self._received[head_end + 4 : self._needed])
        self._counters.bytes_in += self._needed
        del self._received[: self._needed]
        self._needed = 0
        self._answer(head.split(b" ", 2)[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        try:
            if path == b"/generate":
                self._counters.requests += 1
                self._send(self._book.generate(body))
            elif path == b"/v1/chat/completions":
                self._counters.requests += 1
                self._streaming = asyncio.ensure_future(self._stream(self._book.chat(body)))
            elif path == b"/counters":
                self._transport.write(http_answer(orjson.dumps({**vars(self._counters), "cpu_s": time.process_time()})))
            else:
                self._send(_INFO)
        except UnexpectedRequestError as e:
            print(f"refused: {e}", file=sys.stderr, flush=True)
            self._send(http_answer(orjson.dumps({"error": {"message": str(e)}}), status=404))

    def _send(self, answer: bytes) -> None:
        self._counters.bytes_out += len(answer)
        self._transport.write(answer)

    async def _stream(self, pieces: Sequence[bytes]) -> None:
        """Each piece on its own, as tokens come; the others' turn comes between them."""
        for piece in pieces:
            self._send(piece)
            await asyncio.sleep(0)


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def _serve(book: ScriptBook) -> None:
    loop = asyncio.get_running_loop()
    counters = Counters()
    server = await loop.create_server(lambda: _Connection(book, counters), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await loop.run_in_executor(None, sys.stdin.read)  # until whoever started it is gone


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scripts", type=Path, nargs="+")
    parser.add_argument("--core", type=int)
    parser.add_argument("--any-input", action="store_true")
    options = parser.parse_args()
    pin_to(options.core)
    book = ScriptBook(
        [script for path in options.scripts for script in load_scripts(path)], exact=not options.any_input
    )
    gc.freeze()
    asyncio.run(_serve(book))


if __name__ == "__main__":
    main()
