"""A router and its one worker before a scripted engine, as slime's rollout sees them.

The router forwards `/generate` and lists its `/workers`, and answers 404 to all else, as real ones do. The worker has a
path of its own, takes `/abort_request` there and tells its load. Knows HTTP only.
"""

from __future__ import annotations

import asyncio
import json
from typing import Self

import aiohttp
from aiohttp import web

_DROPPED = frozenset({"content-length", "host", "transfer-encoding"})


class Gateway:
    """The pair; an async context manager.

    Args:
        engine_url: Where generations and aborts are forwarded.

    Attributes:
        host: Of the router, for `args.sglang_router_ip`.
        port: Of the router, for `args.sglang_router_port`.
        in_flight: Generations that the engine has not answered.
        most_in_flight: The largest number of them at one time.
        refused_paths: Everything that was answered with 404.
        refuses_abort_after_s: How long it takes to say so of an abort.
    """

    def __init__(self, engine_url: str) -> None:
        self._engine_url = engine_url
        self.host, self.port = "127.0.0.1", 0
        self.in_flight = self.most_in_flight = 0
        self.refused_paths: list[str] = []
        self.refuses_abort_after_s = 0.0

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/workers", self._workers)
        app.router.add_post("/worker/abort_request", self._abort)
        app.router.add_get("/worker/v1/loads", self._loads)
        app.router.add_route("*", "/{path:.*}", self._refuse)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _generate(self, request: web.Request) -> web.Response:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._forward(request, "/generate")
        except aiohttp.ClientError:
            if request.transport is not None:
                request.transport.close()
            return web.Response(status=502)
        finally:
            self.in_flight -= 1

    async def _workers(self, _request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": f"http://{self.host}:{self.port}/worker"}]})

    async def _abort(self, request: web.Request) -> web.Response:
        return await self._forward(request, "/abort_request")

    async def _loads(self, _request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self.in_flight, "num_waiting_reqs": 0}]})

    async def _refuse(self, request: web.Request) -> web.Response:
        self.refused_paths.append(request.path)
        if request.path == "/abort_request":
            await asyncio.sleep(self.refuses_abort_after_s)
        return web.Response(status=404, text=json.dumps({"error": {"code": "not_found"}}))

    async def _forward(self, request: web.Request, path: str) -> web.Response:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _DROPPED}
        body = await request.read()
        async with self._session.post(f"{self._engine_url}{path}", data=body, headers=headers) as answer:
            content = await answer.read()
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _DROPPED}
            return web.Response(status=answer.status, body=content, headers=kept)
