"""A client for one engine, engines on loopback ports for it, and generations that are under way."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiohttp

from strands_rollout.engine import running_engine

IDS = list(range(40, 80))
LONG = {"max_new_tokens": 15000, "ignore_eos": True}
_TOP_LEVEL = {
    "rid",
    "text",
    "stream",
    "return_logprob",
    "return_text_in_logprobs",
    "top_logprobs_num",
    "token_ids_logprob",
    "logprob_start_len",
}
# against hangs alone: a loaded machine takes its time; pytest's own limit, which says less, comes later
_PATIENCE_S = 240.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: Any


class Api:
    def __init__(self, base_url: str, session: aiohttp.ClientSession) -> None:
        self.base_url = base_url
        self._session = session

    async def post(self, path: str, body: object = None) -> Answer:
        async with self._session.post(self.base_url + path, json=body) as response:
            return Answer(response.status, await _read(response))

    async def post_bytes(self, path: str, body: bytes | IO[bytes], content_type: str) -> Answer:
        headers = {"Content-Type": content_type}
        async with self._session.post(self.base_url + path, data=body, headers=headers) as response:
            return Answer(response.status, await _read(response))

    async def get(self, path: str) -> Answer:
        async with self._session.get(self.base_url + path) as response:
            return Answer(response.status, await _read(response))

    async def generate(self, input_ids: list[int] = IDS, **fields: Any) -> dict[str, Any]:
        """A successful generation; sampling parameters go by name, the request's own fields too."""
        body = {name: fields.pop(name) for name in _TOP_LEVEL & set(fields)}
        if "text" not in body:
            body["input_ids"] = input_ids
        answer = await self.post("/generate", {**body, "sampling_params": fields})
        assert answer.status == 200, answer
        return answer.body

    async def events(self, path: str, body: object) -> AsyncIterator[str]:
        """The data of each server-sent event."""
        async with self._session.post(self.base_url + path, json=body) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            async for line in response.content:
                if line.strip():
                    yield line.decode().removeprefix("data: ").strip()

    async def load(self) -> tuple[int, int]:
        """How many generations run and how many wait."""
        loads = (await self.get("/v1/loads")).body["loads"][0]
        return loads["num_running_reqs"], loads["num_waiting_reqs"]


async def _read(response: aiohttp.ClientResponse) -> Any:
    if response.content_type == "application/json":
        return await response.json()
    return await response.text()


@asynccontextmanager
async def client_session() -> AsyncIterator[aiohttp.ClientSession]:
    """A session without kept connections: SGLang closes them after 5 s, in which a test may do sums of its own."""
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield session


@asynccontextmanager
async def serve_engine(model_dir: Path | None, **options: Any) -> AsyncIterator[Api]:
    """An engine on `model_dir`, or on the shipped model, and a client for it."""
    async with running_engine(model_dir, **options) as base_url, client_session() as session:
        yield Api(base_url, session)


async def wait_for_load(api: Api, running: int, waiting: int = 0, *, falling: bool = False) -> None:
    """Wait until so many generations run and so many are queued; where the load falls, a lower one fails at once."""
    wanted, seen = (running, waiting), [await api.load()]
    with suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            while seen[-1] != wanted and not (falling and sum(seen[-1]) < sum(wanted)):
                await asyncio.sleep(_POLL_S)
                load = await api.load()
                seen += [load] if load != seen[-1] else []
    assert seen[-1] == wanted, f"expected {wanted} running and waiting within {_PATIENCE_S:.0f} s, got {seen}"


async def start_stream(api: Api, tokens: int = 3, **fields: Any) -> asyncio.Task[dict[str, Any]]:
    """A streamed generation that has made so many tokens; the task's result is the last state of its answer."""
    under_way = asyncio.Event()
    rid = fields.pop("rid", None)
    body = {"input_ids": IDS, "sampling_params": fields, "stream": True, "return_logprob": True, "rid": rid}

    async def read() -> dict[str, Any]:
        async for event in api.events("/generate", body):
            if event != "[DONE]":
                state = json.loads(event)
            if len(state["output_ids"]) >= tokens:
                under_way.set()
        return state

    task = asyncio.create_task(read())
    await under_way.wait()
    return task


async def queued_request(api: Api, rid: str, **fields: Any) -> asyncio.Task[Answer]:
    """A request that has come to an engine that lets it wait: of two with one id, whichever comes second is refused."""
    body = {"input_ids": IDS, "rid": rid, "sampling_params": fields}
    asked = {asyncio.create_task(api.post("/generate", body)) for _ in range(2)}
    [refused], [waiting] = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    expected = {"error": {"message": f"Duplicate request ID detected: {rid}"}}
    assert (refused.result().status, refused.result().body) == (400, expected)
    return waiting


@asynccontextmanager
async def in_flight(
    api: Api, *rids: str, disconnects: bool = False, **fields: Any
) -> AsyncIterator[list[asyncio.Task[dict[str, Any]]]]:
    """Long generations that run while the block does; yields their tasks.

    They end by an abort, of which SGLang takes notice at once; or, if asked for, only because their client is gone.
    """
    tasks = [asyncio.create_task(api.generate(rid=rid, **(LONG | fields))) for rid in rids]
    try:
        yield tasks
    finally:
        for rid in () if disconnects else rids:
            await api.post("/abort_request", {"rid": rid})
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
