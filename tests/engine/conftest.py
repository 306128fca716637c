"""Fixtures of the engine's tests: tiny model folders, engines on loopback ports, and a client for each."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from scripted_qwen3 import write_scripted_qwen3
from tiny_qwen3 import TinyQwen3, build_tokenizer

from strands_rollout.engine import running_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
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


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a context of 512 tokens."""
    return TinyQwen3().write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape with other weights."""
    return TinyQwen3(seed=1).write(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="session")
def long_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a context long enough for a generation to be interrupted."""
    return TinyQwen3(context_length=16384).write(tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="session")
def scripted_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that calls a tool, reads the result and answers."""
    return write_scripted_qwen3(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tiny models' tokenizer."""
    return build_tokenizer()


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Any]]:
    """Starts engines that live until the test ends: `api = await start(folder, max_running_requests=2)`."""
    async with AsyncExitStack() as stack:

        async def enter(model_dir: Path, **options: Any) -> Api:
            return await stack.enter_async_context(api_to(model_dir, **options))

        yield enter


@pytest.fixture
async def embedded(tiny_dir: Path) -> AsyncIterator[Api]:
    """An embedded engine with the tiny model, for what only it promises."""
    async with api_to(tiny_dir) as client:
        yield client


@pytest.fixture
async def api(tiny_dir: Path) -> AsyncIterator[Api]:
    """A server with the tiny model: the embedded engine, or the real SGLang at SGLANG_BASE_URL.

    The real one must serve the folder that `python tests/engine/tiny_qwen3.py FOLDER` writes.
    """
    real = os.environ.get("SGLANG_BASE_URL")
    if real is None:
        async with api_to(tiny_dir) as client:
            yield client
        return
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        client = Api(real, session)
        while (await client.post("/flush_cache")).status != 200:  # noqa: ASYNC110 - busy with the last test's rest
            await asyncio.sleep(0.05)
        yield client
