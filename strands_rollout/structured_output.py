"""Structured output by a tool call: the policy is offered one tool whose arguments are the wanted model.

Knows Strands' structured-output conventions; asks through a `stream` function and knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from strands.event_loop.streaming import process_stream
from strands.tools import convert_pydantic_to_tool_spec
from strands.types.content import Messages
from strands.types.exceptions import StructuredOutputException

T = TypeVar("T", bound=BaseModel)


async def structured_answer(
    stream: Callable[..., AsyncIterable[Any]], output_model: type[T], prompt: Messages, system_prompt: str | None
) -> AsyncGenerator[dict[str, T | Any], None]:
    """Yield the turn's events, then `{"output": instance}`.

    A call of the tool counts, and so does a text that is exactly one JSON object of the model.

    Raises:
        StructuredOutputException: Neither is there, or it is not valid.
    """
    spec = convert_pydantic_to_tool_spec(output_model)
    message: dict[str, Any] = {"content": []}
    async for event in process_stream(stream(prompt, [spec], system_prompt)):
        if "stop" in event:
            message = event["stop"][1]
        yield dict(event)
    yield {"output": _validated(output_model, message, spec["name"])}


def _validated(output_model: type[T], message: dict[str, Any], tool_name: str) -> T:
    calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
    text = "".join(block.get("text", "") for block in message["content"]).strip()
    arguments = next((call["input"] for call in calls if call["name"] == tool_name), None)
    try:
        return output_model.model_validate(json.loads(text) if arguments is None else arguments)
    except (ValidationError, ValueError) as e:
        got = f"a call with {arguments!r}" if arguments is not None else f"the text {text[:200]!r}"
        raise StructuredOutputException(
            f"got {got}; expected a call of the tool {tool_name!r} with valid arguments, or their JSON alone: {e}"
        ) from e
