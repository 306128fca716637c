"""The client of OpenAI-compatible APIs: requests, retries, and messages of failures."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from fake_sglang import dead_url

from strands_rollout.client.chat_api import ChatApi
from strands_rollout.errors import EngineRejectedError, EngineResponseError, EngineUnavailableError

QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]
ANSWER = {"role": "assistant", "content": "4"}


@asynccontextmanager
async def answering(*answers: Any) -> AsyncIterator[tuple[str, list[Any]]]:
    """Serve these bodies or statuses in turn; yield the URL and the received requests."""
    left, seen = list(answers), []

    async def complete(request: web.Request) -> web.Response:
        seen.append((request.headers.get("Authorization"), await request.json()))
        answer = left.pop(0)
        return web.Response(status=answer) if isinstance(answer, int) else web.json_response(answer)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", seen
    finally:
        await runner.cleanup()


async def test_complete_sends_key_params_and_tools() -> None:
    async with answering(*[{"choices": [{"message": ANSWER}]}] * 2) as (url, seen):
        assert await ChatApi(f"{url}/", "m").complete(QUESTION) == ANSWER
        await ChatApi(url, "m", "k", {"temperature": 0}).complete(QUESTION, [{"type": "function"}])
    plain = {"model": "m", "messages": QUESTION}
    assert seen == [(None, plain), ("Bearer k", {"temperature": 0, **plain, "tools": [{"type": "function"}]})]


async def test_complete_retries_busy_api() -> None:
    message = "gave no chat completion in 1 attempt; the last failed with: HTTP 500"
    async with answering(503, 429, {"choices": [{"message": ANSWER}]}, 500) as (url, seen):
        assert await ChatApi(url, "m", retries=2).complete(QUESTION) == ANSWER
        with pytest.raises(EngineUnavailableError, match=message):
            await ChatApi(url, "m").complete(QUESTION)
    assert len(seen) == 4


async def test_complete_does_not_retry_refusal() -> None:
    async with answering(401) as (url, seen):
        with pytest.raises(EngineRejectedError, match="refused the request with HTTP 401"):
            await ChatApi(url, "m", retries=3).complete(QUESTION)
    assert len(seen) == 1


async def test_complete_errors_mask_password() -> None:
    url = dead_url().replace("://", "://me:s3cret@")
    with pytest.raises(EngineUnavailableError) as refused:
        await ChatApi(url, "m").complete(QUESTION)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("body", [[], {}, {"choices": []}, {"choices": [{"message": "4"}]}], ids=repr)
async def test_complete_rejects_other_answers(body: Any) -> None:
    async with answering(body) as (url, _):
        with pytest.raises(EngineResponseError, match="expected a"):
            await ChatApi(url, "m").complete(QUESTION)
