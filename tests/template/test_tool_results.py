"""A tool's return value becomes a result that can be shown, or an error result; no value ends an episode."""

import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
import uuid
from typing import Any

import numpy as np
import pytest
from harness import ANSWER, TOOL_CALL, run
from pydantic import BaseModel
from strands.types.tools import AgentTool

from strands_rollout import Sample
from strands_rollout.template.messages import json_text, normalize_tool_result, to_chat_messages


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    when: datetime.date


class Model(BaseModel):
    name: str
    seen: datetime.datetime


class Broken:
    def __str__(self) -> str:
        raise RuntimeError("no text")


WHEN = datetime.datetime(2024, 5, 17, 9, 30, tzinfo=datetime.UTC)
VALUES: dict[str, tuple[Any, Any]] = {
    "datetime": (WHEN, "2024-05-17T09:30:00+00:00"),
    "date": (WHEN.date(), "2024-05-17"),
    "time": (WHEN.time(), "09:30:00"),
    "timedelta": (datetime.timedelta(minutes=3), "0:03:00"),
    "Decimal": (decimal.Decimal("1.10"), "1.10"),
    "set": ({"b", "a", 3}, ["a", "b", 3]),
    "frozenset": (frozenset({2, 1}), [1, 2]),
    "tuple": ((1, (2,)), [1, [2]]),
    "bytes": (b"a\xff\xc3\xa9", "a\\xff\u00e9"),
    "NumPy scalar": (np.float32(0.5), 0.5),
    "NumPy integer": (np.int64(7), 7),
    "NumPy array": (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
    "dataclass": (Point(1, WHEN.date()), {"x": 1, "when": "2024-05-17"}),
    "pydantic model": (Model(name="a", seen=WHEN), {"name": "a", "seen": "2024-05-17T09:30:00+00:00"}),
    "enum": (Colour.RED, "red"),
    "UUID": (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    "path": (pathlib.PurePosixPath("/tmp/x"), "/tmp/x"),
    "keys": ({1: "a", (2, 3): "b", WHEN.date(): "c", None: 4}, {"1": "a", "[2, 3]": "b", "2024-05-17": "c", "null": 4}),
    "a large integer": (10**400, 10**400),
    "plain JSON": ({"a": [1, None, "é", 1.5, True]}, {"a": [1, None, "é", 1.5, True]}),
}


@pytest.mark.parametrize(("value", "shown"), VALUES.values(), ids=VALUES)
def test_json_text_converts_values(value: Any, shown: Any) -> None:
    assert json.loads(json_text([value])) == [shown]
    result = normalize_tool_result({"status": "success", "content": [{"json": {"of": [value]}}]}, "c1")
    [message] = to_chat_messages([{"role": "user", "content": [{"toolResult": result}]}])
    assert json.loads(message["content"]) == {"of": [shown]}
    json.dumps(result, allow_nan=False)


def nested(depth: int) -> Any:
    inner: Any = 1
    for _ in range(depth):
        inner = [inner]
    return inner


def cycle() -> Any:
    found: list[Any] = [1]
    return [*found, found.append(found), found]


BAD: dict[str, tuple[Any, str]] = {
    "deeply nested": (nested(100_000), "nested deeper than 100 levels"),
    "itself": (cycle(), "it holds itself"),
    "an enormous integer": (10**5000, "an integer of more than 4,300 digits"),
    "no text": (Broken(), "no text"),
    "an enormous array": (np.zeros(10**7), "more than 200,000 values"),
}


@pytest.mark.parametrize(("value", "words"), BAD.values(), ids=BAD)
def test_normalize_tool_result_of_unprintable_value_is_error(value: Any, words: str) -> None:
    result = normalize_tool_result({"status": "success", "content": [{"text": "x"}, {"json": {"of": value}}]}, "c1")
    assert (result["status"], result["toolUseId"]) == ("error", "c1")
    assert words in result["content"][0]["text"]


NO_RESULTS: dict[str, tuple[Any, str]] = {
    "text": ("hi", "hi"),
    "an HTTP status": ({"status": 200, "content": "<p>"}, '{"status": 200, "content": "<p>"}'),
    "not a list": ({"status": "success", "content": 5}, '{"status": "success", "content": 5}'),
    "no blocks": ({"status": "error", "content": ["x"], "toolUseId": "a"}, '{"status": "error", "content": ["x"]}'),
    "an array as status": ({"status": np.ones(1), "content": 1}, '{"status": [1.0], "content": 1}'),
}


@pytest.mark.parametrize(("given", "text"), NO_RESULTS.values(), ids=NO_RESULTS)
def test_normalize_tool_result_wraps_other_values(given: Any, text: str) -> None:
    assert normalize_tool_result(given, "c1") == {"toolUseId": "c1", "status": "success", "content": [{"text": text}]}


@pytest.mark.parametrize("status", ["success", "error"])
@pytest.mark.parametrize(
    ("given", "content"),
    [
        ([{"text": None}], [{"text": "null"}]),
        ([{"a": 1}], [{"text": '{"a": 1}'}]),
        ([], []),
        ([{"json": [1]}], [{"json": [1]}]),
    ],
)
def test_normalize_tool_result_sets_id_and_converts_blocks(status: str, given: Any, content: Any) -> None:
    result = normalize_tool_result({"toolUseId": "x", "status": status, "content": given}, "c1")
    assert result == {"toolUseId": "c1", "status": status, "content": content}


@pytest.mark.parametrize("kind", ["document", "video", "image"])
def test_normalize_tool_result_of_unreadable_block_is_error(kind: str) -> None:
    block = {kind: {"format": "x", "name": "a", "source": {"s3Location": {"uri": "s3://a"}}}}
    result = normalize_tool_result({"status": "success", "content": [block]}, "c1")
    assert result["status"] == "error"
    assert f"it is a {kind}" in result["content"][0]["text"]


class Giving(AgentTool):
    """A tool that returns one of the values above, unchanged or as a JSON block."""

    tool_name = "give"
    tool_type = "python"

    @property
    def tool_spec(self) -> Any:
        return {"name": "give", "description": "Give.", "inputSchema": {"json": {"type": "object", "properties": {}}}}

    async def stream(self, tool_use: Any, invocation_state: Any, **kwargs: Any) -> Any:
        named = tool_use["input"]["name"]
        value = VALUES[named][0] if named in VALUES else BAD[named][0]
        yield {"status": "success", "content": [{"json": value}]} if tool_use["input"]["is_block"] else value


give = Giving()


@pytest.mark.parametrize("is_block", [True, False])
async def test_episode_continues_after_any_tool_result(shipped_tokenizer: Any, is_block: bool) -> None:
    calls = (
        TOOL_CALL.format(name="give", arguments=json.dumps({"name": name, "is_block": is_block}))
        for name in (*VALUES, *BAD)
    )
    turn = "".join(calls).replace("<|im_end|>", "") + "<|im_end|>"
    done = await run(
        shipped_tokenizer,
        [turn, ANSWER],
        settings={"tools": [f"{__name__}.give"]},
        params={"max_new_tokens": 50_000},
        context_length=60_000,
    )
    assert (done.facts["stop_reason"], done.sample.status) == ("completed", Sample.Status.COMPLETED)
    assert done.facts["tool_errors"] == len(BAD)
    assert '"when": "2024-05-17"' in done.context_after(0)


def test_to_chat_messages_keeps_order_of_results_with_one_id() -> None:
    def uses(*ids_and_names: str) -> dict[str, Any]:
        blocks = [{"toolUse": {"toolUseId": one[0], "name": one[1:], "input": {}}} for one in ids_and_names]
        return {"role": "assistant", "content": blocks}

    def told(*results: str) -> dict[str, Any]:
        """Return a message with results, each given as a call id of one character and a text."""
        given = [{"toolUseId": one[0], "status": "success", "content": [{"text": one[1:]}]} for one in results]
        return {"role": "user", "content": [{"toolResult": one} for one in given]}

    def shown(*messages: dict[str, Any]) -> list[tuple[str, str, str]]:
        chat = to_chat_messages(messages)
        return [(m["tool_call_id"], m["name"], m["content"]) for m in chat if m["role"] == "tool"]

    asked = uses("aadd", "amul", "bsub")
    expected = [("a", "add", "1"), ("a", "mul", "2"), ("b", "sub", "3")]
    assert shown(asked, told("a1", "a2", "b3")) == expected
    assert shown(asked, told("b3", "a1", "a2")) == expected
    assert shown(asked, told("a1"), told("a2"), told("b3")) == expected
    assert shown(asked, told("x1"), told("y2"), told("b3")) == expected
    # a third result with the id is assigned to the call without a result
    assert shown(asked, told("a1", "a2", "a3")) == expected


CALLS = [{"toolUse": {"toolUseId": name, "name": "f", "input": {}}} for name in "abc"]
ORDERS = [("abc", "abc"), ("bac", "abc"), ("cba", "abc"), ("ca", "ac"), ("bxa", "abx"), ("xya", "axy"), ("aab", "aba")]


@pytest.mark.parametrize(("given", "expected"), ORDERS)
def test_to_chat_messages_orders_results_by_calls(given: str, expected: str) -> None:
    """A result with an unknown id, or a second result with an id, is assigned to a call without a result."""
    results = [{"toolResult": {"toolUseId": name, "status": "success", "content": [{"text": name}]}} for name in given]
    answer = {"role": "assistant", "content": CALLS}
    user = {"role": "user", "content": [{"text": "and"}, *results]}
    for chat in (to_chat_messages([answer, user])[1:], to_chat_messages([user], {}, answered=answer)):
        shown, said = chat[:-1], chat[-1]
        assert "".join(message["content"] for message in shown) == expected
        assert said == {"role": "user", "content": "and"}
        if len(given) == len(CALLS):
            assert [message["tool_call_id"] for message in shown] == ["a", "b", "c"]
