"""JSON bodies and server-sent events, in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from strands_rollout.engine.request_errors import SchemaError

if TYPE_CHECKING:
    from strands_rollout.engine.engine import Engine

ENGINE: web.AppKey[Engine] = web.AppKey("engine")


async def read_json(request: web.Request) -> object:
    """The request's body.

    Raises:
        SchemaError: It is not JSON, or is not announced as such.
    """
    if request.content_type != "application/json":
        raise SchemaError(f"1 validation error: the content type must be application/json, got {request.content_type}")
    try:
        body: object = orjson.loads(await request.read())
    except orjson.JSONDecodeError as e:
        raise SchemaError(f"1 validation error: JSON decode error: {e}") from e
    return body


def json_response(body: object, *, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


async def start_events(request: web.Request) -> web.StreamResponse:
    """Begin an answer of server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def send_event(response: web.StreamResponse, event: object | None) -> None:
    """Send one JSON event; None is the end of the stream."""
    await response.write(b"data: " + (b"[DONE]" if event is None else orjson.dumps(event)) + b"\n\n")
