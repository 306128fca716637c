"""Cancellation, event loops, URLs, and connections: the client's own, shared ones, and the caller's."""

import asyncio
import gc
import logging
from typing import Any

import httpx
import orjson
import pytest
from fake_sglang import FakeSGLang, Reply

from strands_rollout.aio import LoopCache
from strands_rollout.client.client import SGLangClient, shared_client
from strands_rollout.client.transport import create_client, parse_base_url
from strands_rollout.errors import ConfigError, EngineUnavailableError

OK = Reply.tokens([7])


async def test_generate_cancel_ends_immediately_and_aborts() -> None:
    async with FakeSGLang([Reply.hang()]) as fake, SGLangClient(fake.base_url) as client:
        asking = asyncio.create_task(client.generate([1], {}, rid="r1", headers={"X-SMG-Routing-Key": "k"}))
        await fake.arrived()
        asking.cancel()
        for _ in range(20):  # some passes of the event loop; the cancelled call waits for nothing else
            await asyncio.sleep(0)
        assert asking.cancelled()
        await client.aclose()
    assert (fake.aborts, fake.disconnects) == ([{"rid": "r1"}], ["r1"])


async def test_abort_by_rid_and_abort_all() -> None:
    async with FakeSGLang([Reply.hang([5])]) as fake, SGLangClient(fake.base_url) as client:
        asking = asyncio.create_task(client.generate([1], {}))
        await fake.arrived()
        assert await client.abort(abort_all=True)
        assert (await asking).finish_reason.type == "abort"
        assert await client.abort("x")
        with pytest.raises(ConfigError, match="needs an rid"):
            await client.abort()
    assert fake.aborts == [{"rid": "", "abort_all": True}, {"rid": "x"}]


async def test_shared_client_belongs_to_its_loop() -> None:
    async def in_its_loop(url: str) -> tuple[SGLangClient, list[int]]:
        client = shared_client(url)
        assert shared_client(url) is client
        assert shared_client(url, vocab_size=100) is not client
        generations = await asyncio.gather(*(client.generate([1], {}) for _ in range(8)))
        return client, [g.output_ids[0] for g in generations]

    async with FakeSGLang(lambda _r, _n: OK) as fake:
        here = in_its_loop(fake.base_url)
        threads = [asyncio.to_thread(asyncio.run, in_its_loop(fake.base_url)) for _ in range(2)]
        (own, ids), *others = await asyncio.gather(here, *threads)
        assert ids == [7] * 8
        assert not own.is_closed
    for client, other_ids in others:
        assert other_ids == [7] * 8
        assert client is not own
        assert client.is_closed
    assert others[0][0] is not others[1][0]


async def test_shared_client_is_remade_after_close() -> None:
    async with FakeSGLang([OK]) as fake:
        first = shared_client(fake.base_url)
        await first.aclose()
        second = shared_client(fake.base_url)
        assert second is not first
        assert (await second.generate([1], {})).output_ids == [7]


def test_shared_client_of_loop_closed_without_shutdown() -> None:
    class Connection:
        is_closed = False

        async def aclose(self) -> None:
            raise AssertionError("its loop is closed")

    async def get() -> Connection:
        return cache.get("key", Connection)

    cache: LoopCache[Connection] = LoopCache()
    for _ in range(3):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(get())
        loop.close()
    gc.collect()
    assert len(cache._loops) == 1


async def test_client_on_second_loop_raises() -> None:
    async with FakeSGLang(lambda _r, _n: OK) as fake, SGLangClient(fake.base_url) as client:
        await client.generate([1], {})
        with pytest.raises(ConfigError, match=r"belongs to the event loop of its first request.*shared_client"):
            await asyncio.to_thread(asyncio.run, client.generate([1], {}))


async def test_callers_httpx_client_keeps_headers_and_stays_open() -> None:
    async with (
        FakeSGLang([OK]) as fake,
        httpx.AsyncClient(base_url=fake.base_url, headers={"Authorization": "Bearer s3cret"}) as http,
    ):
        async with SGLangClient(http) as client:
            assert (await client.generate([1], {})).output_ids == [7]
        assert not http.is_closed
        assert fake.requests[0].headers["Authorization"] == "Bearer s3cret"


async def test_generate_replaces_only_httpx_default_timeout() -> None:
    seen: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.extensions["timeout"])
        meta = {"finish_reason": {"type": "length", "length": 1}, "output_token_logprobs": [[-1.5, 3, None]]}
        return httpx.Response(200, content=orjson.dumps({"output_ids": [3], "meta_info": meta}))

    for timeout in (httpx.Timeout(5.0), httpx.Timeout(7.0)):
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(base_url="http://engine", transport=transport, timeout=timeout) as http:
            assert (await SGLangClient(http).generate([1], {})).logprobs == [-1.5]
    assert [limits["read"] for limits in seen] == [None, 7.0]


async def test_client_rejects_httpx_client_without_base_url() -> None:
    async with httpx.AsyncClient() as http:
        with pytest.raises(ConfigError, match="base_url has no host; create the client with create_client"):
            SGLangClient(http)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("http://127.0.0.1:30000/", "http://127.0.0.1:30000/"),
        ("127.0.0.1:30000", "http://127.0.0.1:30000/"),
        ("localhost:8000/engine/", "http://localhost:8000/engine"),
        ("http://[::1]:30000", "http://[::1]:30000/"),
    ],
)
def test_parse_base_url_accepts_optional_scheme_and_slash(given: str, read: str) -> None:
    assert str(parse_base_url(given)) == read


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "expected http://host:port"),
        ("ftp://host", "expected http://host:port"),
        ("http://host:port", "can't be read as a URL"),
        ("http://host:1/generate/", "remove '/generate'"),
        ("http://host:1/?key=s3cret", "has a query or a fragment"),
    ],
)
def test_parse_base_url_rejects_other_urls(given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        create_client(given)
    assert "s3cret" not in str(error.value)


def test_create_client_rejects_numbers_out_of_range() -> None:
    with pytest.raises(ConfigError, match="max_connections is 0; expected a number above 0"):
        create_client("http://h", max_connections=0)
    with pytest.raises(ConfigError, match="max_attempts=0"):
        SGLangClient("http://h", max_attempts=0)


async def test_url_password_is_sent_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with FakeSGLang([Reply.status(503), OK, *[Reply.status(503)] * 9]) as fake:
        url = fake.base_url.replace("http://", "http://me:s3cret@")
        async with SGLangClient(url, backoff_base_s=0, max_attempts=2) as client:
            await client.generate([1], {})
            with pytest.raises(EngineUnavailableError) as error:
                await client.generate([1], {})
    assert fake.requests[0].headers["Authorization"].startswith("Basic ")
    assert fake.base_url in str(error.value)
    assert "s3cret" not in str(error.value) + client.url
    assert "s3cret" not in caplog.text
    assert fake.base_url in caplog.text
