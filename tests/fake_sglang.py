"""A scripted SGLang on a real loopback socket: answers `/generate` as told, records it all, checks token-in/token-out.

    async with FakeSGLang([Reply.tokens([5, 6]), Reply.status(503)]) as fake:
        ...  # requests to fake.base_url
    assert fake.violations == []

Shapes of answers are those of SGLang 0.5.x. It knows no tokenizer: give `decode` where `text` matters.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import socket
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import orjson
from aiohttp import web
from fake_sglang_reply import Reply
from multidict import CIMultiDictProxy

__all__ = ["ROUTING_HEADER", "FakeSGLang", "Received", "Reply", "dead_url"]

ROUTING_HEADER = "X-SMG-Routing-Key"


@dataclass(frozen=True, slots=True)
class Received:
    """One recorded `/generate` request; header names in any case."""

    body: dict[str, Any]
    headers: CIMultiDictProxy[str]
    at_s: float

    @property
    def rid(self) -> str | None:
        return self.body.get("rid")

    @property
    def input_ids(self) -> list[int]:
        return list(self.body["input_ids"])


@dataclass(slots=True)
class _Episode:
    first: list[int]
    last_input: list[int]
    sequence: list[int]


Script = Callable[[dict[str, Any], int], Reply | Awaitable[Reply]] | Sequence[Reply]


class FakeSGLang:
    """The server; an async context manager.

    Args:
        script: Replies in order, or `(request body, number of the request from 0) -> Reply` (may be async).
        context_length: Served by `/server_info`; a longer request gets SGLang's 400.
        vocab_size: An id outside it is a violation (it kills a real server).
        episode_of: Names a request's episode. Default: its routing-key header, else whose tokens it extends.
        decode: Makes `text` of the output ids.
        router: Answer 404 to `/abort_request` and to the info endpoints, as routers do.

    Attributes:
        requests: Every `/generate` request. `aborts`: bodies of `/abort_request`.
        disconnects: rids whose client went away. `violations`: broken token-in/token-out, in words.
    """

    def __init__(
        self,
        script: Script,
        *,
        context_length: int | None = None,
        vocab_size: int | None = None,
        episode_of: Callable[[Received], Hashable] | None = None,
        decode: Callable[[list[int]], str] | None = None,
        router: bool = False,
        weight_version: str = "default",
    ) -> None:
        self._script, self._decode, self._router = script, decode, router
        self._context_length, self._vocab_size, self._episode_of = context_length, vocab_size, episode_of
        self.weight_version = weight_version
        self.requests: list[Received] = []
        self.aborts: list[dict[str, Any]] = []
        self.disconnects: list[str | None] = []
        self.violations: list[str] = []
        self.info_requests: list[str] = []
        self._episodes: dict[Hashable, _Episode] = {}
        self._anonymous = itertools.count()
        self._arrived = asyncio.Condition()
        self._aborted: dict[str, asyncio.Event] = {}
        self._runner: web.AppRunner | None = None
        self.base_url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health", self._health)
        for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info", "/v1/models"):
            app.router.add_get(path, self._info)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.base_url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def arrived(self, count: int = 1) -> None:
        """Return when that many `/generate` requests have come in all."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) >= count)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        received = Received(orjson.loads(await http.read()), http.headers, time.monotonic())
        async with self._arrived:
            number = len(self.requests)
            self.requests.append(received)
            self._arrived.notify_all()
        episode = self._enter(received, number)
        refusal = self._too_long(received)
        try:
            reply = refusal or await self._next_reply(received, number)
            await asyncio.sleep(reply.delay_s)
            if reply.kind == "hang":
                reply = await self._until_aborted(received, reply)
        except asyncio.CancelledError:
            self.disconnects.append(received.rid)
            raise
        if reply.kind == "tokens":
            episode.sequence = [*episode.last_input, *reply.ids]
        return await self._send(http, received, reply)

    async def _next_reply(self, received: Received, number: int) -> Reply:
        if callable(self._script):
            reply = self._script(received.body, number)
            return await reply if inspect.isawaitable(reply) else reply
        if number >= len(self._script):
            return Reply.status(400, f"the script of {len(self._script)} replies has none for request {number}")
        return self._script[number]

    async def _until_aborted(self, received: Received, reply: Reply) -> Reply:
        event = self._aborted.setdefault(str(received.rid), asyncio.Event())
        await event.wait()
        return Reply.abort(reply.ids)

    async def _send(self, http: web.Request, received: Received, reply: Reply) -> web.StreamResponse:
        body = self._body(received, reply) if reply.kind in ("tokens", "cut", "stall") else reply.body
        response: web.StreamResponse = web.Response(
            body=body, status=reply.code, headers=reply.headers, content_type="application/json"
        )
        if reply.kind in ("cut", "stall"):
            response = web.StreamResponse(headers={"Content-Length": str(len(body))})
            await response.prepare(http)
            await response.write(body[: len(body) // 2])
        if reply.kind == "stall":
            await asyncio.Event().wait()  # until the client goes away, which cancels this
        if reply.kind in ("cut", "reset") and http.transport is not None:
            http.transport.close()
        return response

    def _body(self, received: Received, reply: Reply) -> bytes:
        ids = list(reply.ids)
        logprobs = reply.logprobs if reply.logprobs is not None else (-0.5,) * len(ids)
        beside = reply.logprob_ids if reply.logprob_ids is not None else reply.ids
        meta: dict[str, Any] = {
            "id": received.rid,
            "finish_reason": reply.finish,
            "prompt_tokens": len(received.input_ids),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.weight_version,
            "e2e_latency": 0.001,
        }
        if received.body.get("return_logprob"):
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [[p, i, None] for p, i in zip(logprobs, beside, strict=False)]
        meta = {key: value for key, value in {**meta, **reply.meta}.items() if value is not None}
        text = reply.text if reply.text is not None else (self._decode(ids) if self._decode else "")
        return orjson.dumps({"text": text, "output_ids": ids, "meta_info": meta})

    def _enter(self, received: Received, number: int) -> _Episode:
        """The request's episode, after its ids were checked against it."""
        ids = received.input_ids
        if self._vocab_size is not None and any(not 0 <= i < self._vocab_size for i in ids):
            self.violations.append(f"request {number}: an id outside the vocabulary")
        key = self._key(received, ids)
        episode = self._episodes.get(key)
        if episode is None or ids == episode.first:
            episode = self._episodes[key] = _Episode(ids, ids, ids)
        elif ids[: len(episode.sequence)] != episode.sequence and ids != episode.last_input:
            same = sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(ids, episode.sequence, strict=False)))
            self.violations.append(
                f"request {number}: its {len(ids)} ids don't extend the {len(episode.sequence)} of the "
                f"last request and its output; they differ from position {same}"
            )
        episode.last_input = ids
        return episode

    def _key(self, received: Received, ids: list[int]) -> Hashable:
        if self._episode_of is not None:
            return self._episode_of(received)
        if ROUTING_HEADER in received.headers:
            return received.headers[ROUTING_HEADER]
        extended = [k for k, e in self._episodes.items() if ids[: len(e.sequence)] == e.sequence and ids != e.first]
        if extended:
            return max(extended, key=lambda k: len(self._episodes[k].sequence))
        again = [k for k, e in self._episodes.items() if ids == e.last_input and ids != e.first]
        if again:
            return again[-1]
        began = [k for k, e in self._episodes.items() if ids != e.first and ids[: len(e.first)] == e.first]
        return began[-1] if began else ("episode", next(self._anonymous))

    def _too_long(self, received: Received) -> Reply | None:
        limit, length = self._context_length, len(received.body["input_ids"])
        if limit is None:
            return None
        wanted = received.body.get("sampling_params", {}).get("max_new_tokens") or 0
        if length >= limit:
            words = f"The input ({length} tokens) is longer than the model's context length ({limit} tokens)."
        elif length + wanted > limit:
            words = (
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
                f"total of {length + wanted} tokens: {length} tokens from the input messages and {wanted} tokens for "
                "the completion."
            )
        else:
            return None
        return Reply.status(400, {"error": {"message": words}})

    async def _abort(self, http: web.Request) -> web.Response:
        body = orjson.loads(await http.read())
        self.aborts.append(body)
        if self._router:
            return web.Response(status=404)
        chosen = list(self._aborted) if body.get("abort_all") else [str(body.get("rid"))]
        for rid in chosen:
            self._aborted.setdefault(rid, asyncio.Event()).set()
        return web.Response()

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response()

    async def _info(self, http: web.Request) -> web.Response:
        self.info_requests.append(http.path)
        if self._router:
            return web.json_response({"error": "not here"}, status=404)
        if http.path == "/v1/models":
            card = {"id": "fake", "object": "model", "max_model_len": self._context_length}
            return web.json_response({"object": "list", "data": [card]})
        info: dict[str, Any] = {"model_path": "/models/fake", "weight_version": self.weight_version}
        if "server" in http.path:
            info["context_length"] = self._context_length
        return web.json_response(info)


def dead_url() -> str:
    """The URL of a loopback port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
