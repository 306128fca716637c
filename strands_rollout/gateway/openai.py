"""OpenAI's Chat Completions and Responses APIs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

from strands_rollout.errors import PromptError
from strands_rollout.files.json_codec import encode_json
from strands_rollout.gateway.history_cache import Item, Piece
from strands_rollout.gateway.protocols import (
    ApiProtocol,
    TurnRequest,
    blocks_of,
    call_block,
    client_tools,
    field_of,
    find_ignored_fields,
    image_of_url,
    list_of_objects,
    named_sse,
    new_id,
    reasoning_block,
    refuse_unsupported,
    result_block,
    sampling_params,
    sse,
    tool_spec,
)
from strands_rollout.record.record import Block, Reply


class ChatCompletions(ApiProtocol):
    """OpenAI's Chat Completions API, with SGLang's `reasoning_content`."""

    def read_settings(self, body: dict[str, Any]) -> TurnRequest:
        """See `ApiProtocol.read_settings`."""
        refuse_unsupported(
            body,
            n=(1,),
            tool_choice=("auto", "none"),
            response_format=("text",),
            modalities=([], ["text"]),
            add_generation_prompt=(True,),
        )
        tools = list_of_objects(body, "tools")
        return TurnRequest(
            [],
            None,
            [_chat_tool(tool) for tool in tools] if _may_call_tools(body) else [],
            sampling_params(body, "max_completion_tokens", "max_tokens"),
            str(body.get("model", "")),
            body.get("stream") is True,
            with_usage=bool(field_of(body, "stream_options", dict, "an object").get("include_usage")),
            template_kwargs=field_of(body, "chat_template_kwargs", dict, "an object"),
            ignored_fields=find_ignored_fields(body, [field_of(tool, "function", dict, "an object") for tool in tools]),
        )

    @staticmethod
    def pieces(item: Item) -> list[Piece]:
        """See `ApiProtocol.pieces`."""
        role, content = item.get("role"), item.get("content")
        if role in ("system", "developer"):
            return [("system", blocks_of(content, _chat_part))]
        if role == "user":
            return [("user", blocks_of(content, _chat_part))]
        if role == "tool":
            return [("tool", [result_block(item.get("tool_call_id"), blocks_of(content, _chat_part))])]
        if role != "assistant":
            raise PromptError(
                f"got the role {role!r:.100}; expected 'system', 'developer', 'user', 'assistant' or 'tool'"
            )
        reasoning = item.get("reasoning_content") or item.get("reasoning") or ""
        blocks = [reasoning_block(reasoning)] if isinstance(reasoning, str) and reasoning else []
        blocks += blocks_of(content, _chat_part)
        for call in list_of_objects(item, "tool_calls"):
            if call.get("type", "function") != "function":
                raise PromptError(
                    f"got a tool call of type {call['type']!r:.100}; expected 'function'; no other type is supported"
                )
            function = field_of(call, "function", dict, "an object")
            blocks.append(call_block(call.get("id"), function.get("name"), function.get("arguments")))
        return [("assistant", blocks)]

    def response_body(self, request: TurnRequest, reply: Reply) -> dict[str, Any]:
        """See `ApiProtocol.response_body`."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [_chat_call(call) for call in reply.calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _FINISH[reply.stop_reason]}
        return {**_chat_head(request, "chat.completion"), "choices": [choice], "usage": _chat_usage(reply)}

    def events(self, request: TurnRequest, reply: Reply) -> Iterator[bytes]:
        """See `ApiProtocol.events`."""
        head = _chat_head(request, "chat.completion.chunk")
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if reply.reasoning:
            deltas.append({"reasoning_content": reply.reasoning})
        if reply.text:
            deltas.append({"content": reply.text})
        calls = enumerate(reply.calls)
        deltas += [{"tool_calls": [{"index": index, **_chat_call(call)}]} for index, call in calls]
        for delta in deltas:
            yield sse({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        yield sse({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _FINISH[reply.stop_reason]}]})
        if request.with_usage:
            yield sse({**head, "choices": [], "usage": _chat_usage(reply)})
        yield b"data: [DONE]\n\n"

    def error(self, status: int, kind: str, message: str) -> dict[str, Any]:
        """See `ApiProtocol.error`."""
        return {"error": {"message": message, "type": _openai_type(status), "param": None, "code": kind}}


_FINISH: Final = {
    "tool_use": "tool_calls",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
}


def _openai_type(status: int) -> str:
    kinds = {401: "authentication_error", 404: "invalid_request_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")


def _chat_head(request: TurnRequest, kind: str) -> dict[str, Any]:
    return {"id": new_id("chatcmpl-"), "object": kind, "created": int(time.time()), "model": request.model}


def _may_call_tools(body: Item) -> bool:
    """Return whether the policy may call tools; raise PromptError if `tool_choice` is an object (not supported)."""
    choice: str = field_of(body, "tool_choice", str, "'auto' or 'none'")
    return choice != "none"


def _chat_tool(tool: Item) -> dict[str, Any]:
    if tool.get("type", "function") != "function" or not isinstance(tool.get("function"), dict):
        raise PromptError(
            f"got the tool {tool!r:.100}; expected a tool of type 'function' with an object in its field 'function'; "
            "no other type is supported"
        )
    function = tool["function"]
    return tool_spec(function.get("name"), function.get("description"), function.get("parameters"))


def _chat_call(call: Item) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": encode_json(call["input"]).decode()}
    return {"id": call["toolUseId"], "type": "function", "function": function}


def _chat_usage(reply: Reply) -> dict[str, Any]:
    read, written = reply.usage.get("inputTokens", 0), reply.usage.get("outputTokens", 0)
    cached = {"cached_tokens": reply.usage.get("cacheReadInputTokens", 0)}
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": cached,
    }


def _chat_part(part: Item) -> Block | None:
    kind = part.get("type")
    if kind in ("text", "refusal"):
        return {"text": str(part.get(kind, ""))}
    if kind == "image_url":
        return image_of_url(field_of(part, "image_url", dict, "an object").get("url"))
    raise PromptError(f"got a content part of type {kind!r:.100}; expected 'text', 'refusal' or 'image_url'")


class Responses(ApiProtocol):
    """OpenAI's Responses API."""

    items_name: ClassVar[str] = "input"

    def with_earlier_items(self, body: dict[str, Any]) -> dict[str, Any]:
        """See `ApiProtocol.with_earlier_items`."""
        given, earlier_id = body.get("input"), body.get("previous_response_id")
        is_text = isinstance(given, str)
        if not is_text and earlier_id is None:
            return body
        items: Sequence[Item] = [{"role": "user", "content": given}] if is_text else list_of_objects(body, "input")
        if earlier_id is not None:
            items = _join_items(self.recall("previous_response_id", earlier_id)["input"], items)
        return {**body, "input": items}

    def read_settings(self, body: dict[str, Any]) -> TurnRequest:
        """See `ApiProtocol.read_settings`."""
        refuse_unsupported(body, tool_choice=("auto", "none"), truncation=("disabled",))
        refuse_unsupported(field_of(body, "text", dict, "an object"), format=("text",))
        tools = _response_tools(body) if _may_call_tools(body) else {}
        return TurnRequest(
            [],
            str(body["instructions"]) if body.get("instructions") else None,
            [spec for _, spec in tools.values()],
            sampling_params(body, "max_output_tokens"),
            str(body.get("model", "")),
            body.get("stream") is True,
            body={"tools": tools},
            template_kwargs=field_of(body, "chat_template_kwargs", dict, "an object"),
            ignored_fields=find_ignored_fields(body, list_of_objects(body, "tools")),
        )

    @staticmethod
    def pieces(item: Item) -> list[Piece]:
        """See `ApiProtocol.pieces`."""
        kind, role = item.get("type", "message"), item.get("role")
        if kind == "message" and role in ("user", "assistant", "system", "developer"):
            blocks = blocks_of(item.get("content"), _response_part)
            return [("system" if role == "developer" else str(role), blocks)]
        if kind == "function_call":
            return [("assistant", [call_block(item.get("call_id"), _full_name(item), item.get("arguments"))])]
        if kind == "function_call_output":
            return [("tool", [result_block(item.get("call_id"), blocks_of(item.get("output"), _response_part))])]
        if kind == "reasoning":
            parts = [*list_of_objects(item, "content"), *list_of_objects(item, "summary")]
            text = "".join(str(part.get("text", "")) for part in parts)
            return [("assistant", [reasoning_block(text)])] if text else []
        raise PromptError(
            f"got an input item of type {kind!r:.100} and role {role!r:.100}; expected the type 'message' "
            "with the role 'user', 'assistant', 'system' or 'developer', or the type 'function_call', "
            "'function_call_output' or 'reasoning'"
        )

    def response_body(self, request: TurnRequest, reply: Reply) -> dict[str, Any]:
        """See `ApiProtocol.response_body`."""
        response_id, output = new_id("resp_"), _output_items(reply, request.body["tools"])
        self.remember(response_id, {"input": [*request.body["input"], *output]})
        read, written = reply.usage.get("inputTokens", 0), reply.usage.get("outputTokens", 0)
        is_cut = reply.stop_reason == "max_tokens"
        return {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": None,
            "metadata": {},
            "model": request.model,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "temperature": None,
            "top_p": None,
            "usage": {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": reply.usage.get("cacheReadInputTokens", 0)},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": read + written,
            },
        }

    def events(self, request: TurnRequest, reply: Reply) -> Iterator[bytes]:
        """See `ApiProtocol.events`."""
        answer = self.response_body(request, reply)
        begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        bodies: list[dict[str, Any]] = [
            {"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")
        ]
        for index, item in enumerate(answer["output"]):
            bodies += [{**body, "output_index": index} for body in _item_events(item)]
        last = "response.incomplete" if answer["incomplete_details"] else "response.completed"
        bodies.append({"type": last, "response": answer})
        for number, body in enumerate(bodies):
            yield named_sse({**body, "sequence_number": number})

    def error(self, status: int, kind: str, message: str) -> dict[str, Any]:
        """See `ApiProtocol.error`."""
        return ChatCompletions().error(status, kind, message)

    def error_event(self, status: int, kind: str, message: str) -> bytes:  # noqa: ARG002 - the event has no status
        """See `ApiProtocol.error_event`."""
        error = {"code": kind, "message": message}
        response = {"id": new_id("resp_"), "object": "response", "status": "failed", "error": error, "output": []}
        return named_sse({"type": "response.failed", "response": response, "sequence_number": 0})


def _join_items(earlier: Sequence[Item], new: Sequence[Item]) -> list[Item]:
    """Return the history of a request that refers to an earlier response.

    Strands' agents send their whole history in each request, even if the request refers to an earlier response. So the
    earlier items are cut if the new items contain one of the earlier calls. The cut is before the last earlier item
    that equals the first new item.
    """
    known = {item.get("call_id") for item in earlier if item.get("type") == "function_call"}
    end = len(earlier)
    if any(item.get("type") == "function_call" and item.get("call_id") in known for item in new):
        first = Responses.pieces(new[0])
        end = next((index for index in reversed(range(end)) if Responses.pieces(earlier[index]) == first), end)
    return [*earlier[:end], *new]


_Tools = dict[str, tuple[dict[str, str], dict[str, Any]]]
"""Tool name for the policy -> the API's fields that name the tool in a call, and the tool's specification."""


def _output_items(reply: Reply, tools: _Tools) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        content: list[dict[str, Any]] = [{"type": "reasoning_text", "text": reply.reasoning}]
        items.append({"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": content})
    if reply.text or not reply.calls:
        content = [{"type": "output_text", "text": reply.text, "annotations": []}]
        message = {"type": "message", "id": new_id("msg_"), "role": "assistant", "status": "completed"}
        items.append({**message, "content": content})
    for call in reply.calls:
        arguments = encode_json(call["input"]).decode()
        name_fields = tools[call["name"]][0] if call["name"] in tools else {"name": call["name"]}
        head = {"type": "function_call", "id": new_id("fc_"), "call_id": call["toolUseId"], **name_fields}
        items.append({**head, "arguments": arguments, "status": "completed"})
    return items


def _item_events(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of an output item, without their `output_index` and `sequence_number`."""
    kind, item_id = item["type"], item["id"]
    if kind == "function_call":
        yield {"type": "response.output_item.added", "item": {**item, "arguments": "", "status": "in_progress"}}
        place = {"item_id": item_id}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **place, **done}
    else:
        status = {"status": "in_progress"} if kind == "message" else {}
        yield {"type": "response.output_item.added", "item": {**item, "content": [], **status}}
        [part] = item["content"]
        place, name = {"item_id": item_id, "content_index": 0}, part["type"]
        yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
        yield {"type": f"response.{name}.delta", **place, "delta": part["text"]}
        yield {"type": f"response.{name}.done", **place, "text": part["text"]}
        yield {"type": "response.content_part.done", **place, "part": part}
    yield {"type": "response.output_item.done", "item": item}


def _response_tools(body: Item) -> _Tools:
    given: list[dict[str, Any]] = []
    for tool in list_of_objects(body, "tools"):
        is_namespace = tool.get("type") == "namespace"
        inner = list_of_objects(tool, "tools") if is_namespace else []
        given += [{**each, "namespace": tool.get("name")} for each in inner] if is_namespace else [tool]
    tools: _Tools = {}
    for tool in client_tools(given, "function"):
        spec = tool_spec(_full_name(tool), tool.get("description"), tool.get("parameters"))
        tools[spec["name"]] = {key: tool[key] for key in ("name", "namespace") if key in tool}, spec
    return tools


def _full_name(named: Item) -> object:
    """Return the tool name for the policy: the name, prefixed with the namespace if there is one."""
    return f"{named['namespace']}__{named.get('name')}" if named.get("namespace") else named.get("name")


def _response_part(part: Item) -> Block | None:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text", "summary_text", "refusal"):
        return {"text": str(part.get("refusal" if kind == "refusal" else "text", ""))}
    if kind == "input_image":
        return image_of_url(part.get("image_url"))
    raise PromptError(
        f"got a content part of type {kind!r:.100}; expected 'input_text', 'output_text', 'text', 'summary_text', "
        "'refusal' or 'input_image'"
    )
