"""A loopback proxy before an engine that records what crosses the wire: the token ids of each generation, both ways.

Knows HTTP and the token fields of `/generate`; must not know models, trajectories or samples, since it is the witness
against which they are checked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import web

from strands_rollout.sglang_connection import parse_base_url

ROUTING_HEADER: Final = "X-SMG-Routing-Key"
_MAX_BODY_BYTES: Final = 1 << 28
_HOP_HEADERS: Final = frozenset(
    {"connection", "content-encoding", "content-length", "host", "keep-alive", "transfer-encoding"}
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One `/generate` request and its answer, in the order of the requests.

    Attributes:
        input_ids: As the engine received them.
        output_ids: As the engine answered them; None where it gave no generation (an error, a cut connection).
        logprobs: Beside the output ids; empty if none were asked for.
        has_images: Whether the request held images, of which the engine makes more tokens than it was sent.
    """

    input_ids: list[int]
    output_ids: list[int] | None
    logprobs: list[float]
    has_images: bool = False


@dataclass(slots=True)
class WireRecorder:
    """The running proxy.

    Attributes:
        url: Where it listens; use it as the engine's URL.
        episodes: Exchanges by routing key, "" for requests without one.
    """

    url: str
    episodes: dict[str, list[Exchange]] = field(default_factory=dict)


@asynccontextmanager
async def recording(base_url: str) -> AsyncIterator[WireRecorder]:
    """Run a proxy before the engine at `base_url`, on a free port of 127.0.0.1, until the block ends.

    A client that goes away has its request to the engine dropped too, as without the proxy.

    Raises:
        ConfigError: `base_url` is not that of an HTTP server.
    """
    target = parse_base_url(base_url)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=True) as session:
        recorder = WireRecorder("")
        proxy = _Proxy(session, str(target).rstrip("/"), recorder)
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", proxy.forward)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            recorder.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield recorder
        finally:
            await runner.cleanup()


class _Proxy:
    def __init__(self, session: aiohttp.ClientSession, target: str, recorder: WireRecorder) -> None:
        self._session = session
        self._target = target
        self._recorder = recorder

    async def forward(self, request: web.Request) -> web.Response:
        body = await request.read()
        slot = self._opened(request, body)
        try:
            answer = await self._send(request, body)
        except aiohttp.ClientError as e:
            # the engine gave no answer: the client must see that, not a status that the engine never sent
            if request.transport is not None:
                request.transport.close()
            return web.Response(status=502, text=f"{type(e).__name__}: {e}")
        if slot is not None and answer.status == 200:
            episode, index = slot
            episode[index] = _answered(episode[index], answer.body if isinstance(answer.body, bytes) else b"")
        return answer

    async def _send(self, request: web.Request, body: bytes) -> web.Response:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS}
        url = f"{self._target}{request.rel_url}"
        async with self._session.request(
            request.method, url, data=body or None, headers=headers, allow_redirects=False
        ) as answer:
            content = await answer.read()
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_HEADERS}
            return web.Response(status=answer.status, body=content, headers=kept)

    def _opened(self, request: web.Request, body: bytes) -> tuple[list[Exchange], int] | None:
        """The place of a generation in its episode, taken when its request comes; None for anything else."""
        if request.path != "/generate" or request.method != "POST":
            return None
        asked = _object(body)
        episode = self._recorder.episodes.setdefault(request.headers.get(ROUTING_HEADER, ""), [])
        episode.append(Exchange(list(asked.get("input_ids") or []), None, [], bool(asked.get("image_data"))))
        return episode, len(episode) - 1


def _answered(asked: Exchange, body: bytes) -> Exchange:
    answer = _object(body)
    if not isinstance(answer.get("output_ids"), list):
        return asked
    meta = answer.get("meta_info") or {}
    logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or []]
    return replace(asked, output_ids=answer["output_ids"], logprobs=logprobs)


def _object(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a body; empty where it holds none."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
