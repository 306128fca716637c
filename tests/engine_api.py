"""A client for one engine, engines on loopback ports for it, and generations that are under way."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from strands_rollout.engine import running_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

IDS = list(range(40, 80))
LONG = {"max_new_tokens": 15000, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer, read."""

    status: int
    body: Any


class Api:
    """Speaks to one engine."""

    def __init__(self, base_url: str, session: aiohttp.ClientSession) -> None:
        self.base_url = base_url
        self._session = session

    async def post(self, path: str, body: object = None) -> Answer:
        async with self._session.post(self.base_url + path, json=body) as response:
            return Answer(response.status, await _read(response))

    async def post_bytes(self, path: str, body: bytes, content_type: str) -> Answer:
        headers = {"Content-Type": content_type}
        async with self._session.post(self.base_url + path, data=body, headers=headers) as response:
            return Answer(response.status, await _read(response))

    async def get(self, path: str) -> Answer:
        async with self._session.get(self.base_url + path) as response:
            return Answer(response.status, await _read(response))

    async def generate(self, input_ids: list[int] = IDS, **fields: Any) -> dict[str, Any]:
        """A successful generation; sampling parameters go by name, the request's own fields too."""
        top_level = {"rid", "return_logprob", "return_text_in_logprobs", "text"} & set(fields)
        body = {name: fields.pop(name) for name in top_level}
        if "text" not in body:
            body["input_ids"] = input_ids
        answer = await self.post("/generate", {**body, "sampling_params": fields})
        assert answer.status == 200, answer
        return answer.body

    async def events(self, path: str, body: object) -> AsyncIterator[str]:
        """The data of each server-sent event."""
        async with self._session.post(self.base_url + path, json=body) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
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
async def api_to(model_dir: Path, **options: Any) -> AsyncIterator[Api]:
    """An engine on `model_dir` and a client for it."""
    async with (
        running_engine(model_dir, **options) as base_url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
    ):
        yield Api(base_url, session)


async def until_load(api: Api, running: int, waiting: int = 0) -> None:
    """Wait until so many generations run and so many are queued."""
    async with asyncio.timeout(10):
        while await api.load() != (running, waiting):  # noqa: ASYNC110 - the state polled is the server's
            await asyncio.sleep(0.005)


async def streaming(api: Api, tokens: int = 3, **fields: Any) -> asyncio.Task[dict[str, Any]]:
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


@asynccontextmanager
async def in_flight(api: Api, *rids: str, **fields: Any) -> AsyncIterator[list[asyncio.Task[dict[str, Any]]]]:
    """Long generations that run while the block does; yields their tasks."""
    tasks = [asyncio.create_task(api.generate(rid=rid, **(LONG | fields))) for rid in rids]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
