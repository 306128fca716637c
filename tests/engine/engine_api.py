"""A client for one engine, and engines on loopback ports for it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from strands_rollout.engine import running_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

IDS = list(range(40, 80))


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
