"""The fake itself: its shapes, its faults, and that it sees a broken token-in/token-out rule."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from fake_sglang import FakeSGLang, Reply, dead_url


async def ask(fake: FakeSGLang, ids: list[int], **body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{fake.base_url}/generate", json={"input_ids": ids, "return_logprob": True, **body}) as response,
    ):
        text = await response.text()
        return response.status, await response.json() if text.startswith("{") else text


async def test_replies_come_in_order_with_sglangs_shapes() -> None:
    script = [Reply.tokens([5, 6]), Reply.tokens([7], "length"), Reply.abort(), Reply.status(503, "busy")]
    async with FakeSGLang(script) as fake:
        stop, length, queued, busy = [await ask(fake, [1, 2], rid=f"r{n}") for n in range(4)]
    assert stop[1]["output_ids"] == [5, 6]
    assert stop[1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": 6}
    assert stop[1]["meta_info"]["output_token_logprobs"] == [[-0.5, 5, None], [-0.5, 6, None]]
    assert length[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    assert queued[1]["output_ids"] == []
    assert not {"prompt_tokens", "cached_tokens"} & set(queued[1]["meta_info"])
    assert busy == (503, "busy")
    assert [r.rid for r in fake.requests] == ["r0", "r1", "r2", "r3"]


async def test_extension_is_accepted_and_a_changed_token_is_a_violation() -> None:
    async with FakeSGLang(lambda _request, _n: Reply.tokens([5, 6])) as fake:
        for ids in ([1, 2], [1, 2, 5, 6, 9], [1, 2, 5, 6, 9], [1, 2, 5, 6, 9, 5, 6, 3], [1, 2]):
            await ask(fake, ids)
        assert fake.violations == []
        await ask(fake, [1, 2, 5, 7, 9])
    assert fake.violations == [
        "request 5: its 5 ids don't extend the 4 of the last request and its output; they differ from position 3"
    ]


async def test_a_hanging_request_ends_by_abort_and_a_lost_client_is_seen() -> None:
    async with FakeSGLang(lambda _request, _n: Reply.hang([8])) as fake, aiohttp.ClientSession() as http:
        asking = asyncio.create_task(ask(fake, [1], rid="a"))
        await fake.arrived()
        await http.post(f"{fake.base_url}/abort_request", json={"rid": "a"})
        _, answer = await asking
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["output_ids"] == [8]
        leaving = asyncio.create_task(ask(fake, [1], rid="b"))
        await fake.arrived(2)
        leaving.cancel()
        async with asyncio.timeout(30):
            while fake.disconnects != ["b"]:  # noqa: ASYNC110 - the list is the server's
                await asyncio.sleep(0.005)


async def test_cut_and_reset_break_the_connection() -> None:
    async with FakeSGLang([Reply.cut(), Reply.reset()]) as fake:
        with pytest.raises(aiohttp.ClientPayloadError):
            await ask(fake, [1])
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await ask(fake, [1])


async def test_too_long_gets_the_two_messages_of_sglang() -> None:
    async with FakeSGLang([], context_length=4) as fake:
        status, answer = await ask(fake, [1, 2, 3, 4])
        assert (status, answer["error"]["message"][:33]) == (400, "The input (4 tokens) is longer th")
        status, answer = await ask(fake, [1, 2], sampling_params={"max_new_tokens": 3})
        assert "maximum context length of 4 tokens" in answer["error"]["message"]


async def test_nothing_listens_on_a_dead_url() -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(dead_url())
