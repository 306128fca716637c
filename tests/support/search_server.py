"""A retrieval server on a loopback socket that speaks Search-R1's protocol."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

DOCUMENTS = {"contents": '"Alfred Nobel"\nHe was born in Stockholm.'}
Answer = Callable[[dict[str, Any], int], Any]


def found(body: dict[str, Any], _number: int) -> Any:
    return {"result": [[{"document": DOCUMENTS, "score": 1.5}] for _ in body["queries"]]}


@asynccontextmanager
async def retrieval_server(answer: Answer = found) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Serve Search-R1's protocol; yield the endpoint and the bodies received."""
    bodies: list[dict[str, Any]] = []

    async def retrieve(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        result = answer(bodies[-1], len(bodies) - 1)
        if asyncio.iscoroutine(result):
            result = await result
        return result if isinstance(result, web.Response) else web.json_response(result)

    app = web.Application()
    app.router.add_post("/retrieve", retrieve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/retrieve", bodies
    finally:
        await runner.cleanup()
