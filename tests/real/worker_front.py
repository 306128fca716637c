"""A proxy between router and worker that records requests and simulates faults.

It sees requests as the router changed them.
"""

import asyncio
import socket
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import orjson
from aiohttp import web

ROUTING_HEADER = "X-SMG-Routing-Key"
_HOP_HEADERS = frozenset(
    {"connection", "content-encoding", "content-length", "host", "keep-alive", "transfer-encoding"}
)


@dataclass(slots=True)
class Passage:
    """A recorded `/generate` request and the `meta_info` of its answer, empty if there was none."""

    key: str
    body: dict[str, Any]
    meta_info: dict[str, Any]


class Listener(socket.socket):
    """A listening socket that records the connections that it accepted."""

    def __init__(self, port: int) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_STREAM)
        self.accepted: list[socket.socket] = []
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind(("127.0.0.1", port))
        self.port = self.getsockname()[1]

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        self.accepted.append(connection)
        return connection, address


class WorkerFront:
    """The proxy; an async context manager that listens inside its block.

    Attributes:
        passages: Requests in the order of arrival.
        status: If set, the proxy answers `/generate` itself, with this status; None forwards requests to the worker.
        base_url: URL of the proxy, which stays the same when it is closed and opened.
        worker_url: URL of the worker behind it.
    """

    def __init__(self, worker_url: str) -> None:
        self.worker_url = worker_url
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self._port = 0
        self._busy: set[asyncio.Transport] = set()
        self.passages: list[Passage] = []
        self.status: int | None = None
        self.base_url = ""

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
        if self._session is not None:
            await self._session.close()

    async def open(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._forward)
        # 0 would mean no timeout
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        self._listener = Listener(self._port)
        await web.SockSite(self._runner, self._listener, backlog=1024).start()
        self._port = self._listener.port
        self.base_url = f"http://127.0.0.1:{self._port}"

    async def close(self) -> None:
        """Cut all connections and refuse new ones, as if the worker's process had died."""
        if self._runner is not None:
            for transport in self._busy:  # aiohttp would finish requests in flight
                transport.abort()
            await self._runner.cleanup()
            self._runner = None
            await asyncio.sleep(0)
            # asyncio leaves sockets open that it accepted just now; their clients would wait for ever
            assert self._listener is not None
            for connection in self._listener.accepted:
                connection.close()

    async def _forward(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        self._busy.add(request.transport)
        try:
            return await self._passed_on(request)
        finally:
            self._busy.discard(request.transport)

    async def _passed_on(self, request: web.Request) -> web.Response:
        body = await request.read()
        passage = None
        if request.path == "/generate":
            passage = Passage(request.headers.get(ROUTING_HEADER, ""), orjson.loads(body), {})
            self.passages.append(passage)
            if self.status is not None:
                return web.Response(status=self.status, text="out of order")
        answer = await self._send(request, body)
        if passage is not None and answer.status == 200 and isinstance(answer.body, bytes):
            passage.meta_info = orjson.loads(answer.body)["meta_info"]
        return answer

    async def _send(self, request: web.Request, body: bytes) -> web.Response:
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS}
        url = f"{self.worker_url}{request.rel_url}"
        async with self._session.request(request.method, url, data=body or None, headers=headers) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_HEADERS}
            return web.Response(status=answer.status, body=await answer.read(), headers=kept)
