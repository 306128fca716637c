"""The endpoints that steer the engine: aborts, pauses, weights and the cache, as SGLang's (0.5.23)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohttp import web

from strands_rollout.engine.request_errors import SchemaError
from strands_rollout.engine.wire import ENGINE, json_response, read_json
from strands_rollout.errors import ConfigError

_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
_NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
_PAUSE_MODES = ("abort", "retract", "in_place")


def add_control_routes(app: web.Application) -> None:
    """Serve /flush_cache, /abort_request, /pause_generation, /continue_generation and the updates of weights."""
    app.router.add_get("/flush_cache", _flush_cache)
    app.router.add_post("/flush_cache", _flush_cache)
    app.router.add_post("/abort_request", _abort_request)
    app.router.add_post("/pause_generation", _pause_generation)
    app.router.add_post("/continue_generation", _continue_generation)
    app.router.add_post("/update_weights_from_disk", _update_weights_from_disk)
    app.router.add_post("/update_weight_version", _update_weight_version)


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
    await _object(request)
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


async def _update_weight_version(request: web.Request) -> web.Response:
    engine, body = request.app[ENGINE], await _object(request)
    version = body.get("new_version")
    if not isinstance(version, str):
        raise SchemaError(f"1 validation error: expected {{new_version: string}}, got {body}")
    if body.get("abort_all_requests", True):
        engine.abort(None)
    await engine.rename_weights(version)
    answer = {"success": True, "message": f"Weight version updated to {version}", "new_version": version}
    return json_response(answer)


def _update_answer(*, success: bool, message: str) -> web.Response:
    body = {"success": success, "message": message, "num_paused_requests": 0}
    return json_response(body, status=200 if success else 400)


async def _object(request: web.Request) -> dict[str, Any]:
    body = await read_json(request)
    if not isinstance(body, dict):
        raise SchemaError(f"1 validation error: the body must be a JSON object, got {type(body).__name__}")
    return body
