"""Faults that the client retries, faults that it does not retry, and the final message."""

import asyncio
import random
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import orjson
import pytest
from fake_sglang import FakeSGLang, Reply, dead_url

from strands_rollout.client.client import SGLangClient
from strands_rollout.client.generate_api import Generation
from strands_rollout.client.transport import create_client
from strands_rollout.errors import (
    EngineAbortedError,
    EngineOverlongError,
    EngineRejectedError,
    EngineResponseError,
    EngineUnavailableError,
)

OK = Reply.tokens([7])


class Waits(list[float]):
    """Replacement for sleeping that records the durations."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


async def ask(fake: FakeSGLang, **options: Any) -> Generation:
    async with SGLangClient(fake.base_url, **{"sleep": Waits(), "rng": random.Random(0), **options}) as client:
        return await client.generate([1, 2], {"max_new_tokens": 4}, rid="r")


async def test_generate_retries_dead_engine_with_growing_waits() -> None:
    url, waits = dead_url(), Waits()
    async with SGLangClient(url, sleep=waits, rng=random.Random(0), clock=lambda: 0.0) as client:
        with pytest.raises(EngineUnavailableError) as error:
            await client.generate([1], {})
    attempts = (
        f"no generation from {url}/generate in {len(waits) + 1} attempts; the last failed with: Cannot connect to"
    )
    assert attempts in str(error.value)
    assert "The client waited 90 s (the limit is engine_patience_s)." in str(error.value)
    assert f"Check that the server is up (GET {url}/health)" in str(error.value)
    steps = [0.25, 0.5, 1, 2, *[4] * (len(waits) - 5)]
    assert all(step / 2 <= wait <= step for step, wait in zip(steps, waits[:-1], strict=True))
    assert sum(waits) == pytest.approx(90.0)


@dataclass
class Outage:
    """Script of an outage until a time of its own clock, which advances with each wait and attempt."""

    ends_at: float
    attempt_s: float = 0.0
    fault: Reply = field(default_factory=Reply.reset)
    now: float = 0.0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self, _request: Any, _number: int) -> Reply:
        is_back = self.now >= self.ends_at
        self.now += 0.0 if is_back else self.attempt_s
        return OK if is_back else self.fault


@pytest.mark.parametrize("fault", [Reply.reset(), Reply.status(503)], ids=repr)
@pytest.mark.parametrize("ends_at", [40.0, 89.0])
async def test_generate_retries_until_patience_is_over(fault: Reply, ends_at: float) -> None:
    outage = Outage(ends_at, attempt_s=7.0, fault=fault)
    async with FakeSGLang(outage) as fake:
        assert (await ask(fake, sleep=outage.sleep, clock=outage.clock)).output_ids == [7]
    assert outage.now <= ends_at + 11.0


async def test_generate_lost_generation_does_not_use_up_patience() -> None:
    outage = Outage(ends_at=10_000.0, attempt_s=3600.0)
    async with FakeSGLang(outage) as fake:
        assert (await ask(fake, sleep=outage.sleep, clock=outage.clock)).attempts == 4


async def test_abort_ends_the_wait_between_retries() -> None:
    is_waiting, is_aborting = asyncio.Event(), False

    async def sleep(_seconds: float) -> None:
        is_waiting.set()
        await asyncio.Event().wait()

    async with FakeSGLang([Reply.status(503)]) as fake, SGLangClient(fake.base_url, sleep=sleep) as client:
        call = asyncio.create_task(client.generate([1], {}, should_abort=lambda: is_aborting))
        await is_waiting.wait()
        is_aborting = True
        async with asyncio.timeout(30):
            with pytest.raises(EngineAbortedError):
                await call


NO_WORKER = {"error": {"code": "model_not_found", "message": "no worker"}}
PASSING = [
    *(Reply.status(s) for s in (429, 502, 503, 504)),
    *(Reply.status(500, body) for body in ("worker died", {"error": {"message": "CUDA error"}}, "[1]", "{")),
    Reply.reset(),
    replace(Reply.cut(), code=503),
    Reply.status(404, NO_WORKER),
]


@pytest.mark.parametrize("reply", PASSING, ids=repr)
async def test_generate_retries_under_another_rid(reply: Reply) -> None:
    async with FakeSGLang([reply, reply, OK]) as fake:
        generation = await ask(fake)
    assert (generation.attempts, [r.rid for r in fake.requests]) == (3, ["r", "r-2", "r-3"])
    assert (generation.rid, len({r.body.pop("rid") for r in fake.requests})) == ("r-3", 3)
    assert fake.requests[0].body == fake.requests[2].body


@pytest.mark.parametrize("status", [400, 404, 302])
async def test_generate_does_not_retry_refused_request(status: int) -> None:
    async with FakeSGLang(lambda _r, _n: Reply.status(status, "top_q is no sampling parameter")) as fake:
        with pytest.raises(EngineRejectedError, match=f"HTTP {status}: top_q is no sampling parameter") as error:
            await ask(fake)
    assert (error.value.status_code, len(fake.requests)) == (status, 1)


@pytest.mark.parametrize(
    ("message", "limit"),
    [
        ("The input (5000 tokens) is longer than the model's context length (4096 tokens).", 4096),
        ("Requested token count exceeds the model's maximum context length of 512 tokens. You requested 600", 512),
        ("Input length (99 tokens) exceeds the maximum allowed length (64 tokens).", 64),
        ("Prompt is longer than the context length", None),
    ],
)
async def test_generate_overlong_error_has_the_servers_limit(message: str, limit: int | None) -> None:
    async with FakeSGLang([Reply.status(400, {"error": {"message": message}})]) as fake:
        with pytest.raises(EngineOverlongError, match="refused the request as too long: ") as error:
            await ask(fake)
    assert error.value.context_length == limit
    assert message in str(error.value)


async def test_generate_honours_and_caps_retry_after() -> None:
    waits = Waits()
    replies = [Reply.status(503, headers={"Retry-After": s}) for s in ("3", "3600", "Wed, 21 Oct 2026 07:28:00 GMT")]
    async with FakeSGLang([*replies, OK]) as fake:
        await ask(fake, sleep=waits, backoff_cap_s=5.0)
    assert waits[:2] == [3.0, 5.0]
    assert waits[2] <= 1.0


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply.raw(b"<html>hello"), r".* not valid JSON: b'<html>hello' \(11 bytes\)"),
        (Reply.cut(), "the last failed with: HTTP 200 whose body ended early"),
    ],
    ids=["garbage", "half a body"],
)
async def test_generate_retries_body_that_is_not_json_once(reply: Reply, words: str) -> None:
    async with FakeSGLang([reply, OK]) as fake:
        assert (await ask(fake)).output_ids == [7]
    async with FakeSGLang([reply] * 9) as fake:
        with pytest.raises(EngineResponseError, match=f"in 2 attempts; {words}"):
            await ask(fake)
    assert len(fake.requests) == 2


async def test_generate_makes_at_most_max_attempts() -> None:
    async with FakeSGLang([Reply.status(503), Reply.status(500), Reply.reset(), OK]) as fake:
        with pytest.raises(EngineUnavailableError, match="in 3 attempts"):
            await ask(fake, max_attempts=3)
    assert len(fake.requests) == 3


async def test_generate_aborts_slow_request_before_retry() -> None:
    arrived: list[tuple[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        arrived.append((request.url.path, orjson.loads(request.content)["rid"]))
        if len(arrived) == 1:
            raise httpx.ReadTimeout("no answer")
        meta = {"finish_reason": {"type": "length", "length": 1}, "output_token_logprobs": [[-1.5, 3, None]]}
        return httpx.Response(200, content=orjson.dumps({"output_ids": [3], "meta_info": meta}))

    async with httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(answer)) as http:
        generation = await SGLangClient(http, sleep=Waits()).generate([1], {}, rid="slow")
    assert arrived == [("/generate", "slow"), ("/abort_request", "slow"), ("/generate", "slow-2")]
    assert generation.rid == "slow-2"


async def test_generate_does_not_retry_unconfirmed_abort() -> None:
    async with FakeSGLang([Reply.hang(), OK], router=True) as fake, create_client(fake.base_url, timeout=0.2) as http:
        with pytest.raises(
            EngineUnavailableError, match=r"no answer within the read timeout of 0.2 s, and did not confirm"
        ):
            await SGLangClient(http, sleep=Waits()).generate([1], {})
    assert len(fake.requests) == 1


async def test_server_info_of_dead_engine_raises() -> None:
    url, waits = dead_url(), Waits()
    async with SGLangClient(url, sleep=waits, clock=lambda: 0.0) as client:
        with pytest.raises(EngineUnavailableError, match=f"no answer from {url}/server_info: Cannot connect"):
            await client.server_info()
        assert sum(waits) == pytest.approx(90.0)
        assert not await client.health()
        assert not await client.abort("r")


async def test_server_info_is_retried_until_the_engine_is_back() -> None:
    async with FakeSGLang([OK], context_length=77) as fake:
        fake.outage = Reply.reset()

        async def sleep(_seconds: float) -> None:
            fake.outage = None if len(fake.refused_paths) >= 3 else fake.outage

        async with SGLangClient(fake.base_url, sleep=sleep) as client:
            infos = await asyncio.gather(*(client.server_info() for _ in range(5)))
    assert {info.context_length for info in infos} == {77}
    assert 3 <= len(fake.refused_paths) <= 5


@pytest.mark.parametrize("reply", [Reply.status(503), Reply.reset(), Reply.cut(), Reply.raw(b"{")], ids=repr)
async def test_faults_are_the_same_through_httpx_transport(reply: Reply) -> None:
    async with FakeSGLang([reply, OK]) as fake, httpx.AsyncClient(base_url=fake.base_url) as http:
        assert (await SGLangClient(http, sleep=Waits()).generate([1], {})).attempts == 2


async def test_generate_logs_one_warning_per_outage(caplog: pytest.LogCaptureFixture) -> None:
    script = [Reply.status(503, "busy")] * 3 + [OK]
    async with FakeSGLang(script) as fake:
        await ask(fake)
    records = [r for r in caplog.records if r.name == "strands_rollout.client.client"]
    assert [r.levelname for r in records if r.levelname != "DEBUG"] == ["WARNING", "WARNING"]
    assert "event=engine_fault" in records[0].getMessage()
    assert "kind=busy answer=HTTP 503: busy" in records[0].getMessage()
    assert "event=engine_recovered" in records[-1].getMessage()


@pytest.mark.parametrize(("router", "asked"), [(True, 1), (False, 20)])
async def test_stop_aborts_each_request_but_asks_a_router_once(router, asked) -> None:
    async with FakeSGLang([], router=router) as fake, SGLangClient(fake.base_url) as client:
        stopped = await asyncio.gather(*(client.stop(f"rid-{number}") for number in range(19)))
        stopped.append(await client.stop("rid-19"))
    assert stopped == [not router] * 20
    assert len({body["rid"] for body in fake.aborts}) == len(fake.aborts) == asked
