"""A scripted SGLang on a loopback socket: it answers `/generate` from a script, records requests, and checks tokens.

    async with FakeSGLang([Reply.tokens([5, 6]), Reply.status(503)]) as fake:
        ...  # requests to fake.base_url
    assert fake.violations == []

Responses have the shapes of SGLang 0.5.x. The server has no tokenizer: scripts give token ids.
"""

import asyncio
import base64
import inspect
import socket
from array import array
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Self

import orjson
from aiohttp import web
from fake_sglang_episodes import Episode, Episodes
from fake_sglang_reply import Reply
from fake_sglang_requests import Requests, Sampled
from multidict import CIMultiDictProxy

__all__ = ["ROUTING_HEADER", "FakeSGLang", "Received", "Reply", "dead_url"]

ROUTING_HEADER = "X-SMG-Routing-Key"
_INFO = ("/server_info", "/get_server_info", "/model_info", "/get_model_info", "/v1/models")


@dataclass(frozen=True, slots=True)
class Received:
    """A recorded `/generate` request; header names are case-insensitive."""

    body: dict[str, Any]
    headers: CIMultiDictProxy[str]

    @property
    def rid(self) -> str | None:
        return self.body.get("rid")

    @property
    def input_ids(self) -> list[int]:
        return list(self.body["input_ids"])

    @property
    def key(self) -> str | None:
        return self.headers.get(ROUTING_HEADER)


Script = Callable[[dict[str, Any], int], Reply | Awaitable[Reply]] | Sequence[Reply]


class FakeSGLang:
    """The fake server; use it as an async context manager.

    Args:
        script: Replies in order, or a function `(request body, number of the request from 0) -> Reply`, sync or async.
            An object with a method `reply` gets the whole `Received` in place of the body.
        context_length: Context length that `/server_info` reports; a longer request gets SGLang's 400.
        vocab_size: Vocabulary size; an id outside it is a violation (it would kill a real server).
        episode_of: Function that names a request's episode. Default: the request's routing-key header; without one, the
            episode whose tokens the request extends, or a new one.
        router: Act as a router: answer 404 to `/abort_request`, `/v1/loads`, the info endpoints and engine control. The
            router's only worker, which does answer these, is at `worker_url`.
        keeps_requests: Record every `/generate` request; False in long runs.

    Attributes:
        requests: Recorded requests, in order.
        requests_seen: Number of `/generate` requests, recorded or not.
        disconnects: rids of requests whose client disconnected before the answer.
        aborts: Bodies of `/abort_request`.
        info_requests: Paths of the requests to the info endpoints.
        outage: While set, the reply (a status or a reset) to every request on every path.
        refused_paths: Paths of the requests that got the `outage` reply.
    """

    def __init__(
        self,
        script: Script,
        *,
        context_length: int | None = None,
        vocab_size: int | None = None,
        episode_of: Callable[[Received], Hashable] | None = None,
        router: bool = False,
        weight_version: str = "default",
        keeps_requests: bool = True,
        port: int = 0,
    ) -> None:
        self._script, self._router = script, router
        self._context_length, self._vocab_size, self._episode_of = context_length, vocab_size, episode_of
        self._keeps_requests, self._port = keeps_requests, port
        self.engine = Requests(weight_version)
        self.episodes = Episodes()
        self.requests: list[Received] = []
        self.requests_seen = 0
        self.aborts: list[dict[str, Any]] = []
        self.disconnects: list[str | None] = []
        self.info_requests: list[str] = []
        self.outage: Reply | None = None
        self.refused_paths: list[str] = []
        self._arrived = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self.base_url = self.worker_url = ""

    @property
    def violations(self) -> list[str]:
        """Messages for requests that broke the token-in/token-out rule or had an id outside the vocabulary."""
        return self.episodes.violations

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 28, middlewares=[self._answer_outage])
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_get("/workers", self._workers)
        for place in ("", "/worker"):
            app.router.add_post(f"{place}/abort_request", self._abort)
            app.router.add_get(f"{place}/v1/loads", self._loads)
            for path in ("/pause_generation", "/continue_generation", "/update_weights_from_tensor"):
                app.router.add_post(f"{place}{path}", self._control)
            for path in _INFO:
                app.router.add_get(f"{place}{path}", self._info)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, backlog=1024)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.base_url = f"http://{host}:{port}"
        self.worker_url = f"{self.base_url}/worker"
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def arrived(self, count: int = 1) -> None:
        """Wait until `count` `/generate` requests have arrived since the start."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.requests_seen >= count)

    @web.middleware
    async def _answer_outage(
        self, http: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self.outage is None:
            return await handler(http)
        self.refused_paths.append(http.path)
        if self.outage.kind == "reset" and http.transport is not None:
            http.transport.close()
        return web.Response(body=self.outage.body, status=self.outage.code)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        received = Received(orjson.loads(await http.read()), http.headers)
        async with self._arrived:
            number = self.requests_seen
            self.requests_seen += 1
            if self._keeps_requests:
                self.requests.append(received)
            self._arrived.notify_all()
        episode = self._enter(received, number)
        # the prefix cache has the last answered request and its answer; the last id of a request never comes from it
        cached_tokens = min(len(episode.sequence), len(received.input_ids) - 1) if episode.sampled_length else 0
        sampled = None
        try:
            reply = self._too_long(received) or await self._next_reply(received, number)
            await asyncio.sleep(reply.delay_s)
            if reply.gate is not None:
                await reply.gate.wait()
            if reply.kind in ("tokens", "hang"):
                sampled = await self.engine.run(str(received.rid), reply)
        except asyncio.CancelledError:
            self.disconnects.append(received.rid)
            raise
        if sampled is not None:
            episode.deliver(sampled.reply.ids, sampled.versions)
        return await self._send(http, received, sampled or Sampled(reply, (), ""), cached_tokens)

    def _enter(self, received: Received, number: int) -> Episode:
        ids = received.input_ids
        if self._vocab_size is not None and any(not 0 <= i < self._vocab_size for i in ids):
            self.violations.append(f"request {number}: an id outside the vocabulary")
        key = self._episode_of(received) if self._episode_of is not None else received.key
        return self.episodes.enter(key, ids, number)

    async def _next_reply(self, received: Received, number: int) -> Reply:
        asked = getattr(self._script, "reply", None)
        if asked is not None or callable(self._script):
            reply = asked(received, number) if asked is not None else self._script(received.body, number)
            return await reply if inspect.isawaitable(reply) else reply
        if number >= len(self._script):
            return Reply.status(400, f"the script of {len(self._script)} replies has none for request {number}")
        return self._script[number]

    async def _send(
        self, http: web.Request, received: Received, sampled: Sampled, cached_tokens: int
    ) -> web.StreamResponse:
        reply = sampled.reply
        if reply.kind in ("raw", "reset"):
            body = reply.body
        else:
            version = self.engine.weight_version
            cached = cached_tokens if reply.facts is not None else 0
            body = _answer_body(received.body, sampled, weight_version=version, cached_tokens=cached)
        response: web.StreamResponse = web.Response(
            body=body, status=reply.code, headers=reply.headers, content_type="application/json"
        )
        if reply.kind == "cut":
            response = web.StreamResponse(status=reply.code, headers={"Content-Length": str(len(body))})
            await response.prepare(http)
            await response.write(body[: len(body) // 2])
        if reply.kind in ("cut", "reset") and http.transport is not None:
            http.transport.close()
        return response

    def _too_long(self, received: Received) -> Reply | None:
        limit, length = self._context_length, len(received.body["input_ids"])
        wanted = received.body.get("sampling_params", {}).get("max_new_tokens") or 1
        if limit is None or length + wanted <= limit:
            return None
        message = f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested "
        message += f"{length} tokens of input and {wanted} of output."
        return Reply.status(400, {"error": {"message": message}})

    def _is_hidden(self, http: web.Request) -> bool:
        return self._router and not http.path.startswith("/worker/")

    async def _abort(self, http: web.Request) -> web.Response:
        body = orjson.loads(await http.read())
        self.aborts.append(body)
        if self._is_hidden(http):
            return web.Response(status=404)
        if body.get("abort_all") or body.get("rid"):
            self.engine.abort("" if body.get("abort_all") else str(body["rid"]))
        return web.Response()

    async def _control(self, http: web.Request) -> web.Response:
        if self._is_hidden(http):
            return web.Response(status=404)
        body = orjson.loads(await http.read() or b"{}")
        if http.path.endswith("/pause_generation"):
            await self.engine.pause(body.get("mode", "abort"))
        elif http.path.endswith("/continue_generation"):
            self.engine.resume()
        else:
            self.engine.update_weights(str(body["weight_version"]))
        return web.json_response({"success": True})

    async def _loads(self, http: web.Request) -> web.Response:
        if self._is_hidden(http):
            return web.Response(status=404)
        running, waiting = self.engine.load()
        return web.json_response({"loads": [{"num_running_reqs": running, "num_waiting_reqs": waiting}]})

    async def _workers(self, _http: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": self.worker_url}]})

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response()

    async def _info(self, http: web.Request) -> web.Response:
        self.info_requests.append(http.path)
        if self._is_hidden(http):
            return web.json_response({"error": "not here"}, status=404)
        if http.path == "/v1/models":
            card = {"id": "fake", "object": "model", "max_model_len": self._context_length}
            return web.json_response({"object": "list", "data": [card]})
        info: dict[str, Any] = {"model_path": "/models/fake", "weight_version": self.engine.weight_version}
        if "server" in http.path:
            info["context_length"] = self._context_length
        return web.json_response(info)


def dead_url() -> str:
    """Return the URL of a loopback port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def _answer_body(request: Mapping[str, Any], sampled: Sampled, *, weight_version: str, cached_tokens: int) -> bytes:
    """Return the JSON of a 200 response of SGLang 0.5.x."""
    reply, ids = sampled.reply, list(sampled.reply.ids)
    meta: dict[str, Any] = {
        "id": request.get("rid"),
        "finish_reason": reply.finish,
        "prompt_tokens": len(request["input_ids"]),
        "completion_tokens": len(ids),
        "cached_tokens": cached_tokens,
        "weight_version": weight_version,
        "e2e_latency": 0.001,
    }
    if request.get("return_logprob"):
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [[p, i, None] for p, i in _logprobs(request, sampled)]
    if reply.facts is not None:
        meta |= _facts(request, sampled, reply.facts)
    meta = {key: value for key, value in {**meta, **reply.meta}.items() if value is not None}
    return orjson.dumps({"text": reply.text, "output_ids": ids, "meta_info": meta})


def _logprobs(request: Mapping[str, Any], sampled: Sampled) -> Iterable[tuple[float | None, int]]:
    reply: Reply = sampled.reply
    values = reply.logprobs
    if values is None and reply.facts is not None:
        first = len(request["input_ids"])
        values = tuple(reply.facts.logprob(first + n, version) for n, version in enumerate(sampled.versions))
    if values is None:
        values = (-0.5,) * len(reply.ids)
    return zip(values, reply.logprob_ids if reply.logprob_ids is not None else reply.ids, strict=False)


def _facts(request: Mapping[str, Any], sampled: Sampled, facts: Any) -> dict[str, Any]:
    """Return the weight versions and the requested replay data; an empty dict if the request sampled no token."""
    if not sampled.versions:
        return {}
    found: dict[str, Any] = {"weight_version": sampled.versions[-1], "weight_versions": _spans(sampled.versions)}
    if request.get("return_routed_experts"):
        found["routed_experts"] = _base64(_experts(request, sampled, facts))
    if (request.get("sampling_params", {}).get("custom_params") or {}).get("return_top_p_token_ids"):
        first = len(request["input_ids"])
        kept = [
            facts.top_p_ids(first + n, version, token)
            for n, (version, token) in enumerate(zip(sampled.versions, sampled.reply.ids, strict=True))
        ]
        found["top_p_token_ids"] = _base64(i for ids in kept for i in ids)
        found["top_p_token_offsets"] = _base64(accumulate(map(len, kept), initial=0))
    return found


def _spans(versions: Iterable[str]) -> list[dict[str, Any]]:
    spans, start = [], 0
    for version, group in groupby(versions):
        end = start + len(list(group))
        spans.append({"version": version, "start": start, "end": end})
        start = end
    return spans


def _experts(request: Mapping[str, Any], sampled: Sampled, facts: Any) -> Iterable[int]:
    """Yield the expert rows from the requested start to the last token but one.

    For the tokens of the prompt, except its last token, the rows come from the weights of the prefill. Each later row
    comes from the weights that sampled the token after it.
    """
    first = len(request["input_ids"])
    for position in range(request.get("routed_experts_start_len") or 0, first + len(sampled.versions) - 1):
        version = sampled.prefilled_by if position < first - 1 else sampled.versions[position + 1 - first]
        yield from facts.experts(position, version)


def _base64(numbers: Iterable[int]) -> str:
    return base64.b64encode(array("i", numbers).tobytes()).decode()
