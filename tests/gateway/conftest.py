"""A session behind a real endpoint, against a scripted SGLang."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from clients import Api
from fake_sglang import FakeSGLang, Reply
from harness import ids_of
from programs import PATHS

from strands_rollout.gateway.program import Endpoint
from strands_rollout.gateway.server import Gateway, start
from strands_rollout.gateway.session import Session, SessionEndedError
from strands_rollout.model.sglang_model import SGLangModel


@dataclass
class Stage:
    """A session of the gateway, its key, and an HTTP client for it."""

    session: Session
    gateway: Gateway
    fake: FakeSGLang
    key: str
    http: aiohttp.ClientSession
    tokenizer: Any

    async def post(self, api: str, body: Any, *, key: str | None = None, **kwargs: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        url = self.gateway.base_url + PATHS.get(api, api)
        async with self.http.post(url, json=body, headers=headers, **kwargs) as response:
            is_json = response.content_type == "application/json"
            return response.status, await response.json() if is_json else await response.text()

    def client(self, api: Api) -> Any:
        """Return the SDK's client of an API, connected to the session."""
        return api.client(Endpoint(f"{self.gateway.base_url}/v1", self.key, "m"), is_async=True)

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """Send a chat completion request, and return the assistant's message."""
        status, body = await self.post("chat", {"model": "m", "messages": messages, **fields})
        assert status == 200, body
        return dict(body["choices"][0]["message"])

    @property
    def text(self) -> str:
        return str(self.tokenizer.decode(self.session.model.trajectory.token_ids))


Script = Sequence[str | Reply] | Callable[[dict[str, Any], int], str | Reply]


@pytest.fixture
def stage(shipped_tokenizer: Any) -> Callable[..., Any]:
    @asynccontextmanager
    async def made(
        script: Script, *, branches: bool = False, held: asyncio.Event | None = None, **config: Any
    ) -> AsyncIterator[Stage]:
        async def reply(body: dict[str, Any], number: int) -> Reply:
            if held is not None:
                await held.wait()
            item = script(body, number) if callable(script) else script[number]
            return Reply.tokens(ids_of(shipped_tokenizer, item)) if isinstance(item, str) else item

        async with FakeSGLang(reply, context_length=8192) as fake, aiohttp.ClientSession() as http:
            many = {"conversations": "many", "on_rewritten_history": "segment"}
            session = Session(SGLangModel(shipped_tokenizer, fake.base_url, **many, **config))
            gateway = Gateway()
            runner = await start(gateway)
            key = gateway.add(session)
            try:
                yield Stage(session, gateway, fake, key, http, shipped_tokenizer)
            finally:
                if key in gateway.keys:
                    await gateway.remove(key, SessionEndedError("the test is over"))
                await runner.cleanup()
            assert branches or fake.violations == []  # the fake engine expects a single growing history

    return made
