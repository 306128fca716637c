"""The HTTP side of the engine: SGLang's native endpoints (0.5.23) over aiohttp.

Knows paths, status codes and bodies. What steers the engine is in control_endpoint.py, chat in chat_endpoint.py.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from aiohttp import web

from strands_rollout.engine.chat_endpoint import add_chat_routes
from strands_rollout.engine.control_endpoint import add_control_routes
from strands_rollout.engine.engine import Engine
from strands_rollout.engine.generate_request import read_generate_call
from strands_rollout.engine.generate_response import generate_response
from strands_rollout.engine.request_errors import RequestRefusedError, SchemaError
from strands_rollout.engine.wire import ENGINE, json_response, read_json, send_event, start_events
from strands_rollout.engine.worker import EngineCrashedError

if TYPE_CHECKING:
    from strands_rollout.engine.generate_request import GenerateCall, GenerateRequest
    from strands_rollout.engine.generation import GenerationOutput

_MAX_BODY_BYTES = 64 * 2**20


def engine_app(engine: Engine) -> web.Application:
    """The web application that serves `engine`, which whoever calls this starts and stops."""
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors_as_json])
    app[ENGINE] = engine
    app.router.add_route("POST", "/generate", _generate)
    app.router.add_route("PUT", "/generate", _generate)
    for path in ("/health", "/health_generate", "/ping"):
        app.router.add_get(path, _health)
    app.router.add_get("/ready", _ready)
    for path in ("/model_info", "/get_model_info"):
        app.router.add_get(path, _model_info)
    for path in ("/server_info", "/get_server_info"):
        app.router.add_get(path, _server_info)
    app.router.add_get("/v1/loads", _loads)
    add_control_routes(app)
    add_chat_routes(app)
    return app


@web.middleware
async def _errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:  # noqa: ANN401
    """Turn refusals into SGLang's bodies; an unknown path or method gets FastAPI's."""
    try:
        response: web.StreamResponse = await handler(request)
    except RequestRefusedError as e:
        is_chat = request.path.startswith("/v1/")
        return json_response(e.chat_body() if is_chat else e.body(), status=400)
    except EngineCrashedError as e:
        return json_response({"error": {"message": str(e)}}, status=500)
    except web.HTTPException as e:
        return json_response({"detail": e.reason}, status=e.status)
    return response


async def _generate(request: web.Request) -> web.StreamResponse:
    started = time.perf_counter()
    engine = request.app[ENGINE]
    body = await read_json(request)
    streams = isinstance(body, dict) and body.get("stream") is True
    try:
        call = read_generate_call(body, engine.limits, engine.codec.encode)
    except RequestRefusedError as e:
        # SGLang has sent its 200 by then.
        if streams and not isinstance(e, SchemaError):
            return await _refused_stream(request, e)
        raise
    if streams:
        return await _generate_stream(request, engine, call.requests[0], started)
    outputs = await _generate_all(engine, call)
    answers = [_answer(engine, output, started) for output in outputs]
    return json_response(answers if call.is_list else answers[0])


async def _generate_all(engine: Engine, call: GenerateCall) -> list[GenerationOutput]:
    if len(call.requests) == 1:
        return [await engine.generate(call.requests[0])]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate(request)) for request in call.requests]
    except* (RequestRefusedError, EngineCrashedError) as e:
        raise e.exceptions[0] from None
    return [task.result() for task in tasks]


async def _generate_stream(
    request: web.Request, engine: Engine, generate_request: GenerateRequest, started: float
) -> web.StreamResponse:
    response = await start_events(request)
    async with aclosing(engine.stream(generate_request)) as outputs:
        is_first = True
        async for output in outputs:
            await send_event(response, _answer(engine, output, started, is_first=is_first))
            is_first = False
    await send_event(response, None)
    return response


async def _refused_stream(request: web.Request, refusal: RequestRefusedError) -> web.StreamResponse:
    response = await start_events(request)
    error = {"message": str(refusal), "type": "invalid_request_error", "code": 400, "retryable": False}
    await send_event(response, {"error": error})
    await send_event(response, None)
    return response


def _answer(engine: Engine, output: GenerationOutput, started: float, *, is_first: bool = True) -> dict[str, Any]:
    now = time.time() if is_first else None
    return generate_response(output, engine.codec, latency_s=time.perf_counter() - started, now=now)


async def _health(request: web.Request) -> web.Response:
    return web.Response(status=200 if request.app[ENGINE].is_alive() else 503)


async def _ready(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    return web.Response(status=200 if engine.is_alive() and not engine.is_paused else 503)


async def _model_info(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    return json_response(
        {
            "model_path": engine.model_path,
            "served_model_name": engine.served_model_name,
            "tokenizer_path": str(engine.settings.model_dir),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": engine.weight_version,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
        }
    )


async def _server_info(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    settings, limits = engine.settings, engine.limits
    running, waiting = engine.counts()
    return json_response(
        {
            "model_path": str(settings.model_dir),
            "tokenizer_path": str(settings.model_dir),
            "served_model_name": engine.served_model_name,
            "device": "cpu",
            "dtype": "float32",
            "context_length": limits.context_length,
            "max_req_input_len": limits.max_prompt_tokens,
            "max_running_requests": settings.max_running_requests,
            "max_total_num_tokens": settings.max_running_requests * limits.context_length,
            "chunked_prefill_size": settings.prefill_chunk_tokens,
            "random_seed": settings.random_seed,
            "internal_states": [{"num_running_reqs": running, "num_waiting_reqs": waiting}],
        }
    )


async def _loads(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    running, waiting = engine.counts()
    load = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "max_running_requests": engine.settings.max_running_requests,
    }
    return json_response({"timestamp": datetime.now(UTC).isoformat(), "loads": [load]})
