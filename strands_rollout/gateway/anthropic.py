"""Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Final

import orjson

from strands_rollout.errors import PromptError
from strands_rollout.gateway.protocols import (
    Block,
    Item,
    ItemCache,
    Piece,
    Protocol,
    Reply,
    TurnRequest,
    assembled,
    blocks_of,
    call_block,
    client_tools,
    field_of,
    image_block,
    named_sse,
    new_id,
    objects,
    reasoning_block,
    refuse,
    result_block,
    sampling_params,
    tool_spec,
)

# a note of Claude Code's to its server, another one in each request
_NOT_FOR_MODELS: Final = "x-anthropic-billing-header"


class Messages(Protocol):
    """Anthropic's Messages."""

    ping: ClassVar[bytes] = b'event: ping\ndata: {"type": "ping"}\n\n'

    def read(self, body: dict[str, Any], cache: ItemCache) -> TurnRequest:
        """See `Protocol.read`."""
        # a thread is continued with new messages alone
        thread = field_of(body, "thread", dict, "an object")
        if thread.get("type") == "continue":
            held = self.held("thread.previous_message_id", thread.get("previous_message_id"))
            body = {**body, **held, "messages": [*held["messages"], *objects(body, "messages")]}
        refuse(body, ("mcp_servers", "container", "output_format", "compaction"), tool_choice=("auto", "none"))
        if field_of(body, "output_config", dict, "an object").get("format"):
            raise PromptError("got output_config.format, which this policy can't honour; leave it out")
        system = [block["text"] for block in blocks_of(body.get("system"), _messages_part)]
        shown = "\n".join(text for text in system if not text.startswith(_NOT_FOR_MODELS))
        prompt, messages = assembled(cache.converted(objects(body, "messages"), _of_message), [shown])
        choice = field_of(body, "tool_choice", dict, "an object").get("type")
        return TurnRequest(
            messages,
            prompt,
            [] if choice == "none" else [*map(_messages_tool, client_tools(objects(body, "tools"), "custom"))],
            sampling_params(body, "max_tokens"),
            str(body.get("model", "")),
            body.get("stream") is True,
            body={name: body.get(name) for name in ("system", "tools", "messages")} if thread else {},
        )

    def whole(self, request: TurnRequest, reply: Reply) -> dict[str, Any]:
        """See `Protocol.whole`."""
        message_id, content = new_id("msg_"), _content_blocks(reply)
        if request.body:
            said = {"role": "assistant", "content": content}
            self.hold(message_id, {**request.body, "messages": [*request.body["messages"], said]})
        return {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": content,
            "stop_reason": reply.stop_reason,
            "stop_sequence": reply.stop,
            "usage": _messages_usage(reply),
        }

    def events(self, request: TurnRequest, reply: Reply) -> Iterator[bytes]:
        """See `Protocol.events`."""
        answer = self.whole(request, reply)
        usage = {**answer["usage"], "output_tokens": 0}
        first = {**answer, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield named_sse({"type": "message_start", "message": first})
        for index, block in enumerate(answer["content"]):
            opened, deltas = _opened(block)
            yield named_sse({"type": "content_block_start", "index": index, "content_block": opened})
            for delta in deltas:
                yield named_sse({"type": "content_block_delta", "index": index, "delta": delta})
            yield named_sse({"type": "content_block_stop", "index": index})
        end = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
        yield named_sse({"type": "message_delta", "delta": end, "usage": answer["usage"]})
        yield named_sse({"type": "message_stop"})

    def error(self, status: int, kind: str, words: str) -> dict[str, Any]:
        """See `Protocol.error`; clients look for "prompt is too long" to know that they must shorten a history."""
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
        type_ = kinds.get(status, "invalid_request_error" if status < 500 else "overloaded_error")
        shown = f"prompt is too long: {words}" if kind == "context_length_exceeded" else words
        return {"type": "error", "error": {"type": type_, "message": shown}}

    def error_event(self, status: int, kind: str, words: str) -> bytes:
        """See `Protocol.error_event`."""
        return named_sse(self.error(status, kind, words))


def _messages_tool(tool: Item) -> dict[str, Any]:
    return tool_spec(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _content_blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": "none"})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    uses = [{"type": "tool_use", "id": c["toolUseId"], "name": c["name"], "input": c["input"]} for c in reply.calls]
    return [*blocks, *uses]


def _opened(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and what is added to it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "tool_use":
        text = orjson.dumps(block["input"]).decode()
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    deltas = [{"type": f"{name}_delta", name: block[name]} for name in ("thinking", "signature")]
    return {**block, "thinking": "", "signature": ""}, deltas


def _messages_usage(reply: Reply) -> dict[str, int]:
    read, cached = reply.usage.get("inputTokens", 0), reply.usage.get("cacheReadInputTokens", 0)
    return {
        "input_tokens": max(0, read - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": min(cached, read),
        "output_tokens": reply.usage.get("outputTokens", 0),
    }


def _of_message(message: Item) -> list[Piece]:
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise PromptError(f"got the role {role!r:.100}; expected user or assistant")
    return [(role, blocks_of(message.get("content"), _messages_part))]


def _messages_part(part: Item) -> Block | None:
    kind = part.get("type")
    if kind == "text":
        return {"text": str(part.get("text", ""))}
    if kind == "thinking":
        return reasoning_block(str(part.get("thinking", "")))
    if kind == "redacted_thinking":
        return None
    if kind == "tool_use":
        return call_block(part.get("id"), part.get("name"), part.get("input"))
    if kind == "tool_result":
        content = blocks_of(part.get("content"), _messages_part)
        return result_block(part.get("tool_use_id"), content, is_error=part.get("is_error") is True)
    source = field_of(part, "source", dict, "an object")
    if kind == "image" and source.get("type") == "base64":
        return image_block(str(source.get("media_type", "")).removeprefix("image/"), str(source.get("data", "")))
    raise PromptError(
        f"got a content block of type {kind!r:.100}; expected text, thinking, tools, or an image in base64"
    )
