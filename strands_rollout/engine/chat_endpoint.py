"""The engine's OpenAI endpoints: models and chat completions, whole or streamed."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from strands_rollout.engine.chat_request import read_chat_request
from strands_rollout.engine.chat_response import ChatChunks, chat_completion
from strands_rollout.engine.wire import ENGINE, json_response, read_json, send_event, start_events

if TYPE_CHECKING:
    from aiohttp import web

    from strands_rollout.engine.engine import Engine


def add_chat_routes(app: web.Application) -> None:
    """Serve /v1/chat/completions and /v1/models."""
    app.router.add_post("/v1/chat/completions", _chat_completions)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/models/{model:.+}", _model)


async def _chat_completions(request: web.Request) -> web.StreamResponse:
    engine = request.app[ENGINE]
    chat = read_chat_request(await read_json(request), engine)
    if not chat.request.stream:
        output = await engine.generate(chat.request)
        return json_response(chat_completion(chat, output, engine.codec))
    chunks = ChatChunks(chat, engine.codec)
    response = await start_events(request)
    await send_event(response, chunks.first())
    async with aclosing(engine.stream(chat.request)) as outputs:
        async for output in outputs:
            for chunk in chunks.next(output):
                await send_event(response, chunk)
    await send_event(response, None)
    return response


async def _models(request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": [_model_card(request.app[ENGINE])]})


async def _model(request: web.Request) -> web.Response:
    engine, name = request.app[ENGINE], request.match_info["model"]
    if name == engine.served_model_name:
        return json_response(_model_card(engine))
    error = {
        "message": f"The model '{name}' does not exist",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return json_response({"error": error}, status=404)


def _model_card(engine: Engine) -> dict[str, Any]:
    return {
        "id": engine.served_model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sglang",
        "root": engine.served_model_name,
        "parent": None,
        "max_model_len": engine.limits.context_length,
    }
