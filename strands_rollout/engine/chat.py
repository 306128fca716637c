"""The body of POST /v1/chat/completions as one request of the engine.

Knows OpenAI's fields and SGLang's additions to them (0.5.23); renders the prompt with the model's template.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strands_rollout.engine.generate_request import GenerateRequest, check_generation
from strands_rollout.engine.request_errors import RequestRefusedError

if TYPE_CHECKING:
    from strands_rollout.engine.engine import Engine

_ROLES = ("system", "developer", "user", "assistant", "tool")
# OpenAI's names of sampling parameters, and SGLang's.
_SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "seed": "sampling_seed",
    "ignore_eos": "ignore_eos",
    "no_stop_trim": "no_stop_trim",
    "skip_special_tokens": "skip_special_tokens",
    "regex": "regex",
    "ebnf": "ebnf",
    "stop_regex": "stop_regex",
    "logit_bias": "logit_bias",
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat turn to generate.

    Attributes:
        request: The generation that produces it.
        model: The name to answer with; the client's own.
        in_reasoning: The rendered prompt ends inside an opened reasoning block.
        with_calls: Whether tool calls are looked for.
        include_usage: Whether a stream ends with the token counts.
    """

    request: GenerateRequest
    model: str
    in_reasoning: bool
    with_calls: bool
    include_usage: bool


def read_chat_request(body: object, engine: Engine) -> ChatRequest:
    """Turn the JSON body of a chat call into a request.

    Raises:
        RequestRefusedError: A field is missing, wrong or not supported, or the prompt is too long.
    """
    if not isinstance(body, dict):
        raise RequestRefusedError(f"the body must be a JSON object, got {type(body).__name__}")
    _refuse_unsupported(body)
    tools = _objects(body, "tools")
    if body.get("tool_choice") == "none":
        tools = []
    options = body.get("chat_template_kwargs") or {}
    prompt = engine.codec.render_chat(_messages(body), tools, options)
    input_ids = engine.codec.encode(prompt, add_special_tokens=False)
    sampling, max_new_tokens = check_generation(
        input_ids, _sampling(body, engine, with_tools=bool(tools)), engine.limits
    )
    stream_options = body.get("stream_options") or {}
    request = GenerateRequest(
        rid=_text(body, "rid") or uuid.uuid4().hex,
        input_ids=tuple(input_ids),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        return_logprob=body.get("logprobs") is True,
        stream=body.get("stream") is True,
    )
    return ChatRequest(
        request=request,
        model=_text(body, "model") or engine.served_model_name,
        in_reasoning=prompt.rstrip().endswith("<think>"),
        with_calls=bool(tools),
        include_usage=bool(stream_options.get("include_usage")),
    )


def _refuse_unsupported(body: dict[str, Any]) -> None:
    response_format = (body.get("response_format") or {}).get("type", "text")
    tool_choice = body.get("tool_choice") or "auto"
    refused = {
        f"n={body.get('n')}": body.get("n") not in (None, 1),
        f"tool_choice={tool_choice}": tool_choice not in ("auto", "none"),
        f"response_format={response_format}": response_format != "text",
        "top_logprobs": bool(body.get("top_logprobs")),
    }
    found = [name for name, present in refused.items() if present]
    if found:
        raise RequestRefusedError(f"{', '.join(found)} is not supported by the embedded engine")


def _sampling(body: dict[str, Any], engine: Engine, *, with_tools: bool) -> dict[str, Any]:
    raw: dict[str, Any] = dict(engine.config.sampling_defaults)
    if "top_k" in raw:
        raw["top_k"] = int(raw["top_k"])
    raw |= {ours: body[theirs] for theirs, ours in _SAMPLING_NAMES.items() if body.get(theirs) is not None}
    # Unlike /generate, a chat without a limit may fill the context.
    raw["max_new_tokens"] = body.get("max_completion_tokens", body.get("max_tokens"))
    if with_tools:
        # A tokenizer may count the tool call tags as special, and they are needed to find the calls.
        raw["skip_special_tokens"] = False
    return raw


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages = _objects(body, "messages")
    if not messages:
        raise RequestRefusedError("Messages cannot be empty.")
    return [_message(message) for message in messages]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: content a string, the arguments of tool calls objects."""
    role = message.get("role")
    if role not in _ROLES:
        raise RequestRefusedError(f"'role' must be one of {', '.join(_ROLES)}, got {role!r}")
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(_part_text(part) for part in content)
    prepared = {**message, "role": "system" if role == "developer" else role, "content": content or ""}
    if message.get("tool_calls"):
        prepared["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return prepared


def _part_text(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise RequestRefusedError(f"only text content is supported by the embedded engine, got {part!r:.100}")
    return text


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as e:
            raise RequestRefusedError(f"the arguments of a tool call in messages are not JSON: {arguments!r}") from e
    return {**call, "function": {**function, "arguments": arguments}}


def _objects(body: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestRefusedError(f"{name} must be a list of objects, got {value!r:.100}")
    return value


def _text(body: dict[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestRefusedError(f"{name} must be a string, got {value!r:.100}")
    return value
