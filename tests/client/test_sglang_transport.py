"""The direct transport to an engine equals httpx; httpx itself is used for settings that only httpx supports."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from aiohttp import web
from fake_sglang import FakeSGLang, Reply
from httpx_aiohttp import AiohttpTransport

from strands_rollout.client.client import SGLangClient
from strands_rollout.client.transport import create_client
from strands_rollout.errors import ConfigError, EngineRejectedError

OK = Reply.tokens([7])
BODY = b'{"output_ids":[7],"meta_info":{"finish_reason":{"type":"length"},"output_token_logprobs":[[-1.5,7,null]]}}'


@pytest.fixture
def by_httpx(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the requests that went through httpx's layers."""
    seen: list[str] = []
    handle = AiohttpTransport.handle_async_request

    async def noting(self: AiohttpTransport, request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path)
        response: httpx.Response = await handle(self, request)
        return response

    monkeypatch.setattr(AiohttpTransport, "handle_async_request", noting)
    return seen


@pytest.fixture
async def fake() -> AsyncIterator[FakeSGLang]:
    async with FakeSGLang(lambda _request, _number: OK) as running:
        yield running


async def test_only_generations_bypass_httpx(fake: FakeSGLang, by_httpx: list[str]) -> None:
    async with SGLangClient(fake.base_url) as client:
        await client.generate([1], {})
        assert by_httpx == []
        await client.health()
        await client.abort("r")
    assert by_httpx == ["/readiness", "/health", "/abort_request"]


@pytest.mark.parametrize(
    "settings", [{}, {"headers": {"X-A": "client", "User-Agent": "me", "content-type": "no"}}, {"user": "me:s3cret@"}]
)
async def test_post_direct_sends_the_headers_of_httpx(
    fake: FakeSGLang, by_httpx: list[str], settings: dict[str, Any]
) -> None:
    url = fake.base_url.replace("http://", f"http://{settings.pop('user', '')}")
    hooked: list[httpx.Request] = []

    async def hook(request: httpx.Request) -> None:
        hooked.append(request)

    async with create_client(url, **settings) as http:
        own = {"X-SMG-Routing-Key": "k", "x-a": "request", "authorization": "own"}
        for hooks in ([], [hook]):
            http.event_hooks = {"request": hooks}
            await SGLangClient(http).generate([1], {}, headers=own, rid="r")
    straight, through = (request.headers for request in fake.requests)
    assert (by_httpx, len(hooked)) == (["/generate"], 1)
    assert sorted((k.lower(), v) for k, v in straight.items()) == sorted((k.lower(), v) for k, v in through.items())
    assert (straight["X-A"], straight["Content-Type"]) == ("request", "application/json")


@pytest.mark.parametrize(
    ("name", "value", "header", "shown", "way"),
    [
        ("auth", ("me", "pw"), "Authorization", "Basic bWU6cHc=", []),
        ("headers", {"User-Agent": "other"}, "User-Agent", "other", []),
        ("cookies", {"a": "b"}, "Cookie", "a=b", ["/generate"]),
        ("follow_redirects", True, "Content-Type", "application/json", ["/generate"]),
    ],
    ids=["password", "headers", "cookies", "redirects"],
)
async def test_post_direct_falls_back_to_httpx_for_its_features(
    fake: FakeSGLang, by_httpx: list[str], name: str, value: Any, header: str, shown: str, way: list[str]
) -> None:
    async with create_client(fake.base_url) as http:
        client = SGLangClient(http)
        await client.generate([1], {})
        setattr(http, name, value)
        await client.generate([1], {})
        http.headers["X-A"] = "later still"
        await client.generate([1], {})
    assert by_httpx == way * 2
    assert (fake.requests[1].headers[header], fake.requests[2].headers["X-A"]) == (shown, "later still")


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("x-key", "hush-ä", "the value of the header 'x-key' has a character outside ASCII; expected only ASCII"),
        ("x-schlüssel", "hush", "the header's name 'x-schlüssel' has a character outside ASCII; expected only ASCII"),
        ("x-key", b"hush", "the value of the header 'x-key' is a bytes; expected a str"),
    ],
)
async def test_post_direct_says_which_part_of_a_header_is_wrong(
    fake: FakeSGLang, name: str, value: Any, fault: str
) -> None:
    async with SGLangClient(fake.base_url) as client:
        with pytest.raises(ConfigError, match=fault) as refused:
            await client.generate([1], {}, headers={name: value})
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("used", [True, False])
async def test_closed_client_is_not_used(fake: FakeSGLang, used: bool) -> None:
    http = create_client(fake.base_url)
    client = SGLangClient(http)
    if used:
        await client.generate([1], {})
    await http.aclose()
    with pytest.raises(RuntimeError, match="the client has been closed"):
        await client.generate([1], {})
    assert len(fake.requests) == used


async def test_compressed_answer_or_refusal_is_decoded() -> None:
    reply = replace(Reply.raw(gzip.compress(BODY)), headers={"Content-Encoding": "gzip"})
    refusal = replace(reply, body=gzip.compress(b"top_q is no sampling parameter"), code=400)
    async with FakeSGLang([reply, refusal]) as fake, SGLangClient(fake.base_url) as client:
        assert (await client.generate([1], {})).logprobs == [-1.5]
        with pytest.raises(EngineRejectedError, match="HTTP 400: top_q is no sampling parameter"):
            await client.generate([1], {})


async def test_path_prefix_and_connection_reuse() -> None:
    seen: list[tuple[str, object]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.path_qs, request.transport))
        return web.Response(body=BODY)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with SGLangClient(f"http://127.0.0.1:{runner.addresses[0][1]}/an%20engine/") as client:
        for _ in range(3):
            await client.generate([1], {})
        await client.health()
    await runner.cleanup()
    assert [path for path, _ in seen] == [*["/an%20engine/generate"] * 3, "/an%20engine/readiness"]
    assert len({transport for _, transport in seen}) == 1


async def test_cancelled_waiting_request_frees_its_connection() -> None:
    async with FakeSGLang([Reply.hang(), OK]) as fake, create_client(fake.base_url, max_connections=1) as http:
        client = SGLangClient(http)
        first = asyncio.create_task(client.generate([1], {}))
        await fake.arrived()
        waiting = asyncio.create_task(client.generate([2], {}))
        for _ in range(20):  # some passes of the event loop, after which the call waits for a connection
            await asyncio.sleep(0)
        for task in (waiting, first):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await client.generate([3], {})).output_ids == [7]
    assert [request.input_ids for request in fake.requests] == [[1], [3]]
