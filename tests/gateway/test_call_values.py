"""Call arguments that JSON libraries treat differently: clients get them as the policy wrote them, and they match."""

import json
from typing import Any

import pytest
from clients import CHAT, MESSAGES, RESPONSES, Api, ask
from harness import TOOL_CALL
from programs import PATHS, TOOLS
from test_matching import ASK, END

from strands_rollout.gateway.openai import ChatCompletions
from strands_rollout.gateway.protocols import Messages

APIS = [pytest.param(CHAT, id="chat"), pytest.param(RESPONSES, id="responses"), pytest.param(MESSAGES, id="messages")]
STREAMS = [pytest.param(False, id="whole"), pytest.param(True, id="stream")]


def written(text: str) -> str:
    """Return a turn that calls `add` with exactly these arguments."""
    return TOOL_CALL.format(name="add", arguments=text)


def arguments_of(api: Api, answer: Any) -> dict[str, Any]:
    if api is CHAT:
        return dict(json.loads(answer.choices[0].message.tool_calls[0].function.arguments))
    if api is RESPONSES:
        return dict(json.loads(next(item for item in answer.output if item.type == "function_call").arguments))
    return dict(next(block for block in answer.content if block.type == "tool_use").input)


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    "text",
    [
        '{"a": 18446744073709551616, "b": -9223372036854775809}',
        '{"a": [1000000000000000000000000000000], "b": {"c": -1000000000000000000000000000000}}',
        f'{{"a": -{"9" * 4300}}}',
        '{"a": 1.7e308, "b": -0.0, "c": 1e-400}',
        r'{"a": "\ud83d\ude00\u0000", "b": ' + "[" * 98 + "]" * 98 + "}",
    ],
    ids=["65 bits", "100 bits", "4300 digits", "floats", "pairs and depth"],
)
async def test_session_matches_call_arguments_sent_back(stage, api, streams, text):
    async with stage([written(text), END]) as made:
        async with made.client(api) as client:
            history, most = [ASK], {"max_tokens": 8000} if api is MESSAGES else {}
            answer = await ask(api, client, history, streams=streams, **most)
            assert arguments_of(api, answer) == json.loads(text)
            said, calls = api.said(answer)
            await ask(api, client, [*history, *said, *api.results(calls)], streams=streams)
        model, facts = made.session.model, made.session.facts
    assert (facts.requests, facts.forks, facts.changed_calls, facts.refused) == (2, 0, 0, {})
    assert [len(segment.trajectory.turns) for segment in model.conversation] == [2]


@pytest.mark.parametrize("api", APIS)
async def test_session_keeps_big_integers_and_lone_surrogates(stage, api):
    """The history comes from another program, as any JSON library may write it."""
    arguments = '{"a": 123456789012345678901234567890, "b": -123456789012345678901234567890, "c": "\\ud83d"}'
    call: Any = {"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}}
    history: list[Any] = [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": "x", "content": "cut in an emoji: \ud83d"}]
    if api is MESSAGES:
        use = {"type": "tool_use", "id": "x", "name": "add", "input": json.loads(arguments)}
        result = {"type": "tool_result", "tool_use_id": "x", "content": "cut in an emoji: \ud83d"}
        history = [ASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    if api is RESPONSES:
        history = [ASK, {"type": "function_call", "call_id": "x", "name": "add", "arguments": arguments}]
        history += [{"type": "function_call_output", "call_id": "x", "output": "cut in an emoji: \ud83d"}]
    path = {CHAT: "chat", RESPONSES: "responses", MESSAGES: "messages"}[api]
    async with stage([END, END]) as made:
        for _ in range(2):  # the second body extends the first, which the cache remembers
            status, answer = await made.post(path, api.request(history))
            assert status == 200, answer
            said = [{"role": "assistant", "content": "It is 34."}, ASK]
            history = [*history, *said]
        texts = [made.tokenizer.decode(one.input_ids) for one in made.fake.requests]
        assert made.session.facts.forks == 1  # the first request continues no recorded conversation
    assert all("123456789012345678901234567890" in text for text in texts)
    assert all("-123456789012345678901234567890" in text for text in texts)
    assert all("cut in an emoji: ?" in text for text in texts)


DEEP = "[" * 300 + "]" * 300


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat", {"messages": [ASK, {"role": "assistant", "tool_calls": [
            {"id": "x", "function": {"name": "add", "arguments": f'{{"a": {DEEP}}}'}}]}, ASK]}),
        ("responses", {"input": [
            ASK, {"type": "function_call", "call_id": "x", "name": "add", "arguments": f'{{"a": {DEEP}}}'}, ASK]}),
        ("messages", {"messages": [ASK, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "x", "name": "add", "input": {"a": json.loads(DEEP)}}]}, ASK]}),
        ("chat", {"messages": [ASK], "tools": [
            {"type": "function", "function": {"name": "add", "parameters": {"a": json.loads(DEEP)}}}]}),
    ],
)  # fmt: skip
async def test_session_refuses_deeply_nested_json(stage, path, body):
    async with stage([END]) as made:
        status, answer = await made.post(path, body)
        assert (status, "levels" in answer["error"]["message"]) == (400, True)
        assert (made.session.error, made.fake.requests) == (None, [])
        assert (await made.chat([ASK]))["content"] == "It is 34."


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat", '{"messages": [{"role": "user", "content": "Hi"}], "temperature": DEEP}'),
        ("chat", '{"messages": DEEP}'),
        ("chat", '{"messages": [{"role": "user", "content": "Hi"}], "tool_choice": DEEP}'),
        ("messages", '{"messages": [{"role": "user", "content": DEEP}]}'),
        ("responses", '{"input": DEEP}'),
        (
            "chat",
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "DEEP"}}]}]}',
        ),
    ],
)
async def test_session_refuses_an_ignored_field_nested_too_deeply(stage, path, body):
    async with stage([END]) as made:
        headers = {"Authorization": f"Bearer {made.key}"}
        data = body.replace("DEEP", "[" * 1000 + "]" * 1000).encode()
        async with made.http.post(made.gateway.base_url + PATHS[path], data=data, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["message"][:4]) == (400, "got ")
        assert (made.session.error, made.session.facts.refused) == (None, {"invalid_request": 1})


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}'])
async def test_session_counts_infinite_numbers_as_a_changed_call(stage, text):
    """Python's `json` writes such numbers, for example for a default that an agent has filled in."""
    async with stage([written('{"a": 1}'), END]) as made:
        answer = await made.chat([ASK], tools=TOOLS)
        [call] = answer["tool_calls"]
        changed = {**answer, "tool_calls": [{**call, "function": {"name": "add", "arguments": text}}]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "34"}
        assert (await made.chat([ASK, changed, result], tools=TOOLS))["content"] == "It is 34."
        facts = made.session.facts
    assert (facts.forks, facts.changed_calls) == (0, 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"seed": 10**30}, "seed"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_k": -(10**30)}, "top_k"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids"),
    ],
)
async def test_session_refuses_numbers_that_no_engine_reads(stage, fields, words):
    async with stage([END]) as made:
        status, answer = await made.post("chat", {"messages": [ASK], **fields})
        assert (status, words in answer["error"]["message"]) == (400, True), answer
        assert (made.session.error, made.fake.requests) == (None, [])


@pytest.mark.parametrize(("path", "protocol"), [("chat", ChatCompletions), ("messages", Messages)])
async def test_stream_ends_with_an_error_if_writing_the_answer_fails(stage, monkeypatch, path, protocol):
    def broken(*_: Any) -> Any:
        yield b"data: {}\n\n"
        raise RuntimeError("no form")

    monkeypatch.setattr(protocol, "events", broken)
    async with stage([END]) as made:
        status, text = await made.post(path, {"messages": [ASK], "stream": True})
    assert (status, "HTTP/1" in text) == (200, False)
    *_, last = [line for line in text.splitlines() if line.startswith("data: {")]
    assert "no form" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert made.session.facts.refused == {"server_error": 1}
