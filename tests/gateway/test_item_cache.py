"""`ItemCache`: what a session caches of its requests affects only the time to parse later requests."""

import json
import random
from typing import Any

import orjson
import pytest

from strands_rollout.errors import PromptError
from strands_rollout.gateway.openai import _chat_pieces
from strands_rollout.gateway.protocols import ItemCache

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
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"required": ["a"]}}}]


@pytest.mark.parametrize(
    "bodies",
    [
        *([b'{"messages":[%b],"n":[1]}' % b",".join([b'{"a":[1]}'] * n) for n in range(1, 6)],),
        *([b'{"n":[1], "messages": [%b ]}\n' % b" , ".join([b"[]"] * n) for n in range(6)],),
        *([b'{"messages":[1],"n":[%b]}' % b",".join([b"1"] * n) for n in range(1, 5)],),  # another list grows
        *([b'{"n":[2],"messages":[1],"n":[%b],"o":1}' % b",".join([b"2"] * n) for n in range(1, 5)],),
        *([b'{"messages":[1],"messages":[%b]}' % b",".join([b"1"] * n) for n in range(1, 5)],),
        *([b'{"n":"%b]","messages":[1]}' % b",".join([b"1"] * n) for n in range(1, 5)],),  # a text grows
        *([b'{"messages":"%b]"}' % b",".join([b"1"] * n) for n in range(1, 5)],),
        *([b'{"messages":[1]}', b'{"messages":[1,2]}', b'{"messages":[1,2,3],"n":1}', b'{"messages":[1,2]}'],),
        *([b"[]", b"[1]", b"[1,1]", b"1", b'{"messages":{}}', b'{"messages":{},"n":1}', b"{}"],),
    ],
)
def test_item_cache_parses_like_json_in_any_order(bodies: list[bytes]) -> None:
    cache = ItemCache()
    for body in [*bodies, *reversed(bodies), *bodies]:
        assert cache.parsed(body, "messages") == orjson.loads(body)


@pytest.mark.parametrize("more", [b",", b" 2", b",2,", b",2],[3", b',{"a":1', b',"a', b",\xff"])
def test_item_cache_refuses_a_longer_body_that_is_not_json(more: bytes) -> None:
    cache = ItemCache()
    for items in (b"1", b"1,1", b"1,1,1"):
        cache.parsed(b'{"messages":[%b],"n":1}' % items, "messages")
    with pytest.raises(ValueError, match="line 1 column|can't decode"):
        cache.parsed(b'{"messages":[1,1,1%b],"n":1}' % more, "messages")


@pytest.mark.parametrize("seed", range(20))
def test_item_cache_read_does_not_depend_on_order(seed: int) -> None:
    chance, cache = random.Random(seed), ItemCache()
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
        parsed = cache.parsed(raw, "messages")
        assert parsed == body
        assert read(cache, parsed["messages"]) == read(ItemCache(), parsed["messages"])


def test_item_cache_read_reuses_message_objects() -> None:
    cache = ItemCache()
    bodies = [orjson.dumps({"messages": ITEMS[:n], "model": "policy"}) for n in (2, 4, 5)]
    first, second, third = (cache.read(cache.parsed(body, "messages")["messages"], _chat_pieces)[1] for body in bodies)
    assert second[0] is first[0]
    assert third[1] is second[1]
    assert len(third[2]["content"]) == 2  # both results are in one message
    assert len(second[2]["content"]) == 1


def read(cache: ItemCache, items: list[Any]) -> object:
    try:
        return cache.read(items, _chat_pieces)
    except PromptError as e:
        return str(e)
