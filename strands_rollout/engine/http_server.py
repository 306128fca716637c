"""SGLang's HTTP endpoints (0.5.23) over aiohttp: paths, status codes and bodies."""

import asyncio
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import aclosing
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from strands_rollout.engine.engine import Engine, EngineCrashedError
from strands_rollout.engine.generation import GenerationOutput, generate_response
from strands_rollout.engine.requests import ContractError, RequestRefusedError, SchemaError, read_generate_call
from strands_rollout.engine.scheduler import Scheduler
from strands_rollout.errors import ConfigError
from strands_rollout.files.json_codec import Json

T = TypeVar("T")
_ENGINE: web.AppKey[Engine] = web.AppKey("engine")
_ROUTES = web.RouteTableDef()
_MAX_BODY_BYTES = 64 * 2**20
# Smaller bodies take milliseconds to parse and encode, so they need no thread.
_INLINE_BYTES = 16_384
_THREAD_SLOTS = threading.Semaphore(4)
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")
_PAUSE_MODES = ("abort", "retract", "in_place")
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
_NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)


def engine_app(engine: Engine, host: str = "127.0.0.1") -> web.Application:
    """Return the web application that serves `engine` on the address `host`; the caller starts and stops the engine."""
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors_as_json, _refuse_foreign_pages(host)])
    app[_ENGINE] = engine
    app.add_routes(_ROUTES)
    return app


def _refuse_foreign_pages(host: str) -> Middleware:
    """Return middleware that refuses browser requests from pages of another site.

    Requests from pages of another origin are always refused. If `host` is a loopback address, the Host header must name
    this machine: otherwise another site could point its own name here (DNS rebinding). The port may differ, as behind a
    tunnel. If `host` is another address, programs may use any name of the server. Browsers must use the server's
    address: another site could point its own name at the server.
    """
    is_local = host in _LOCAL_NAMES or (_is_address(host) and ip_address(host).is_loopback)
    names = {*_LOCAL_NAMES, host.lower(), f"[{host.lower()}]"}

    @web.middleware
    async def refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
        hosts, origin = request.headers.getall("Host", []), request.headers.get("Origin")
        name = re.sub(r":\d*$", "", hosts[0]).lower() if len(hosts) == 1 else ""
        is_browser = origin is not None or "Sec-Fetch-Site" in request.headers
        if name not in names and (is_local or (is_browser and not _is_address(name.strip("[]")))):
            reason = f"the Host header {hosts!r:.200} does not name this server; use its address, or localhost"
            raise web.HTTPForbidden(reason="Forbidden", text=reason)
        is_foreign = origin is not None and re.sub("^https?://", "", origin) != hosts[0]
        if is_foreign or request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            reason = f"requests from pages of another origin ({origin!r:.200}) are refused"
            raise web.HTTPForbidden(reason="Forbidden", text=reason)
        return await handler(request)

    return refuse


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn exceptions into JSON responses: refusals with SGLang's bodies, aiohttp's HTTP errors with FastAPI's."""
    try:
        return await handler(request)
    except RequestRefusedError as e:
        return _json(_refusal_body(e), status=400)
    except EngineCrashedError as e:
        return _json({"error": {"message": str(e)}}, status=500)
    except web.HTTPForbidden as e:
        return _json({"detail": e.text}, status=e.status)
    except web.HTTPException as e:
        return _json({"detail": e.reason}, status=e.status)


def _refusal_body(error: RequestRefusedError) -> dict[str, object]:
    """Return the body of a refusal; as in SGLang, its form depends on the error's class."""
    message = str(error)
    if isinstance(error, SchemaError):
        return {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}
    return {"error": message if isinstance(error, ContractError) else {"message": message}}


def _json(body: object, *, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


async def _read_json(request: web.Request) -> Json:
    if request.content_type != "application/json":
        raise SchemaError(f"1 validation error: the content type must be application/json, got {request.content_type}")
    try:
        return await _run_off_loop(request, orjson.loads, await request.read())
    except orjson.JSONDecodeError as e:
        raise SchemaError(f"1 validation error: JSON decode error: {e}") from e


async def _read_object(request: web.Request) -> dict[str, Any]:
    body = await _read_json(request)
    if not isinstance(body, dict):
        raise SchemaError(f"1 validation error: the body must be a JSON object, got {type(body).__name__}")
    return body


async def _run_off_loop(request: web.Request, work: Callable[..., T], *args: object) -> T:
    if len(await request.read()) < _INLINE_BYTES:
        return work(*args)
    future: Future[T] = Future()

    def run() -> None:
        with _THREAD_SLOTS:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work(*args))
            except BaseException as e:  # raised again in the request's handler
                future.set_exception(e)

    # Start a daemon, unlike asyncio's threads, so that unfinished work doesn't delay the exit of the process.
    threading.Thread(target=run, name="engine-request", daemon=True).start()
    return await asyncio.wrap_future(future)


async def _start_events(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def _send_event(response: web.StreamResponse, event: object | None) -> None:
    await response.write(b"data: " + (b"[DONE]" if event is None else orjson.dumps(event)) + b"\n\n")


@_ROUTES.post("/generate")
@_ROUTES.put("/generate")
async def _generate(request: web.Request) -> web.StreamResponse:
    started = time.perf_counter()
    engine, body = request.app[_ENGINE], await _read_object(request)
    streams = body.get("stream") is True
    try:
        calls, is_list = await _run_off_loop(request, read_generate_call, body, engine.limits, engine.codec.encode)
    except RequestRefusedError as e:
        if not streams or isinstance(e, SchemaError):
            raise
        # SGLang would have sent status 200 already, so the error is sent as an event.
        response = await _start_events(request)
        error = {"message": str(e), "type": "invalid_request_error", "code": 400, "retryable": False}
        await _send_event(response, {"error": error})
        await _send_event(response, None)
        return response

    def answer(output: GenerationOutput, *, is_first: bool = True) -> dict[str, Any]:
        now = time.time() if is_first else None
        return generate_response(output, engine.codec, latency_s=time.perf_counter() - started, now=now)

    if streams:
        response = await _start_events(request)
        is_first = True
        async with aclosing(engine.stream(calls[0])) as outputs:
            async for output in outputs:
                await _send_event(response, answer(output, is_first=is_first))
                is_first = False
        await _send_event(response, None)
        return response
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate(call)) for call in calls]
    except* (RequestRefusedError, EngineCrashedError) as e:
        raise e.exceptions[0] from None
    answers = []
    for task in tasks:
        answers.append(answer(task.result()))
        await asyncio.sleep(0)  # decoding a thousand answers at once would block the loop
    return _json(answers if is_list else answers[0])


@_ROUTES.get("/health")
@_ROUTES.get("/health_generate")
@_ROUTES.get("/ping")
@_ROUTES.get("/ready")
async def _health(request: web.Request) -> web.Response:
    engine = request.app[_ENGINE]
    is_healthy = engine.worker.is_alive() and not (request.path == "/ready" and engine.is_paused)
    return web.Response(status=200 if is_healthy else 503)


@_ROUTES.get("/model_info")
@_ROUTES.get("/get_model_info")
async def _model_info(request: web.Request) -> web.Response:
    engine = request.app[_ENGINE]
    info = {
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
    return _json(info)


@_ROUTES.get("/server_info")
@_ROUTES.get("/get_server_info")
async def _server_info(request: web.Request) -> web.Response:
    engine = request.app[_ENGINE]
    settings, limits = engine.settings, engine.limits
    running, waiting = engine.counts()
    info = {
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
    return _json(info)


@_ROUTES.get("/v1/loads")
async def _loads(request: web.Request) -> web.Response:
    engine = request.app[_ENGINE]
    running, waiting = engine.counts()
    load = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "max_running_requests": engine.settings.max_running_requests,
    }
    return _json({"timestamp": datetime.now(UTC).isoformat(), "loads": [load]})


@_ROUTES.get("/flush_cache")
@_ROUTES.post("/flush_cache")
async def _flush_cache(request: web.Request) -> web.Response:
    if await request.app[_ENGINE].worker.call(Scheduler.flush):
        return web.Response(text=_FLUSHED)
    return web.Response(text="Flush cache failed.\n", status=400)


@_ROUTES.post("/abort_request")
async def _abort_request(request: web.Request) -> web.Response:
    body = await _read_object(request)
    rid, abort_all = body.get("rid") or "", body.get("abort_all", False)
    if not isinstance(rid, str) or not isinstance(abort_all, bool):
        raise SchemaError(f"1 validation error: expected {{rid: string, abort_all: boolean}}, got {body!r:.500}")
    if rid or abort_all:
        request.app[_ENGINE].abort(None if abort_all else rid)
    return web.Response()


@_ROUTES.post("/pause_generation")
async def _pause_generation(request: web.Request) -> web.Response:
    mode = (await _read_object(request)).get("mode", "abort")
    if mode not in _PAUSE_MODES:
        raise SchemaError(f"1 validation error: Input should be 'abort', 'retract' or 'in_place', got {mode!r:.200}")
    await request.app[_ENGINE].pause(mode)
    return _json({"message": "Generation paused successfully.", "status": "ok"})


@_ROUTES.post("/continue_generation")
async def _continue_generation(request: web.Request) -> web.Response:
    await _read_object(request)
    await request.app[_ENGINE].resume()
    return _json({"message": "Generation continued successfully.", "status": "ok"})


@_ROUTES.post("/update_weights_from_disk")
async def _update_weights_from_disk(request: web.Request) -> web.Response:
    engine, body = request.app[_ENGINE], await _read_object(request)
    model_path, version = body.get("model_path"), body.get("weight_version")
    if not isinstance(model_path, str) or not isinstance(version, str | None):
        expected = "{model_path: string, weight_version: string}"
        raise SchemaError(f"1 validation error: expected {expected}, got {body!r:.500}")
    if body.get("abort_all_requests"):
        engine.abort(None)
    try:
        success = await engine.update_weights(Path(model_path), version, flush=body.get("flush_cache", True))
        message = "Succeeded to update model weights." if success else _NOT_FLUSHED
    except ConfigError as e:
        success, message = False, str(e)
    if success and version is not None:
        message += f" Weight version updated to {version}."
    answer = {"success": success, "message": message, "num_paused_requests": 0}
    return _json(answer, status=200 if success else 400)


@_ROUTES.post("/update_weight_version")
async def _update_weight_version(request: web.Request) -> web.Response:
    engine, body = request.app[_ENGINE], await _read_object(request)
    version = body.get("new_version")
    if not isinstance(version, str):
        raise SchemaError(f"1 validation error: expected {{new_version: string}}, got {body!r:.500}")
    if body.get("abort_all_requests", True):
        engine.abort(None)
    await engine.rename_weights(version)
    return _json({"success": True, "message": f"Weight version updated to {version}", "new_version": version})


@_ROUTES.get("/v1/models")
@_ROUTES.get("/v1/models/{model:.+}")
async def _models(request: web.Request) -> web.Response:
    engine, name = request.app[_ENGINE], request.match_info.get("model")
    card = {
        "id": engine.served_model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sglang",
        "root": engine.served_model_name,
        "parent": None,
        "max_model_len": engine.limits.context_length,
    }
    if name is None:
        return _json({"object": "list", "data": [card]})
    if name == engine.served_model_name:
        return _json(card)
    error = {"type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    return _json({"error": {"message": f"The model '{name}' does not exist", **error}}, status=404)
