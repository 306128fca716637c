"""HTTP client for one engine, and helpers that run the embedded engine or bring an engine to a known load."""

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
# this timeout only guards against hangs; it is below pytest's own timeout, whose message says less
_PATIENCE_S = 240.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and decoded body of a response."""

    status: int
    body: Any


class Api:
    """Client for the HTTP API of one engine."""

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
        """Return a successful generation; `fields` are sampling parameters or top-level fields of the request."""
        body = {name: fields.pop(name) for name in _TOP_LEVEL & set(fields)}
        if "text" not in body:
            body["input_ids"] = input_ids
        answer = await self.post("/generate", {**body, "sampling_params": fields})
        assert answer.status == 200, answer
        return answer.body

    async def events(self, path: str, body: object) -> AsyncIterator[str]:
        """Yield the data of each server-sent event."""
        async with self._session.post(self.base_url + path, json=body) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            async for line in response.content:
                if line.strip():
                    yield line.decode().removeprefix("data: ").strip()

    async def load(self) -> tuple[int, int]:
        """Return the numbers of running and of queued generations."""
        loads = (await self.get("/v1/loads")).body["loads"][0]
        return loads["num_running_reqs"], loads["num_waiting_reqs"]


async def _read(response: aiohttp.ClientResponse) -> Any:
    if response.content_type == "application/json":
        return await response.json()
    return await response.text()


@asynccontextmanager
async def client_session() -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session without keep-alive: SGLang closes connections that a test leaves idle for 5 s."""
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield session


@asynccontextmanager
async def serve_engine(model_dir: Path | None, **options: Any) -> AsyncIterator[Api]:
    """Run an embedded engine on `model_dir`, or on the shipped model, and yield a client for it."""
    async with running_engine(model_dir, **options) as base_url, client_session() as session:
        yield Api(base_url, session)


async def wait_for_load(api: Api, running: int, waiting: int = 0, *, falling: bool = False) -> None:
    """Wait until `running` generations run and `waiting` are queued; with `falling`, fail once the total is lower."""
    wanted, seen = (running, waiting), [await api.load()]
    with suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            while seen[-1] != wanted and not (falling and sum(seen[-1]) < sum(wanted)):
                await asyncio.sleep(_POLL_S)
                load = await api.load()
                seen += [load] if load != seen[-1] else []
    assert seen[-1] == wanted, f"expected {wanted} running and waiting within {_PATIENCE_S:.0f} s, got {seen}"


async def start_stream(api: Api, tokens: int = 3, **fields: Any) -> asyncio.Task[dict[str, Any]]:
    """Start a stream and return its task after `tokens` tokens; the task returns the last event before `[DONE]`."""
    has_enough_tokens = asyncio.Event()
    rid = fields.pop("rid", None)
    body = {"input_ids": IDS, "sampling_params": fields, "stream": True, "return_logprob": True, "rid": rid}

    async def read() -> dict[str, Any]:
        async for event in api.events("/generate", body):
            if event != "[DONE]":
                state = json.loads(event)
            if len(state["output_ids"]) >= tokens:
                has_enough_tokens.set()
        return state

    task = asyncio.create_task(read())
    await has_enough_tokens.wait()
    return task


async def queued_request(api: Api, rid: str, **fields: Any) -> asyncio.Task[Answer]:
    """Send a request that the engine keeps waiting, and return its task once the engine has it.

    A second request with the same id proves the arrival: the engine refuses it as a duplicate.
    """
    body = {"input_ids": IDS, "rid": rid, "sampling_params": fields}
    sent = {asyncio.create_task(api.post("/generate", body)) for _ in range(2)}
    [refused], [waiting] = await asyncio.wait(sent, return_when=asyncio.FIRST_COMPLETED)
    expected = {"error": {"message": f"Duplicate request ID detected: {rid}"}}
    assert (refused.result().status, refused.result().body) == (400, expected)
    return waiting


@asynccontextmanager
async def in_flight(
    api: Api, *rids: str, disconnects: bool = False, **fields: Any
) -> AsyncIterator[list[asyncio.Task[dict[str, Any]]]]:
    """Run long generations during the block; yield their tasks.

    At the end, abort the generations, which SGLang notices immediately; with `disconnects`, only close their
    connections.
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
