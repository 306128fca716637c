"""An address whose server may die and be replaced, as a machine's port: bytes go to whoever is behind it now."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Address:
    """A port of 127.0.0.1; an async context manager, in which it is there.

    Args:
        server_url: Who is behind it.

    Attributes:
        url: Its own.
    """

    def __init__(self, server_url: str) -> None:
        self._server_url: str | None = server_url
        self._listener: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.url = ""

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._listener is not None
        self._listener.close()
        self.move_to(None)
        await self._listener.wait_closed()

    def move_to(self, server_url: str | None) -> None:
        """Cut all connections; new ones go to this server, or nowhere."""
        self._server_url = server_url
        for writer in list(self._open):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            host, _, port = (self._server_url or "").removeprefix("http://").partition(":")
            to_server = await asyncio.open_connection(host, int(port or 0))
        except OSError:  # nobody listens there
            writer.transport.abort()
        else:
            self._open.add(to_server[1])
            await asyncio.gather(_pump(reader, to_server[1]), _pump(to_server[0], writer))
            self._open.discard(to_server[1])
        finally:
            self._open.discard(writer)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until one side is gone, and then end the other."""
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:  # cut on either side
        pass
    writer.close()
