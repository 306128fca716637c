"""The HTTP side of the engine: SGLang's native endpoints (0.5.23) over aiohttp.

Knows paths, status codes and bodies. The chat endpoints are in chat_endpoint.py.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from strands_rollout.engine.chat_endpoint import add_chat_routes
from strands_rollout.engine.engine import Engine
from strands_rollout.engine.generate_request import read_generate_call
from strands_rollout.engine.generate_response import generate_response
from strands_rollout.engine.request_errors import RequestRefusedError, SchemaError
from strands_rollout.engine.wire import ENGINE, json_response, read_json, send_event, start_events
from strands_rollout.engine.worker import EngineCrashedError
from strands_rollout.errors import ConfigError

if TYPE_CHECKING:
    from strands_rollout.engine.generate_request import GenerateCall, GenerateRequest
    from strands_rollout.engine.generation import GenerationOutput

_MAX_BODY_BYTES = 64 * 2**20
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
_NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
_PAUSE_MODES = ("abort", "retract", "in_place")


def engine_app(engine: Engine) -> web.Application:
    """The web application that serves `engine`, which whoever calls this starts and stops."""
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors_as_json])
    app[ENGINE] = engine
    app.router.add_route("POST", "/generate", _generate)
    app.router.add_route("PUT", "/generate", _generate)
    for path in ("/health", "/health_generate", "/ready", "/ping"):
        app.router.add_get(path, _health)
    for path in ("/model_info", "/get_model_info"):
        app.router.add_get(path, _model_info)
    for path in ("/server_info", "/get_server_info"):
        app.router.add_get(path, _server_info)
    app.router.add_get("/v1/loads", _loads)
    app.router.add_get("/flush_cache", _flush_cache)
    app.router.add_post("/flush_cache", _flush_cache)
    app.router.add_post("/abort_request", _abort_request)
    app.router.add_post("/pause_generation", _pause_generation)
    app.router.add_post("/continue_generation", _continue_generation)
    app.router.add_post("/update_weights_from_disk", _update_weights_from_disk)
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
        async for output in outputs:
            await send_event(response, _answer(engine, output, started))
    await send_event(response, None)
    return response


async def _refused_stream(request: web.Request, refusal: RequestRefusedError) -> web.StreamResponse:
    response = await start_events(request)
    error = {"message": str(refusal), "type": "invalid_request_error", "code": 400, "retryable": False}
    await send_event(response, {"error": error})
    await send_event(response, None)
    return response


def _answer(engine: Engine, output: GenerationOutput, started: float) -> dict[str, Any]:
    return generate_response(output, engine.codec, latency_s=time.perf_counter() - started, now=time.time())


async def _health(request: web.Request) -> web.Response:
    return web.Response(status=200 if request.app[ENGINE].is_alive() else 503)


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
    running, waiting = request.app[ENGINE].counts()
    load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting}
    return json_response({"loads": [load]})


async def _flush_cache(request: web.Request) -> web.Response:
    if await request.app[ENGINE].flush():
        return web.Response(text=_FLUSHED)
    return web.Response(text="Flush cache failed.\n", status=400)


async def _abort_request(request: web.Request) -> web.Response:
    body = await _object(request)
    rid, abort_all = body.get("rid") or "", body.get("abort_all", False)
    if not isinstance(rid, str) or not isinstance(abort_all, bool):
        raise SchemaError(f"1 validation error: expected {{rid: string, abort_all: boolean}}, got {body}")
    if rid or abort_all:
        request.app[ENGINE].abort(None if abort_all else rid)
    return web.Response()


async def _pause_generation(request: web.Request) -> web.Response:
    body = await _object(request)
    mode = body.get("mode", "abort")
    if mode not in _PAUSE_MODES:
        raise SchemaError(f"1 validation error: Input should be 'abort', 'retract' or 'in_place', got {mode!r}")
    await request.app[ENGINE].pause(mode)
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


async def _continue_generation(request: web.Request) -> web.Response:
    await request.app[ENGINE].resume()
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


async def _update_weights_from_disk(request: web.Request) -> web.Response:
    engine, body = request.app[ENGINE], await _object(request)
    model_path, version = body.get("model_path"), body.get("weight_version")
    if not isinstance(model_path, str) or not isinstance(version, str | None):
        raise SchemaError(f"1 validation error: expected {{model_path: string, weight_version: string}}, got {body}")
    if body.get("abort_all_requests"):
        engine.abort(None)
    try:
        flushed = await engine.update_weights(Path(model_path), version, flush=body.get("flush_cache", True))
    except ConfigError as e:
        return _update_answer(success=False, message=str(e))
    if not flushed:
        return _update_answer(success=False, message=_NOT_FLUSHED)
    message = "Succeeded to update model weights."
    if version is not None:
        message += f" Weight version updated to {version}."
    return _update_answer(success=True, message=message)


def _update_answer(*, success: bool, message: str) -> web.Response:
    body = {"success": success, "message": message, "num_paused_requests": 0}
    return json_response(body, status=200 if success else 400)


async def _object(request: web.Request) -> dict[str, Any]:
    body = await read_json(request)
    if not isinstance(body, dict):
        raise SchemaError(f"1 validation error: the body must be a JSON object, got {type(body).__name__}")
    return body
