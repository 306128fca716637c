"""Does SGLang, or a router before it, answer at a URL, with the model, context and tokens that a run expects?"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import httpx
import orjson

from strands_rollout.doctor.finding import Finding, error, good, skipped, warning
from strands_rollout.doctor.server_tokens import check_tokens
from strands_rollout.errors import ConfigError, EngineUnavailableError
from strands_rollout.server_info import ServerInfo, fetch_server_info
from strands_rollout.sglang_connection import create_client, parse_base_url, redacted

LIMIT_S: Final = 15.0
_CONNECT_S: Final = 3.0
_READ_S: Final = 5.0
_OLDEST: Final = (0, 5)
_START: Final = "start it, and check host and port: python -m sglang.launch_server --model-path MODEL --port 30000"
_UNREACHABLE: Final = (httpx.TransportError, aiohttp.ClientError, EngineUnavailableError)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a server should serve.

    Attributes:
        max_context_length: Tokens that it must take; None where it does not matter.
        tokenizer: Folder of the tokenizer that the run uses; None where it is not known.
        tokenizer_is_named: Whether that was named, so that another one at the server is an error.
    """

    max_context_length: int | None = None
    tokenizer: Path | None = None
    tokenizer_is_named: bool = False


def check_server(base_url: str, expected: Expected, limit_s: float = LIMIT_S) -> list[Finding]:
    """What answers at a URL.

    Args:
        base_url: Of a server or router.
        expected: What it should serve.
        limit_s: Seconds for all requests together.
    """
    try:
        shown = redacted(parse_base_url(base_url))
    except ConfigError as e:
        return [error("server", str(e), "name it as http://127.0.0.1:30000")]
    try:
        return asyncio.run(_within(limit_s, base_url, shown, expected))
    except TimeoutError:
        return [error("server", f"{shown} did not answer within {limit_s:g} s", f"look at its log, or {_START}")]


async def _within(limit_s: float, base_url: str, shown: str, expected: Expected) -> list[Finding]:
    async with asyncio.timeout(limit_s):
        return await _ask(base_url, shown, expected, may_be_router=True)


async def _ask(base_url: str, shown: str, expected: Expected, *, may_be_router: bool) -> list[Finding]:
    async with create_client(base_url, connect_timeout=_CONNECT_S, timeout=_READ_S) as http:
        try:
            health = await http.get("/health")
            if health.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                found = f"{shown} is up, but not healthy (503): it is loading, or its scheduler hangs"
                return [error("server", found, "wait until it has loaded, look at its log, or start it again")]
            workers = await _workers(http) if may_be_router else None
            if workers is not None:
                return await _ask_router(workers, shown, expected)
            info = await fetch_server_info(http, url=shown)
            if info.model_path is None:
                return [await _not_sglang(http, health, shown)]
            return [_engine(info, shown), *_context(info, shown, expected), *await check_tokens(http, info, expected)]
        except _UNREACHABLE as e:
            return [error("server", f"nothing answers at {shown}: {e or type(e).__name__}", _START)]


async def _workers(http: httpx.AsyncClient) -> list[dict[str, Any]] | None:
    """A router's workers; None where this is no router."""
    response = await http.get("/workers")
    try:
        answer = orjson.loads(response.content) if response.status_code == httpx.codes.OK else None
    except orjson.JSONDecodeError:
        return None
    workers = answer.get("workers") if isinstance(answer, dict) else None
    return [worker for worker in workers if isinstance(worker, dict)] if isinstance(workers, list) else None


async def _ask_router(workers: list[dict[str, Any]], shown: str, expected: Expected) -> list[Finding]:
    healthy = [worker for worker in workers if worker.get("is_healthy", True) and worker.get("url")]
    if not healthy:
        found = f"the router at {shown} has {len(workers)} workers, none of them healthy"
        return [error("server", found, "start an SGLang server and register it: POST /workers with its url")]
    router = good("server", f"a router at {shown} with {len(healthy)} of {len(workers)} workers healthy")
    url = str(healthy[0]["url"])
    return [
        router,
        *await _ask(url, f"{redacted(parse_base_url(url))} (behind the router)", expected, may_be_router=False),
    ]


async def _not_sglang(http: httpx.AsyncClient, health: httpx.Response, shown: str) -> Finding:
    answer = await http.get("/server_info")
    name = health.headers.get("server", "a server that does not tell its name")
    found = f"{shown} answers, but is not SGLang: {name}; /server_info gives {answer.status_code} and no model"
    return error("server", found, f"check the port; another server may have it. {_START}")


def _engine(info: ServerInfo, shown: str) -> Finding:
    version = info.raw.get("version")
    name = f"SGLang {version}" if version else "a server with SGLang's API, of no told version,"
    found = f"{name} at {shown}: {info.model_path}, weights {info.weight_version}"
    numbers = [int(part) for part in str(version or "").split(".")[:2] if part.isdecimal()]
    if numbers and tuple(numbers) < _OLDEST:
        return warning("server", f"{found}; too old", "pip install 'sglang>=0.5'")
    return good("server", found)


def _context(info: ServerInfo, shown: str, expected: Expected) -> list[Finding]:
    wanted, length = expected.max_context_length, info.context_length
    if wanted is None:
        told = f"{length} tokens" if length else "the server does not tell it"
        return [skipped("server context", f"{told}; no --max-context-length to compare with")]
    if length is None:
        found = f"{shown} does not tell its context length; {wanted} tokens are wanted"
        return [warning("server context", found, f"start it with --context-length {wanted}")]
    if length < wanted:
        found = f"{shown} takes {length} tokens, {wanted} are wanted: longer episodes are cut or refused"
        remedy = f"start it with --context-length {wanted}, or lower slime's --rollout-max-context-len to {length}"
        return [warning("server context", found, remedy)]
    return [good("server context", f"{length} tokens, {wanted} are wanted")]
