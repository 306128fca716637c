"""Programs that play an episode with the SDKs of OpenAI and Anthropic, and with Strands' own models on top of them.

Each asks its question, runs the tool that the policy calls, and asks once more when it has its answer.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from anthropic import Anthropic, AsyncAnthropic, beta_async_tool
from openai import AsyncOpenAI, OpenAI
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel

AGAIN = "Are you sure?"
SYSTEM = "Be brief."
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CHAT_TOOLS = [{"type": "function", "function": ADD}]
RESPONSE_TOOLS = [{"type": "function", "strict": False, **ADD}]
MESSAGES_TOOLS = [{"name": "add", "description": "Adds.", "input_schema": ADD["parameters"]}]

Items = list[Any]
Ask = Callable[[Items], Awaitable[tuple[Items, list[str]]]]
"""Asks with a history; what the answer adds to it, and the ids of its calls."""


async def _play(task: Any, ask: Ask, results: Callable[[list[str]], Items]) -> None:
    history: Items = []
    for question in (task.text, AGAIN):
        history.append({"role": "user", "content": question})
        while True:
            said, calls = await ask(history)
            history += said
            if not calls:
                break
            history += results(calls)


def _openai(endpoint: Any, kind: type = AsyncOpenAI) -> Any:
    return kind(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


def _anthropic(endpoint: Any, kind: type = AsyncAnthropic) -> Any:
    return kind(base_url=endpoint.url, api_key=endpoint.api_key, max_retries=0)


def _chat_results(calls: list[str]) -> Items:
    return [{"role": "tool", "tool_call_id": call, "content": f"34 for {call}"} for call in calls]


def _chat_said(message: Any) -> tuple[Items, list[str]]:
    return [message.model_dump(exclude_none=True)], [call.id for call in message.tool_calls or ()]


def _chat_request(endpoint: Any, history: Items) -> dict[str, Any]:
    head = {"role": "system", "content": SYSTEM}
    return {"model": endpoint.model, "messages": [head, *history], "tools": CHAT_TOOLS}


async def chat(task: Any, endpoint: Any) -> None:
    async def ask(history: Items) -> tuple[Items, list[str]]:
        answer = await client.chat.completions.create(**_chat_request(endpoint, history))
        return _chat_said(answer.choices[0].message)

    async with _openai(endpoint) as client:
        await _play(task, ask, _chat_results)


def chat_stream(task: Any, endpoint: Any) -> None:
    """In a thread, with the SDK's helper, which puts the events together."""

    async def ask(history: Items) -> tuple[Items, list[str]]:
        with client.chat.completions.stream(**_chat_request(endpoint, history)) as stream:
            return _chat_said(stream.get_final_completion().choices[0].message)

    with _openai(endpoint, OpenAI) as client:
        asyncio.run(_play(task, ask, _chat_results))


def _response_results(calls: list[str]) -> Items:
    return [{"type": "function_call_output", "call_id": call, "output": f"34 for {call}"} for call in calls]


def _response_said(answer: Any) -> tuple[Items, list[str]]:
    calls = [item.call_id for item in answer.output if item.type == "function_call"]
    return [item.model_dump(exclude_none=True) for item in answer.output], calls


def _response_request(endpoint: Any, history: Items) -> dict[str, Any]:
    return {"model": endpoint.model, "instructions": SYSTEM, "input": history, "tools": RESPONSE_TOOLS}


def responses(task: Any, endpoint: Any) -> None:
    async def ask(history: Items) -> tuple[Items, list[str]]:
        return _response_said(client.responses.create(**_response_request(endpoint, history)))

    with _openai(endpoint, OpenAI) as client:
        asyncio.run(_play(task, ask, _response_results))


async def responses_stream(task: Any, endpoint: Any) -> None:
    async def ask(history: Items) -> tuple[Items, list[str]]:
        async with client.responses.stream(**_response_request(endpoint, history)) as stream:
            return _response_said(await stream.get_final_response())

    async with _openai(endpoint) as client:
        await _play(task, ask, _response_results)


async def responses_by_id(task: Any, endpoint: Any) -> None:
    """Sends what is new alone, and names the answer before it."""
    asked, earlier = [0], [None]

    async def ask(history: Items) -> tuple[Items, list[str]]:
        new = [item for item in history if item.get("role") == "user" or item["type"] == "function_call_output"]
        request = _response_request(endpoint, new[asked[0] :])
        asked[0] = len(new)
        answer = await client.responses.create(**request, previous_response_id=earlier[0])
        earlier[0] = answer.id
        return _response_said(answer)

    async with _openai(endpoint) as client:
        await _play(task, ask, _response_results)


def _messages_results(calls: list[str]) -> Items:
    results = [{"type": "tool_result", "tool_use_id": call, "content": f"34 for {call}"} for call in calls]
    return [{"role": "user", "content": results}]


def _messages_said(answer: Any) -> tuple[Items, list[str]]:
    calls = [block.id for block in answer.content if block.type == "tool_use"]
    return [{"role": "assistant", "content": answer.content}], calls


def _messages_request(endpoint: Any, history: Items) -> dict[str, Any]:
    head = {"model": endpoint.model, "max_tokens": 512, "system": SYSTEM, "tools": MESSAGES_TOOLS}
    return {**head, "messages": history}


def messages(task: Any, endpoint: Any) -> None:
    async def ask(history: Items) -> tuple[Items, list[str]]:
        return _messages_said(client.messages.create(**_messages_request(endpoint, history)))

    with _anthropic(endpoint, Anthropic) as client:
        asyncio.run(_play(task, ask, _messages_results))


async def messages_stream(task: Any, endpoint: Any) -> None:
    async def ask(history: Items) -> tuple[Items, list[str]]:
        async with client.messages.stream(**_messages_request(endpoint, history)) as stream:
            return _messages_said(await stream.get_final_message())

    async with _anthropic(endpoint) as client:
        await _play(task, ask, _messages_results)


async def messages_by_id(task: Any, endpoint: Any) -> None:
    """As threads of the SDK: after the first, sends what is new alone, and names the answer before it."""
    asked, earlier = [0], [""]

    async def ask(history: Items) -> tuple[Items, list[str]]:
        new = [item for item in history if item["role"] == "user"]
        request = _messages_request(endpoint, new[asked[0] :])
        asked[0] = len(new)
        thread = {"type": "create"}
        if earlier[0]:
            thread = {"type": "continue", "previous_message_id": earlier[0]}
            request = {name: request[name] for name in ("model", "max_tokens", "messages")}
        answer = await client.messages.create(**request, extra_body={"thread": thread})
        earlier[0] = answer.id
        return _messages_said(answer)

    async with _anthropic(endpoint) as client:
        await _play(task, ask, _messages_results)


async def messages_tool_runner(task: Any, endpoint: Any) -> None:
    """Anthropic's own loop of an agent; on threads, in newer ones."""

    @beta_async_tool
    async def add(a: str) -> str:
        """Adds."""
        return f"34 for {a}"

    async with _anthropic(endpoint) as client:
        history: Items = []
        for question in (task.text, AGAIN):
            request = {**_messages_request(endpoint, [*history, {"role": "user", "content": question}]), "tools": [add]}
            runner = client.beta.messages.tool_runner(**request)
            answer = await runner.until_done()
            history = [*runner._params["messages"]]  # without the last answer in older ones
            if history[-1]["role"] == "user":
                history.append({"role": "assistant", "content": answer.content})


@tool
def add(a: str) -> str:
    """Adds."""
    return f"34 for {a}"


async def _play_agent(kind: type, url: str, task: Any, endpoint: Any, **config: Any) -> None:
    given = {"base_url": getattr(endpoint, url), "api_key": endpoint.api_key}
    model = kind(client_args=given, model_id=endpoint.model, **config)
    agent = Agent(model=model, tools=[add], system_prompt=SYSTEM, callback_handler=None)
    for question in (task.text, AGAIN):
        await agent.invoke_async(question)
    if kind is AnthropicModel:  # the others have a client for each request
        await model.client.close()


strands_chat = functools.partial(_play_agent, OpenAIModel, "base_url")
strands_chat_whole = functools.partial(_play_agent, OpenAIModel, "base_url", stream=False)
strands_responses = functools.partial(_play_agent, OpenAIResponsesModel, "base_url")
strands_responses_by_id = functools.partial(_play_agent, OpenAIResponsesModel, "base_url", stateful=True)
strands_messages = functools.partial(_play_agent, AnthropicModel, "url", max_tokens=512)
