"""Check token exactness against the traffic that a proxy in front of the engine records.

The check does not rely on the record that this package keeps of an episode.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import web

from strands_rollout.client.transport import parse_base_url
from strands_rollout.samples import Sample
from strands_rollout.slime_plugin.episode import ROUTING_HEADER

_MAX_BODY_BYTES: Final = 1 << 28
_HOP_HEADERS: Final = frozenset(
    {"connection", "content-encoding", "content-length", "host", "keep-alive", "transfer-encoding"}
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One `/generate` request and its answer.

    Attributes:
        input_ids: The ids of the request.
        output_ids: The ids of the answer; None if it has no generation (an error, a cut connection).
        logprobs: One value per output id; empty if the request asked for no logprobs, or the answer has no generation.
        has_images: True if the request held images; the engine expands images to more tokens than `input_ids` has.
        read_tokens: The engine's number of input tokens; None if it is unknown or equals the length of `input_ids`.
    """

    input_ids: list[int]
    output_ids: list[int] | None
    logprobs: list[float]
    has_images: bool = False
    read_tokens: int | None = None

    @property
    def sequence(self) -> list[int]:
        """The ids of the request plus the ids of the answer."""
        return [*self.input_ids, *(self.output_ids or [])]


class WireRecorder:
    """A proxy in front of the engine; it records each `/generate` request and its answer.

    Attributes:
        url: The proxy's URL.
        episodes: The exchanges of each episode in the order of requests, by routing key; "" for requests without a key.
    """

    def __init__(self, session: aiohttp.ClientSession, target: str) -> None:
        self._session, self._target = session, target
        self.url = ""
        self.episodes: dict[str, list[Exchange]] = {}

    async def forward(self, request: web.Request) -> web.Response:
        """Forward a request to the engine; if it asks for a generation, record the exchange in its episode."""
        body = await request.read()
        episode: list[Exchange] = []
        if request.path == "/generate" and request.method == "POST":
            fields = _json_object(body)
            episode = self.episodes.setdefault(request.headers.get(ROUTING_HEADER, ""), [])
            episode.append(Exchange(list(fields.get("input_ids") or []), None, [], bool(fields.get("image_data"))))
        index = len(episode) - 1
        try:
            answer, content = await self._send(request, body)
        except aiohttp.ClientError as e:
            # close the connection: the client must not see a status that the engine never sent
            if request.transport is not None:
                request.transport.close()
            return web.Response(status=502, text=f"{type(e).__name__}: {e}")
        if episode and answer.status == 200:
            episode[index] = _with_answer(episode[index], content)
        return answer

    async def _send(self, request: web.Request, body: bytes) -> tuple[web.Response, bytes]:
        url, headers = f"{self._target}{request.rel_url}", _end_to_end_headers(request.headers)
        async with self._session.request(
            request.method, url, data=body or None, headers=headers, allow_redirects=False
        ) as answer:
            content = await answer.read()
            return web.Response(
                status=answer.status, body=content, headers=_end_to_end_headers(answer.headers)
            ), content


def _end_to_end_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_HEADERS}


@asynccontextmanager
async def record_wire(base_url: str) -> AsyncIterator[WireRecorder]:
    """Run a recording proxy for the engine at `base_url`, on a free port of 127.0.0.1, until the block ends.

    If a client disconnects, the proxy cancels its request to the engine, as if there were no proxy.

    Raises:
        ConfigError: `base_url` is not the URL of an HTTP server.
    """
    target = parse_base_url(base_url)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=True) as session:
        recorder = WireRecorder(session, str(target).rstrip("/"))
        async with local_server(web.route("*", "/{path:.*}", recorder.forward)) as recorder.url:
            yield recorder


@asynccontextmanager
async def local_server(route: web.RouteDef) -> AsyncIterator[str]:
    """Serve a route on a free port of 127.0.0.1 until the block ends, and yield its URL."""
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.add_routes([route])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _with_answer(exchange: Exchange, body: bytes) -> Exchange:
    answer = _json_object(body)
    if not isinstance(answer.get("output_ids"), list):
        return exchange
    meta = answer.get("meta_info") or {}
    logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or []]
    prompt_tokens = meta.get("prompt_tokens")
    return replace(
        exchange,
        output_ids=answer["output_ids"],
        logprobs=logprobs,
        read_tokens=None if prompt_tokens == len(exchange.input_ids) else prompt_tokens,
    )


def _json_object(body: bytes) -> Mapping[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def tito_violations(exchanges: Sequence[Exchange], sample: Sample) -> list[str]:
    """Return the violations of token exactness in one episode, as sentences.

    The rules are:

    - The ids of a request begin with the ids of the previous request and its output. If the previous request got no
      generation, the request repeats it unchanged.
    - A sample with trained tokens holds the ids of the last answered request and its output. The sample's prompt is as
      long as the first answered request. The sample trains all sampled ids and nothing else, with the engine's
      logprobs.
    - The engine read all tokens of each answered request, in an episode with trained tokens.

    In an episode with images, the engine reads more tokens than the requests have, since it expands the images. The
    rules about the sample and about the tokens read are then replaced by this rule: the sample's trained ids and
    logprobs equal the ids and logprobs of the answers.
    """
    return [*_extension_violations(exchanges), *_sample_violations(exchanges, sample)]


def _extension_violations(exchanges: Sequence[Exchange]) -> Iterator[str]:
    for number, (previous, exchange) in enumerate(pairwise(exchanges), start=1):
        got, expected = exchange.input_ids, previous.sequence
        if previous.output_ids is None and got != expected:
            yield f"request {number} changes the failed request that it repeats{_difference(got, expected)}"
        elif got[: len(expected)] != expected:
            yield f"request {number} does not extend the previous request and its output{_difference(got, expected)}"


def _sample_violations(exchanges: Sequence[Exchange], sample: Sample) -> Iterator[str]:
    if not any(sample.loss_mask or []):
        return
    answered = [exchange for exchange in exchanges if exchange.output_ids]
    if not answered:
        yield "the sample trains tokens, but the engine sampled none"
        return
    if any(exchange.has_images for exchange in answered):
        yield from _image_episode_violations(answered, sample)
        return
    for exchange in answered:
        if exchange.read_tokens is not None:
            yield f"the engine read {exchange.read_tokens} tokens; the request had {len(exchange.input_ids)}"
    sequence = answered[-1].sequence
    if sample.tokens != sequence:
        yield f"the sample's tokens are not the last request and its output{_difference(sample.tokens, sequence)}"
        return
    prompt_length = len(sample.tokens) - sample.response_length
    if prompt_length != len(answered[0].input_ids):
        yield (
            f"the sample's prompt has {prompt_length} tokens; the first answered request had "
            f"{len(answered[0].input_ids)}"
        )
    else:
        yield from _training_violations(answered, sample, prompt_length)


def _training_violations(answered: Sequence[Exchange], sample: Sample, prompt_length: int) -> Iterator[str]:
    mask, logprobs = [0] * len(sample.tokens), [0.0] * len(sample.tokens)
    for exchange in answered:
        start, output = len(exchange.input_ids), exchange.output_ids or []
        mask[start : start + len(output)] = [1] * len(output)
        logprobs[start : start + len(output)] = exchange.logprobs or [0.0] * len(output)
    for name, got, expected in (
        ("loss_mask", sample.loss_mask, mask[prompt_length:]),
        ("rollout_log_probs", sample.rollout_log_probs, logprobs[prompt_length:]),
    ):
        if got != expected:
            yield f"{name} is not what the engine sampled{_difference(got or [], expected)}"


def _image_episode_violations(answered: Sequence[Exchange], sample: Sample) -> Iterator[str]:
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    tokens = zip(response, sample.loss_mask or [], sample.rollout_log_probs or [], strict=True)
    trained = [(token, logprob) for token, mask, logprob in tokens if mask]
    sampled = [
        (token, logprob)
        for exchange in answered
        for token, logprob in zip(exchange.output_ids or [], exchange.logprobs, strict=True)
    ]
    if trained != sampled:
        yield f"the trained tokens are not what the engine sampled{_difference(trained, sampled)}"


def _difference(got: Sequence[Any], expected: Sequence[Any]) -> str:
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(got, expected, strict=False)))
    return f": got {len(got)} values, expected {len(expected)}; the first {same} agree"
