"""`HistoryCache`: what a session caches of its requests affects only the time to read later requests."""

import json
import random
from typing import Any

import orjson
import pytest

from strands_rollout.errors import PromptError
from strands_rollout.gateway import history_cache, protocols
from strands_rollout.gateway.openai import ChatCompletions, Responses
from strands_rollout.gateway.protocols import Messages

USER = {"role": "user", "content": 'a "messages":[ and ]},{"x":[1],é'}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"messages":[{}]}'}}
ITEMS = [
    {"role": "system", "content": "Add."},
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "34"},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "messages"}]},
    {"role": "assistant", "content": "34]"},
]
ITEM = b'{"role":"user","content":"1]"}'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"required": ["a"]}}}]


@pytest.mark.parametrize(
    "bodies",
    [
        *([b'{"messages":[%b],"n":1}' % b",".join([ITEM] * n) for n in range(1, 6)],),
        *([b'{"n":1, "messages": [%b ]}\n' % b" , ".join([ITEM] * n) for n in range(6)],),
        *([b'{"messages":[%b],"stop":[%b]}' % (ITEM, b",".join([b'"1"'] * n)) for n in range(1, 5)],),
        *([b'{"stop":["2"],"messages":[%b],"stop":[%b]}' % (ITEM, b",".join([b'"2"'] * n)) for n in range(1, 5)],),
        *([b'{"messages":[],"messages":[%b],"n":1}' % b",".join([ITEM] * n) for n in range(1, 5)],),
        *([b'{"messages":[%b],"messages":[%b]}' % (b",".join([ITEM] * n), ITEM) for n in range(1, 5)],),
        *([b'{"model":"%b]","messages":[%b]}' % (b",".join([b"1"] * n), ITEM) for n in range(1, 5)],),  # a text grows
        *([b'{"messages":"%b]"}' % b",".join([b"1"] * n) for n in range(1, 5)],),
        *([b'{"messages":[{"role":"user","content":[%b]}]}' % b",".join([b'{"type":"text"}'] * n) for n in range(4)],),
        *([b"[]", b"[1]", b"[1,1]", b"1", b'{"messages":{}}', b'{"messages":{},"n":1}', b"{}"],),
    ],
)
def test_history_cache_reads_like_a_new_one_in_any_order(bodies: list[bytes]) -> None:
    protocol = ChatCompletions()
    for body in [*bodies, *reversed(bodies), *bodies]:
        assert read(protocol, body) == read(ChatCompletions(), body)


@pytest.mark.parametrize("more", [b",", b" 2", b",2,", b",2],[3", b',{"a":1', b',"a', b",\xff", b",2", b",{}"])
def test_history_cache_refuses_a_longer_body_with_a_bad_item(more: bytes) -> None:
    protocol = ChatCompletions()
    for items in (ITEM, ITEM + b"," + ITEM, ITEM + b"," + ITEM + b"," + ITEM):
        protocol.read(b'{"messages":[%b],"n":1}' % items)
        bad = b'{"messages":[%b%b],"n":1}' % (items, more)
        with pytest.raises(PromptError) as refused:
            protocol.read(bad)
        assert str(refused.value) == read(ChatCompletions(), bad)
    assert len(protocol.read(b'{"messages":[%b,%b],"n":1}' % (items, ITEM)).messages) == 4


def test_history_cache_refuses_bytes_inserted_anywhere() -> None:
    body = orjson.dumps({"messages": ITEMS[:4], "model": "é"}, option=orjson.OPT_INDENT_2)
    for at in range(len(body) + 1):
        for more in (b",", b",{}", b",]"):
            protocol, changed = ChatCompletions(), body[:at] + more + body[at:]
            protocol.read(body)
            assert read(protocol, changed) == read(ChatCompletions(), changed)


@pytest.mark.parametrize("seed", range(20))
def test_history_cache_does_not_depend_on_order(seed: int) -> None:
    chance, protocol = random.Random(seed), ChatCompletions()
    history: list[Any] = [USER]
    for _ in range(60):
        kind = chance.random()
        if kind < 0.7:
            history = [*history, *chance.choices(ITEMS, k=chance.randrange(1, 4))]
        elif kind < 0.9:
            history = history[: chance.randrange(1, len(history) + 1)]
        else:
            history = [chance.choice(ITEMS), *history[1:]]
        body = {"model": "policy", "messages": history, "tools": TOOLS * chance.randrange(1, 3)}
        raw = orjson.dumps(body) if seed % 2 else json.dumps(body).encode()
        assert read(protocol, raw) == read(ChatCompletions(), raw)


def test_history_cache_reuses_message_objects() -> None:
    protocol = ChatCompletions()
    bodies = [orjson.dumps({"messages": ITEMS[:n], "model": "policy"}) for n in (2, 4, 5)]
    first, second, third = (protocol.read(body) for body in bodies)
    assert [len(request.messages) for request in (first, second, third)] == [1, 3, 3]
    assert second.messages[0] is first.messages[0]
    assert third.messages[1] is second.messages[1]
    assert third.tools is second.tools is first.tools
    assert len(third.messages[2]["content"]) == 2  # both results are in one message
    assert len(second.messages[2]["content"]) == 1


def test_history_cache_reads_only_new_items_of_alternating_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol, history, decoded = Messages(), [USER], list[int]()

    def decode(raw: bytes) -> Any:
        decoded.append(len(raw))
        return orjson.loads(raw)

    for module in (history_cache, protocols):
        monkeypatch.setattr(module, "decode_json", decode)
    for _ in range(12):
        for settings in ({"max_tokens": 9}, {}):  # a turn, and a count of tokens
            protocol.read(orjson.dumps({"messages": history, **settings}))
        history = [*history, {"role": "assistant", "content": "34]"}, USER]
    assert max(decoded[6:]) < len(orjson.dumps(history[-3:]))


def test_history_cache_does_not_keep_the_tools_of_a_body_that_is_never_extended() -> None:
    protocol = ChatCompletions()
    request = protocol.read_body({"messages": [USER], "tools": TOOLS})
    [history] = protocol._cache._histories
    assert (history.settings, history.body, history.raw) == (None, {}, b"")
    assert [spec["name"] for spec in request.tools] == ["add"]


def test_history_cache_keeps_the_items_of_earlier_requests() -> None:
    protocol = Responses()
    bodies = [orjson.dumps({"input": [{"role": "user", "content": "Hi."}] * n, "model": "policy"}) for n in (1, 2, 3)]
    requests = [protocol.read(body) for body in bodies]
    assert [len(request.body["input"]) for request in requests] == [1, 2, 3]


def read(protocol: ChatCompletions, raw: bytes) -> object:
    try:
        return protocol.read(raw)
    except PromptError as e:
        return str(e)
