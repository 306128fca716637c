"""Programs that play an episode with the SDKs of OpenAI and Anthropic, and with Strands' own models on top of them.

Each program sends its question, runs the tool that the policy calls, and sends a second question after the answer.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import anthropic
import openai
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel

AGAIN = "Are you sure?"
SYSTEM = "Be brief."
# the schema has the fields that Strands adds
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "Property a"}}, "required": []}
ADD = {"name": "add", "description": "Adds.", "parameters": PARAMETERS, "strict": True}

Items = list[Any]
Said = tuple[Items, list[str]]
"""The items that an answer adds to a history, and the ids of its calls."""


@dataclass(frozen=True)
class Api:
    """An API through its SDK.

    Attributes:
        resource: Path of the SDK's resource that creates answers.
        final: Name of the method that returns the final answer of a stream.
        request: Returns the fields of a request with this history.
        said: Returns the items of an answer and the ids of its calls.
        results: Returns the items with the results of these calls.
    """

    resource: str
    final: str
    request: Callable[[Items], dict[str, Any]]
    said: Callable[[Any], Said]
    results: Callable[[list[str]], Items]

    def client(self, endpoint: Any, *, is_async: bool) -> Any:
        sdk, url = (anthropic, endpoint.url) if self is MESSAGES else (openai, endpoint.base_url)
        kind = getattr(sdk, ("Async" if is_async else "") + ("Anthropic" if self is MESSAGES else "OpenAI"))
        return kind(base_url=url, api_key=endpoint.api_key, max_retries=0)


def _chat_said(answer: Any) -> Said:
    message = answer.choices[0].message
    return [message.model_dump(exclude_none=True)], [call.id for call in message.tool_calls or ()]


def _response_said(answer: Any) -> Said:
    calls = [item.call_id for item in answer.output if item.type == "function_call"]
    return [item.model_dump(exclude_none=True) for item in answer.output], calls


def _messages_said(answer: Any) -> Said:
    calls = [block.id for block in answer.content if block.type == "tool_use"]
    return [{"role": "assistant", "content": answer.content}], calls


def _messages_results(calls: list[str]) -> Items:
    results = [{"type": "tool_result", "tool_use_id": call, "content": f"34 for {call}"} for call in calls]
    return [{"role": "user", "content": results}]


CHAT = Api(
    "chat.completions",
    "get_final_completion",
    lambda history: {
        "messages": [{"role": "system", "content": SYSTEM}, *history],
        "tools": [{"type": "function", "function": ADD}],
    },
    _chat_said,
    lambda calls: [{"role": "tool", "tool_call_id": call, "content": f"34 for {call}"} for call in calls],
)
RESPONSES = Api(
    "responses",
    "get_final_response",
    lambda history: {"instructions": SYSTEM, "input": history, "tools": [{"type": "function", **ADD}]},
    _response_said,
    lambda calls: [{"type": "function_call_output", "call_id": call, "output": f"34 for {call}"} for call in calls],
)
MESSAGES = Api(
    "messages",
    "get_final_message",
    lambda history: {
        "max_tokens": 512,
        "system": SYSTEM,
        "messages": history,
        "tools": [{"name": "add", "description": "Adds.", "input_schema": PARAMETERS}],
    },
    _messages_said,
    _messages_results,
)


async def ask(api: Api, client: Any, history: Items, *, streams: bool = False, **fields: Any) -> Any:
    """Send a request, and return the SDK's object for the answer."""
    resource = attrgetter(api.resource)(client)
    request = {"model": "m", **api.request(history), **fields}
    if not streams:
        return await resource.create(**request)
    async with resource.stream(**request) as stream:
        return await getattr(stream, api.final)()


async def _play(task: Any, api: Api, ask: Callable[[Items], Awaitable[Said]]) -> None:
    history: Items = []
    for question in (task.text, AGAIN):
        history.append({"role": "user", "content": question})
        while True:
            said, calls = await ask(history)
            history += said
            if not calls:
                break
            history += api.results(calls)


async def _async(api: Api, task: Any, endpoint: Any, *, streams: bool = False, change: Any = lambda said: said) -> None:
    async def said(history: Items) -> Said:
        return change(api.said(await ask(api, client, history, streams=streams, model=endpoint.model)))

    async with api.client(endpoint, is_async=True) as client:
        await _play(task, api, said)


def _sync(api: Api, task: Any, endpoint: Any, *, streams: bool = False) -> None:
    """Play with the blocking client; a sync program has its own thread."""

    async def ask(history: Items) -> Said:
        request = {"model": endpoint.model, **api.request(history)}
        if not streams:
            return api.said(resource.create(**request))
        with resource.stream(**request) as stream:
            return api.said(getattr(stream, api.final)())

    with api.client(endpoint, is_async=False) as client:
        resource = attrgetter(api.resource)(client)
        asyncio.run(_play(task, api, ask))


def _rewritten(said: Said) -> Said:
    """Return a turn as some agents send it back: without its first call and its text, and with a default filled in."""
    for message in said[0]:
        if message.get("tool_calls"):
            message["tool_calls"], message["content"] = message["tool_calls"][-1:], ""
            message["tool_calls"][0]["function"] = {"name": "add", "arguments": '{"a": "as read", "b": 0}'}
    return said[0], said[1][-1:]


for _name, _api in {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}.items():
    for _kind, _run in {"": _async, "_sync": _sync}.items():
        globals()[f"{_name}{_kind}"] = functools.partial(_run, _api)
        globals()[f"{_name}{_kind}_stream"] = functools.partial(_run, _api, streams=True)
chat_rewritten = functools.partial(_async, CHAT, change=_rewritten)


async def _by_id(api: Api, task: Any, endpoint: Any) -> None:
    """Send only new items, after the id of the last answer: OpenAI's `previous_response_id`, or Anthropic's thread."""
    asked, earlier = 0, ""

    async def ask(history: Items) -> Said:
        nonlocal asked, earlier
        new = [item for item in history if item.get("role") == "user" or item.get("type") == "function_call_output"]
        request, asked = {"model": endpoint.model, **api.request(new[asked:])}, len(new)
        thread = {"type": "continue", "previous_message_id": earlier} if earlier else {"type": "create"}
        if api is RESPONSES:
            request["previous_response_id"] = earlier or None
        else:
            request = {name: request[name] for name in request if not earlier or name not in ("system", "tools")}
            request["extra_body"] = {"thread": thread}
        answer = await getattr(client, api.resource).create(**request)
        earlier = answer.id
        return api.said(answer)

    async with api.client(endpoint, is_async=True) as client:
        await _play(task, api, ask)


responses_by_id = functools.partial(_by_id, RESPONSES)
messages_by_id = functools.partial(_by_id, MESSAGES)


async def messages_tool_runner(task: Any, endpoint: Any) -> None:
    """Play with the agent loop of Anthropic's SDK."""

    @anthropic.beta_async_tool
    async def add(a: str) -> str:
        """Adds."""
        return f"34 for {a}"

    async with MESSAGES.client(endpoint, is_async=True) as client:
        history: Items = []
        for question in (task.text, AGAIN):
            request = MESSAGES.request([*history, {"role": "user", "content": question}])
            runner = client.beta.messages.tool_runner(model=endpoint.model, **{**request, "tools": [add]})
            answer = await runner.until_done()
            history = [*runner._params["messages"]]  # older versions leave out the last answer
            if history[-1]["role"] == "user":
                history.append({"role": "assistant", "content": answer.content})


@tool
def add(a: str) -> str:
    """Adds."""
    return f"34 for {a}"


async def _agent(kind: type, url: str, task: Any, endpoint: Any, **config: Any) -> None:
    given = {"base_url": getattr(endpoint, url), "api_key": endpoint.api_key}
    model = kind(client_args=given, model_id=endpoint.model, **config)
    agent = Agent(model=model, tools=[add], system_prompt=SYSTEM, callback_handler=None)
    for question in (task.text, AGAIN):
        await agent.invoke_async(question)
    if kind is AnthropicModel:  # the other models create a client for each request
        await model.client.close()


strands_chat = functools.partial(_agent, OpenAIModel, "base_url")
strands_chat_whole = functools.partial(_agent, OpenAIModel, "base_url", stream=False)
strands_responses = functools.partial(_agent, OpenAIResponsesModel, "base_url")
strands_responses_by_id = functools.partial(_agent, OpenAIResponsesModel, "base_url", stateful=True)
strands_messages = functools.partial(_agent, AnthropicModel, "url", max_tokens=512)
