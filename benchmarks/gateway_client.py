"""A cheap client of the gateway's APIs: it sends the same requests as real clients, with headers and the whole history.

It runs in the scripted engine's process, not in the measured process.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from strands_rollout.code_tool.tool import CODE_TOOL_DESCRIPTION, CODE_TOOL_NAME, CODE_TOOL_SCHEMA
from strands_rollout.settings import SYSTEM_PROMPT

_HEAD: Final = (
    "POST {path} HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n"
    "Authorization: Bearer {key}\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
    "User-Agent: AsyncOpenAI/Python 2.54.0\r\nX-Stainless-Lang: python\r\nX-Stainless-Package-Version: 2.54.0\r\n"
    "X-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\n"
    "X-Stainless-Runtime-Version: 3.12.0\r\nX-Stainless-Async: async:asyncio\r\nx-stainless-retry-count: 0\r\n"
    "x-stainless-read-timeout: 600\r\nContent-Length: "
)
_TOOL: Final = {"name": CODE_TOOL_NAME, "description": CODE_TOOL_DESCRIPTION}
_FUNCTION: Final = {**_TOOL, "parameters": CODE_TOOL_SCHEMA}
_SYSTEM: Final = {"role": "system", "content": SYSTEM_PROMPT}
# for each API: the path, the key of the history, the system prompt's items, and the other fields of a request
_APIS: Final[Mapping[str, tuple[str, str, list[Any], dict[str, Any]]]] = {
    "chat": ("/chat/completions", "messages", [_SYSTEM], {"tools": [{"type": "function", "function": _FUNCTION}]}),
    "responses": ("/responses", "input", [_SYSTEM], {"tools": [{"type": "function", **_FUNCTION}]}),
    "messages": (
        "/messages",
        "messages",
        [],
        {"system": SYSTEM_PROMPT, "tools": [{**_TOOL, "input_schema": CODE_TOOL_SCHEMA}], "max_tokens": 32000},
    ),
}


async def play(api: str, url: str, key: str, question: str, results: Sequence[str]) -> None:
    """Play an episode over one connection; the tool call of each turn gets the next of the `results`.

    Raises:
        ValueError: The gateway refused a request.
    """
    path, name, system, more = _APIS[api]
    host = url.removeprefix("http://").partition("/")[0]
    head = _HEAD.format(path=f"/v1{path}", host=host, key=key).encode()
    before = b'{"%s":[' % name.encode()
    items = orjson.dumps([*system, {"role": "user", "content": question}])[1:-1]
    after = b"]," + orjson.dumps({"model": "policy", **more})[1:]
    reader, writer = await asyncio.open_connection(*host.split(":"))
    for result in [*results, None]:
        length = len(before) + len(items) + len(after)
        writer.writelines([head, b"%d\r\n\r\n" % length, before, items, after])
        answered = (await reader.readuntil(b"\r\n\r\n")).lower()
        body = await reader.readexactly(int(answered.partition(b"content-length: ")[2].partition(b"\r")[0]))
        if not answered.startswith(b"http/1.1 200 "):
            raise ValueError(f"the gateway refused a turn: {body!r:.500}")
        if result is not None:
            items += b"," + orjson.dumps([*_next_items(api, orjson.loads(body), result)])[1:-1]
    writer.close()


def _next_items(api: str, answer: dict[str, Any], result: str) -> Iterator[dict[str, Any]]:
    """Yield the items that a client adds to its history: the answer, and its call's result."""
    if api == "chat":
        message = answer["choices"][0]["message"]
        yield {name: value for name, value in message.items() if value is not None}
        yield {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": result}
    elif api == "responses":
        yield from answer["output"]
        yield {"type": "function_call_output", "call_id": answer["output"][-1]["call_id"], "output": result}
    else:
        yield {"role": "assistant", "content": answer["content"]}
        block = {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"], "content": result}
        yield {"role": "user", "content": [block]}
