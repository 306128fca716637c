"""The proxy before real workers: a worker that is gone leaves nobody waiting."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator

import aiohttp
import pytest
from fake_sglang import FakeSGLang, Reply
from worker_front import WorkerFront


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Nothing is collected but on request, as in a process that does little."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
async def test_a_connection_accepted_while_it_closes_is_cut() -> None:
    async with WorkerFront("http://127.0.0.1:1") as front:
        with socket.create_connection(("127.0.0.1", int(front.base_url.rpartition(":")[2])), timeout=5.0) as client:
            # in the first turn of the loop the listener sees the client; in the second it takes it in
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await front.close()
            assert await asyncio.to_thread(client.recv, 1) == b""


async def test_a_request_under_way_is_cut_when_it_closes() -> None:
    async with (
        FakeSGLang([Reply.hang()]) as fake,
        WorkerFront(fake.base_url) as front,
        aiohttp.ClientSession() as session,
    ):
        asking = asyncio.create_task(session.post(f"{front.base_url}/generate", json={"input_ids": [1]}))
        await fake.arrived()
        await front.close()
        with pytest.raises(aiohttp.ClientError):
            await asking
    assert [passage.meta_info for passage in front.passages] == [{}]
