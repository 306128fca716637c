"""The gateway alone, and the embedded engine's endpoints of each API."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from fake_sglang import FakeSGLang, Reply
from harness import call_text, ids_of
from programs import TOOLS
from test_matching import ASK, result

from strands_rollout.dump import read_dump
from strands_rollout.engine import SHIPPED_MODEL_DIR, running_engine
from strands_rollout.errors import ConfigError
from strands_rollout.gateway.server import start
from strands_rollout.integrations.sessions import SessionServer, chat_endpoint, serve_sessions

TURNS = [call_text(name="add"), "It is 34.<|im_end|>", "A title.<|im_end|>"]


@asynccontextmanager
async def served(
    tokenizer: Any, turns: list[str], gate: asyncio.Event | None = None, **options: Any
) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    replies = [Reply.tokens(ids_of(tokenizer, turn)) for turn in turns]
    if gate is not None:
        replies = [reply.once_set(gate) for reply in replies]
    async with FakeSGLang(replies, context_length=8192) as fake, aiohttp.ClientSession() as http:
        sessions = SessionServer(tokenizer, fake.base_url, **options)
        runner = await start(sessions.gateway, routes=sessions.routes())
        yield sessions.gateway.base_url, http
        await runner.cleanup()


async def chat(http: aiohttp.ClientSession, session: Any, messages: list[Any], **fields: Any) -> dict[str, Any]:
    headers, url = {"x-api-key": session["api_key"]}, f"{session['base_url']}/chat/completions"
    async with http.post(url, json={"messages": messages, **fields}, headers=headers) as answer:
        return {"status": answer.status, **await answer.json()}


async def test_sessions_write_their_samples_as_a_dump(shipped_tokenizer: Any, tmp_path: Path) -> None:
    async with served(shipped_tokenizer, TURNS) as (url, http):
        options = {"sampling_params": {"temperature": 0.7}, "index": 5, "label": "34", "metadata": {"task": 10**30}}
        session = await (await http.post(f"{url}/sessions", json=options)).json()
        messages: list[Any] = [ASK]
        answer = await chat(http, session, messages, tools=TOOLS, temperature=0.1)
        messages += [answer["choices"][0]["message"], result(answer["choices"][0]["message"])]
        await chat(http, session, messages, tools=TOOLS)
        await chat(http, session, [{"role": "user", "content": "Name it."}])
        path = tmp_path / "samples.jsonl"
        path.write_bytes(await (await http.get(f"{url}/sessions/{session['id']}/samples")).read())
        facts = await (await http.get(f"{url}/sessions/{session['id']}")).json()
        assert (await http.delete(f"{url}/sessions/{session['id']}")).status == 204
        assert (await chat(http, session, [ASK]))["status"] == 401
        assert (await http.delete(f"{url}/sessions/{session['id']}")).status == 404
    main, title = [record.to_sample() for record in read_dump(path)]
    assert (main.index, main.label, main.metadata["task"]) == (5, "34", 10**30)
    sampled = [len(ids_of(shipped_tokenizer, turn)) for turn in TURNS]
    assert [sum(main.loss_mask), sum(title.loss_mask)] == [sum(sampled[:2]), sampled[2]]
    assert title.metadata["strands_rollout"]["fan_out"] == {"part": 1, "of": 2, "kind": "aside"}
    assert (facts["requests"], facts["forks"], facts["overridden"]) == (3, 0, {"temperature": 0.1})


async def test_sessions_are_refused_to_other_owners(shipped_tokenizer: Any) -> None:
    async with served(shipped_tokenizer, TURNS, owner_key="secret", idle_s=0.0) as (url, http):
        headers = {"Authorization": "Bearer secret"}
        assert (await http.post(f"{url}/sessions")).status == 401
        first = await (await http.post(f"{url}/sessions", headers=headers)).json()
        assert (await http.get(f"{url}/sessions/{first['id']}/samples")).status == 401
        refused = await http.post(f"{url}/sessions", headers=headers, json={"sampling": {}})
        assert (refused.status, "sampling" in await refused.text()) == (400, True)
        assert (await http.post(f"{url}/sessions", headers=headers, data=b"{")).status == 400
        await http.post(f"{url}/sessions", headers=headers)  # ends the first session, which was idle too long
        assert (await http.get(f"{url}/sessions/{first['id']}", headers=headers)).status == 404


@pytest.mark.parametrize("key", ["schlüssel".encode(), b"\xff"])
async def test_sessions_are_refused_to_keys_in_any_encoding(shipped_tokenizer: Any, key: bytes) -> None:
    async with served(shipped_tokenizer, TURNS, owner_key="secret") as (url, _):
        address = httpx.URL(url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"POST /sessions HTTP/1.0\r\nAuthorization: Bearer " + key + b"\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"401"
        writer.close()


async def test_sessions_with_a_request_in_flight_are_not_idle(shipped_tokenizer: Any) -> None:
    gate = asyncio.Event()
    async with served(shipped_tokenizer, TURNS[1:2], gate, idle_s=0.0) as (url, http):
        session = await (await http.post(f"{url}/sessions")).json()
        request = asyncio.create_task(chat(http, session, [ASK]))
        while (await http.get(f"{url}/sessions/{session['id']}/samples")).status != 409:
            pass
        await http.post(f"{url}/sessions")
        gate.set()
        assert (await request)["status"] == 200


async def test_sessions_on_a_public_port_need_an_owner(shipped_tokenizer: Any) -> None:
    sessions = SessionServer(shipped_tokenizer, "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"without an owner's key.*export STRANDS_ROLLOUT_GATEWAY_KEY="):
        await serve_sessions(sessions, "192.0.2.1", 0, lambda _url: None)


async def test_embedded_engine_answers_each_api() -> None:
    question = "Ben buys 17 apples at 2 dollars each. How many dollars does Ben spend?"
    routes = chat_endpoint(SHIPPED_MODEL_DIR).routes()
    async with running_engine(routes=routes) as url, aiohttp.ClientSession() as http:
        bodies = {"/v1/chat/completions": "messages", "/v1/messages": "messages", "/v1/responses": "input"}
        for path, name in bodies.items():
            limit = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
            body = {name: [{"role": "user", "content": question}], limit: 8, "temperature": 0}
            answer = await http.post(url + path, json=body)
            assert answer.status == 200, await answer.text()
            assert 0 < (await answer.json())["usage"].get("output_tokens", 8) <= 8
