"""A generated chat turn in OpenAI's form, whole or as stream chunks, with the keys of SGLang's answers (0.5.23)."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from strands_rollout.engine.chat_parts import ChatParts, split_turn
from strands_rollout.engine.generate_response import output_text, weight_versions

if TYPE_CHECKING:
    from strands_rollout.engine.chat_request import ChatRequest
    from strands_rollout.engine.generation import GenerationOutput
    from strands_rollout.engine.text import TextCodec


def turn_parts(chat: ChatRequest, output: GenerationOutput, codec: TextCodec) -> ChatParts:
    """Reasoning, content and calls of what was generated so far."""
    return split_turn(
        output_text(output, codec),
        in_reasoning=chat.in_reasoning,
        with_calls=chat.with_calls,
        final=output.finish is not None,
    )


def chat_completion(chat: ChatRequest, output: GenerationOutput, codec: TextCodec) -> dict[str, Any]:
    """The answer to a call that does not stream."""
    parts = turn_parts(chat, output, codec)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": parts.content,
        "reasoning_content": parts.reasoning or None,
    }
    choice = {"index": 0, "message": message, "logprobs": _logprobs(output, codec), **_ending(output, parts)}
    if parts.calls:
        message["tool_calls"] = [_call(parts, index) for index in range(len(parts.calls))]
        choice["matched_stop"] = None  # unlike in a stream
    return {
        "id": output.request.rid,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": chat.model,
        "choices": [choice],
        "usage": usage(output),
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
        parts, sent = turn_parts(self._chat, output, self._codec), self._sent
        self._sent = parts
        chunks = []
        if len(parts.reasoning) > len(sent.reasoning):
            chunks.append(self._chunk({"reasoning_content": parts.reasoning[len(sent.reasoning) :]}))
        if len(parts.content) > len(sent.content):
            chunks.append(self._chunk({"content": parts.content[len(sent.content) :]}))
        new_calls = range(len(sent.calls), len(parts.calls))
        chunks += [self._chunk({"tool_calls": [_call(parts, index)]}) for index in new_calls]
        if output.finish is not None:
            chunks.append(self._chunk({}, _ending(output, parts)))
            if self._chat.include_usage:
                chunks.append({**self._chunk({}), "choices": [], "usage": usage(output)})
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


def usage(output: GenerationOutput) -> dict[str, Any]:
    """Token counts in OpenAI's form."""
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


def _call(parts: ChatParts, index: int) -> dict[str, Any]:
    call = parts.calls[index]
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
