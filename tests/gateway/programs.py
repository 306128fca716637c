"""Agent programs that send requests to the endpoint without an SDK."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import aiohttp

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
told: list[Any] = []  # values that programs record for the running test


def filled(sample: Any) -> dict[str, Any]:
    """Return a sample's values as plain JSON, without prompt, metadata and times."""
    given = ("prompt", "metadata", "non_generation_time")
    values = {name: value for name, value in sample.to_dict().items() if name not in given}
    return dict(json.loads(json.dumps(values, default=lambda array: array.tolist())))


async def chat(
    task: Any, endpoint: Any, *, more: Sequence[Any] = (), note: str = "", later_tools: Sequence[Any] = TOOLS
) -> str:
    messages: list[Any] = [{"role": "user", "content": task.text}, *more]
    while True:
        tools = TOOLS if len(messages) <= 1 + len(more) else later_tools
        answer = await post(endpoint, {"messages": messages, "tools": tools})
        messages.append(message := answer["choices"][0]["message"])
        if not message.get("tool_calls"):
            return str(message["content"])
        for call in message["tool_calls"]:
            told.append(json.loads(call["function"]["arguments"])["code"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"{note}{told[-1]} is done"})


async def chat_and_score(task: Any, endpoint: Any) -> dict[str, Any]:
    return {"score": 0.25, "answer": await chat(task, endpoint)}


async def chat_and_answer(task: Any, endpoint: Any) -> str:
    await chat(task, endpoint)
    return "Answer: 34"


async def titled(task: Any, endpoint: Any) -> str:
    await post(endpoint, {"messages": [{"role": "user", "content": f"A title for: {task.text}"}]})
    return await chat(task, endpoint)


async def titled_slowly(task: Any, endpoint: Any) -> None:
    """Request only a title, then sleep."""
    await post(endpoint, {"messages": [{"role": "user", "content": f"A title for: {task.text}"}]})
    await asyncio.sleep(600)


async def changing(task: Any, endpoint: Any) -> str:
    """Ask a different question in each attempt."""
    told.append("start")
    said = f"{task.text} (attempt {told.count('start')})"
    return await chat(replace(task, messages=[{"role": "user", "content": [{"text": said}]}]), endpoint)


async def numbering(task: Any, endpoint: Any) -> str:
    """Call a tool whose results differ in each attempt."""
    told.append("start")
    return await chat(task, endpoint, note=f"attempt {told.count('start')}: ")


async def adding(task: Any, endpoint: Any) -> str:
    """Begin with one more user message in each later attempt."""
    told.append("start")
    more = {"role": "user", "content": "Take your time."}
    return await chat(task, endpoint, more=[more] * (told.count("start") - 1))


async def twice(task: Any, endpoint: Any) -> None:
    """Send two more user messages, each after an answer."""
    messages: list[Any] = []
    for text in (task.text, "Sure?", "Really?"):
        messages.append({"role": "user", "content": text})
        messages.append((await post(endpoint, {"messages": messages}))["choices"][0]["message"])


async def post(endpoint: Any, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    url = f"{endpoint.base_url}/chat/completions"
    async with aiohttp.ClientSession(raise_for_status=True) as http, http.post(url, json=body, headers=headers) as got:
        return dict(await got.json())


def in_a_thread(task: Any, endpoint: Any) -> float:
    asyncio.run(post(endpoint, {"messages": [{"role": "user", "content": task.text}]}))
    return 0.5


async def raises(task: Any, endpoint: Any) -> None:
    await post(endpoint, {"messages": [{"role": "user", "content": task.text}]})
    raise ValueError("no luck")


async def asks_nothing(_task: Any, _endpoint: Any) -> str:
    return "34"


async def never_ends(task: Any, endpoint: Any) -> None:
    await post(endpoint, {"messages": [{"role": "user", "content": task.text}]})
    await asyncio.sleep(600)


async def asking_once(task: Any, endpoint: Any) -> str:
    """Send requests in the first attempt only."""
    told.append("start")
    return await chat(task, endpoint) if told.count("start") == 1 else ""


async def retooling(task: Any, endpoint: Any) -> str:
    """In later attempts, offer more tools after the first turn."""
    told.append("start")
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
    return await chat(task, endpoint, later_tools=[*TOOLS, *[other] * (told.count("start") - 1)])


async def retooling_anew(task: Any, endpoint: Any) -> str:
    """Like `retooling`, and the results of the tool differ in each attempt."""
    told.append("start")
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
    attempt = told.count("start")
    return await chat(task, endpoint, note=f"{attempt}: ", later_tools=[*TOOLS, *[other] * (attempt - 1)])


async def dated(task: Any, endpoint: Any) -> None:
    """Send a different system prompt in each attempt, and no tools."""
    told.append("start")
    system = {"role": "system", "content": f"Start {told.count('start')}."}
    await post(endpoint, {"messages": [system, {"role": "user", "content": task.text}]})


async def giving_up(task: Any, endpoint: Any) -> str:
    """Send only one request in each later attempt."""
    told.append("start")
    if told.count("start") == 1:
        return await chat(task, endpoint)
    answer = await post(endpoint, {"messages": [{"role": "user", "content": task.text}], "tools": TOOLS})
    return str(answer["choices"][0]["message"].get("content"))
