"""The recording proxy: what crosses it is recorded and unchanged, and a fault of the engine stays that fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from fake_sglang import ROUTING_HEADER, FakeSGLang, Reply, dead_url

from strands_rollout.errors import EngineUnavailableError
from strands_rollout.sglang_client import SGLangClient
from strands_rollout.wire_recorder import Exchange, WireRecorder, recording

PARAMS = {"max_new_tokens": 4}


@dataclass(frozen=True)
class Line:
    """A client, the proxy and a scripted engine, in that order."""

    client: SGLangClient
    recorder: WireRecorder
    fake: FakeSGLang


@asynccontextmanager
async def line(script: Sequence[Reply], **server: Any) -> AsyncIterator[Line]:
    async with (
        FakeSGLang(script, **server) as fake,
        recording(fake.base_url) as recorder,
        SGLangClient(recorder.url, backoff_base_s=0.001) as client,
    ):
        yield Line(client, recorder, fake)


async def test_ids_and_logprobs_are_recorded_by_routing_key_as_the_client_got_them() -> None:
    async with line([Reply.tokens([5, 6], logprobs=[-0.5, -0.25]), Reply.tokens([7])]) as wire:
        first = await wire.client.generate([1, 2], PARAMS, headers={ROUTING_HEADER: "a"})
        second = await wire.client.generate([3], PARAMS, headers={ROUTING_HEADER: "b"})
        assert wire.recorder.episodes == {
            "a": [Exchange([1, 2], [5, 6], [-0.5, -0.25])],
            "b": [Exchange([3], [7], [-0.5])],
        }
    assert (first.output_ids, second.output_ids) == ([5, 6], [7])
    assert [request.input_ids for request in wire.fake.requests] == [[1, 2], [3]]


async def test_an_answer_without_a_generation_is_recorded_as_none() -> None:
    async with line([Reply.status(503), Reply.tokens([7])]) as wire:
        await wire.client.generate([1], PARAMS)
        assert wire.recorder.episodes == {"": [Exchange([1], None, []), Exchange([1], [7], [-0.5])]}


async def test_a_cut_connection_reaches_the_client_as_one() -> None:
    async with line([Reply.cut(), Reply.reset(), Reply.tokens([7])]) as wire:
        generation = await wire.client.generate([1], PARAMS)
        assert generation.attempts == 3
        assert [exchange.output_ids for exchange in wire.recorder.episodes[""]] == [None, None, [7]]


async def test_a_dead_engine_is_unavailable_through_the_proxy_too() -> None:
    async with recording(dead_url()) as recorder, SGLangClient(recorder.url, max_attempts=1) as client:
        with pytest.raises(EngineUnavailableError):
            await client.generate([1], PARAMS)


async def test_an_engine_that_gives_no_answer_is_not_given_one_by_the_proxy() -> None:
    async with recording(dead_url()) as recorder, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await session.post(f"{recorder.url}/generate", json={"input_ids": [1]})


async def test_a_client_that_goes_away_has_its_request_dropped_at_the_engine() -> None:
    async with line([Reply.hang()], router=True) as wire:
        task = asyncio.create_task(wire.client.generate([1], PARAMS, rid="gone"))
        await wire.fake.arrived()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(200):
            if wire.fake.disconnects:
                break
            await asyncio.sleep(0.01)
        assert wire.fake.disconnects == ["gone"]


async def test_other_endpoints_pass() -> None:
    async with line([], context_length=77) as wire:
        assert (await wire.client.server_info()).context_length == 77
        assert wire.recorder.episodes == {}
