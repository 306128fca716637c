"""The OpenAI chat API (with SGLang 0.5.23's additions): requests in, answers out, and turns taken apart in between.

Turns are split into reasoning, content and tool calls in Qwen3's (Hermes) format.
"""

import json
import time
import uuid
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from strands_rollout.engine.engine import Engine
from strands_rollout.engine.generation import GenerationOutput, TextCodec, output_text, weight_versions
from strands_rollout.engine.requests import GenerateRequest, RequestRefusedError, check_generation, encoded

T = TypeVar("T")
_THINK, _THINK_END = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_ROLES = ("system", "developer", "user", "assistant", "tool")
# OpenAI's names of sampling parameters, and SGLang's.
_SAME_NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("stop", "stop_token_ids", "ignore_eos", "no_stop_trim", "skip_special_tokens"),
    *("regex", "ebnf", "stop_regex", "logit_bias"),
)
_EXPECTED: dict[type, str] = {dict: "an object", list: "a list of objects", str: "a string"}
_SAMPLING_NAMES = {name: name for name in _SAME_NAMES} | {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A tool call; `arguments` is a JSON object as text, the form in which OpenAI's API carries it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatParts:
    """What a turn consists of. Blocks that are no valid call stay in `content`, so that nothing is lost."""

    reasoning: str
    content: str
    calls: tuple[ChatCall, ...]


def split_turn(text: str, *, in_reasoning: bool, with_calls: bool, final: bool) -> ChatParts:
    """Take a turn apart; what is returned of an unfinished text stays a prefix of what is returned for more of it.

    `in_reasoning` says that the prompt opened the reasoning, `final` that nothing more will come; otherwise what may
    turn out to be part of a tag is held back.
    """
    opened, reasoning = text.lstrip(), ""
    if in_reasoning or opened.startswith(_THINK):
        body = text if in_reasoning else opened[len(_THINK) :]
        reasoning, closed, text = body.partition(_THINK_END)
        if not closed:
            shown = body if final else _without_partial(body, _THINK_END)
            return ChatParts(shown.strip("\n"), "", ())
    elif not final and _THINK.startswith(opened):
        return ChatParts("", "", ())
    content, calls = _content(text, final=final) if with_calls else (text, [])
    return ChatParts(reasoning.strip("\n"), content.strip("\n"), tuple(calls))


def _content(text: str, *, final: bool) -> tuple[str, list[ChatCall]]:
    pieces: list[str] = []
    calls: list[ChatCall] = []
    while True:
        before, found, after = text.partition(_CALL)
        if not found:
            pieces.append(text if final else _without_partial(text, _CALL))
            break
        pieces.append(before)
        body, closed, text = after.partition(_CALL_END)
        if not closed:
            pieces.append(found + after if final else "")
            break
        call = _parsed(body)
        if call is None:
            pieces.append(found + body + closed)
        else:
            calls.append(call)
    return "".join(pieces), calls


def _parsed(body: str) -> ChatCall | None:
    """The call that a block spells, or None if it is not exactly a JSON object with a name and an arguments object."""
    try:
        call = json.loads(body)
    except ValueError:
        return None
    name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ChatCall(name, json.dumps(arguments, ensure_ascii=False))


def _without_partial(text: str, tag: str) -> str:
    """`text` without an ending that could be the beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return text[:-length]
    return text


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat turn to generate; `in_reasoning`: the rendered prompt ends inside an opened reasoning block."""

    request: GenerateRequest
    model: str
    in_reasoning: bool
    with_calls: bool
    include_usage: bool

    def parts_of(self, output: GenerationOutput, codec: TextCodec) -> ChatParts:
        """The turn as far as it is generated, taken apart."""
        text, final = output_text(output, codec), output.finish is not None
        return split_turn(text, in_reasoning=self.in_reasoning, with_calls=self.with_calls, final=final)


def read_chat_request(body: object, engine: Engine) -> ChatRequest:
    """Turn the JSON body of a chat call into a request; RequestRefusedError where it can't be served."""
    if not isinstance(body, dict):
        raise RequestRefusedError(f"the body must be a JSON object, got {type(body).__name__}")
    _refuse_unsupported(body)
    tools = [] if body.get("tool_choice") == "none" else _field(body, "tools", list)
    messages = [_message(message) for message in _field(body, "messages", list)]
    if not messages:
        raise RequestRefusedError("Messages cannot be empty.")
    prompt = engine.codec.render_chat(messages, tools, _field(body, "chat_template_kwargs", dict))
    input_ids = encoded(prompt, engine.limits, partial(engine.codec.encode, add_special_tokens=False))
    raw_sampling = _sampling(body, engine, with_tools=bool(tools))
    sampling, max_new_tokens = check_generation(input_ids, raw_sampling, engine.limits)
    request = GenerateRequest(
        rid=_field(body, "rid", str) or uuid.uuid4().hex,
        input_ids=tuple(input_ids),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        return_logprob=body.get("logprobs") is True,
        stream=body.get("stream") is True,
    )
    return ChatRequest(
        request=request,
        model=_field(body, "model", str) or engine.served_model_name,
        in_reasoning=prompt.rstrip().endswith(_THINK),
        with_calls=bool(tools),
        include_usage=bool(_field(body, "stream_options", dict).get("include_usage")),
    )


def _refuse_unsupported(body: dict[str, Any]) -> None:
    response_format = _field(body, "response_format", dict).get("type", "text")
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


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: content a string, the arguments of tool calls objects."""
    role = message.get("role")
    if role not in _ROLES:
        raise RequestRefusedError(f"'role' must be one of {', '.join(_ROLES)}, got {role!r}")
    content = message.get("content") or ""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise RequestRefusedError(f"only text content is supported by the embedded engine, got {part!r:.100}")
        content = " ".join(part["text"] for part in content)
    prepared = {**message, "role": "system" if role == "developer" else role, "content": content}
    if message.get("tool_calls"):
        prepared["tool_calls"] = [_tool_call(call) for call in _field(message, "tool_calls", list)]
    return prepared


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = _field(call, "function", dict)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as e:
            message = f"the arguments of a tool call in messages are not JSON: {arguments!r:.200}"
            raise RequestRefusedError(message) from e
    return {**call, "function": {**function, "arguments": arguments}}


def _field(body: dict[str, Any], name: str, kind: type[T]) -> T:
    """A field of this type; an empty one where it is absent."""
    value = body.get(name)
    if value is None or (not value and kind is not str):
        return kind()
    is_odd_list = isinstance(value, list) and not all(isinstance(item, dict) for item in value)
    if not isinstance(value, kind) or is_odd_list:
        raise RequestRefusedError(f"{name} must be {_EXPECTED[kind]}, got {value!r:.100}")
    return value


def chat_completion(chat: ChatRequest, output: GenerationOutput, codec: TextCodec) -> dict[str, Any]:
    """The answer to a call that does not stream."""
    parts = chat.parts_of(output, codec)
    reasoning = parts.reasoning or None
    message: dict[str, Any] = {"role": "assistant", "content": parts.content, "reasoning_content": reasoning}
    choice = {"index": 0, "message": message, "logprobs": _logprobs(output, codec), **_ending(output, parts)}
    if parts.calls:
        message["tool_calls"] = [_call(call, index) for index, call in enumerate(parts.calls)]
        choice["matched_stop"] = None  # unlike in a stream
    return {
        "id": output.request.rid,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": chat.model,
        "choices": [choice],
        "usage": _usage(output),
        "metadata": weight_versions(output),
    }


class ChatChunks:
    """Turns the states of one growing turn into stream chunks."""

    def __init__(self, chat: ChatRequest, codec: TextCodec) -> None:
        self._chat = chat
        self._codec = codec
        self._sent = ChatParts("", "", ())
        self._created = int(time.time())

    def first(self) -> dict[str, Any]:
        """The chunk that opens the assistant's message."""
        return self._chunk({"role": "assistant", "content": ""})

    def next(self, output: GenerationOutput) -> list[dict[str, Any]]:
        """The chunks for what is new in `output`, and at its end for the finish and, if wanted, the usage."""
        parts, sent = self._chat.parts_of(output, self._codec), self._sent
        self._sent = parts
        chunks = []
        if len(parts.reasoning) > len(sent.reasoning):
            chunks.append(self._chunk({"reasoning_content": parts.reasoning[len(sent.reasoning) :]}))
        if len(parts.content) > len(sent.content):
            chunks.append(self._chunk({"content": parts.content[len(sent.content) :]}))
        new_calls = enumerate(parts.calls[len(sent.calls) :], len(sent.calls))
        chunks += [self._chunk({"tool_calls": [_call(call, index)]}) for index, call in new_calls]
        if output.finish is not None:
            chunks.append(self._chunk({}, _ending(output, parts)))
            if self._chat.include_usage:
                chunks.append({**self._chunk({}), "choices": [], "usage": _usage(output)})
        return chunks

    def _chunk(self, delta: dict[str, Any], ending: dict[str, Any] | None = None) -> dict[str, Any]:
        ending = ending or {"finish_reason": None, "matched_stop": None}
        return {
            "id": self._chat.request.rid,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._chat.model,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, **ending}],
        }


def _usage(output: GenerationOutput) -> dict[str, Any]:
    prompt, completion = len(output.request.input_ids), len(output.output_ids)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": output.cached_tokens},
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def _ending(output: GenerationOutput, parts: ChatParts) -> dict[str, Any]:
    finish = output.finish or {}
    reason = finish.get("type")
    if reason == "stop" and parts.calls:
        reason = "tool_calls"
    return {"finish_reason": reason, "matched_stop": finish.get("matched")}


def _call(call: ChatCall, index: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "index": index, "type": "function", "function": function}


def _logprobs(output: GenerationOutput, codec: TextCodec) -> dict[str, Any] | None:
    if not output.request.return_logprob:
        return None
    content = []
    for token_id, logprob in zip(output.output_ids, output.output_logprobs, strict=True):
        token = codec.decode([token_id])
        content.append({"token": token, "bytes": list(token.encode()), "logprob": logprob, "top_logprobs": []})
    return {"content": content}
