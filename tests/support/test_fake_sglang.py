"""The fake itself: its shapes, its faults, and that it sees a broken token-in/token-out rule."""

import asyncio
from typing import Any

import aiohttp
from fake_sglang import FakeSGLang, Reply


async def ask(fake: FakeSGLang, ids: list[int], **body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{fake.base_url}/generate", json={"input_ids": ids, "return_logprob": True, **body}) as response,
    ):
        text = await response.text()
        return response.status, await response.json() if text.startswith("{") else text


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
