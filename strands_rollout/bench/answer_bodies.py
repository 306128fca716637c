"""A scripted turn as the bytes that a server sends, in the shapes of SGLang 0.5.2x.

Knows `/generate` and streamed `/v1/chat/completions`; nothing of sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson

from strands_rollout.bench.answer_script import AnswerScript, ScriptedTurn
from strands_rollout.prompts import CODE_TOOL_NAME

_HEAD: Final = b"date: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
_REASONS: Final = {200: b"OK", 404: b"Not Found"}


def http_answer(body: bytes, status: int = 200) -> bytes:
    """A whole HTTP/1.1 response with a JSON body."""
    length = b"content-length: %d\r\ncontent-type: application/json\r\n\r\n" % len(body)
    return b"HTTP/1.1 %d %s\r\n%s%s%s" % (status, _REASONS[status], _HEAD, length, body)


def generate_answer(script: AnswerScript, number: int, *, input_logprobs_from: int | None) -> bytes:
    """The answer to `/generate` for a turn.

    Args:
        script: The episode.
        number: Of the turn, from 0.
        input_logprobs_from: The request's `logprob_start_len`: the input's logprobs from there on are asked for.
    """
    turn, length = script.turns[number], script.input_lengths()[number]
    cached = script.input_lengths()[number - 1] + len(script.turns[number - 1].ids) - 1 if number else 0
    meta: dict[str, Any] = {
        "id": "0123456789abcdef0123456789abcdef",
        "finish_reason": {"type": "stop", "matched": turn.ids[-1]},
        "prompt_tokens": length,
        "weight_version": "default",
        "weight_versions": [{"version": "default", "start": 0, "end": len(turn.ids)}],
        "total_retractions": 0,
        "input_token_logprobs": _input_logprobs(script, number, input_logprobs_from),
        "output_token_logprobs": [
            list(entry) for entry in zip(turn.logprobs, turn.ids, [None] * len(turn.ids), strict=True)
        ],
        "completion_tokens": len(turn.ids),
        "cached_tokens": cached,
        "e2e_latency": 0.0625,
    }
    return http_answer(orjson.dumps({"text": turn.text, "output_ids": turn.ids, "meta_info": meta}))


def _input_logprobs(script: AnswerScript, number: int, start: int | None) -> list[list[Any]]:
    """[logprob, id, text] of the input from `start` on; the first one has no logprob, as in SGLang."""
    if start is None:
        return []
    ids = script.tokens()[start : script.input_lengths()[number]]
    drawn = script.logprobs()
    return [[None if n == 0 else drawn[n % len(drawn)], token, None] for n, token in enumerate(ids)]


def chat_answer(script: AnswerScript, number: int) -> list[bytes]:
    """The streamed answer to `/v1/chat/completions` for a turn: its head, then chunks of one token each."""
    turn = script.turns[number]
    head = (
        b"HTTP/1.1 200 OK\r\n"
        + _HEAD
        + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    deltas = [{"role": "assistant", "content": ""}, *({"content": piece} for piece in turn.words), *_call_deltas(turn)]
    events = [_chunk(delta) for delta in deltas]
    events.append(_chunk({}, "tool_calls" if turn.code else "stop"))
    length = script.input_lengths()[number]
    usage = {
        "prompt_tokens": length,
        "completion_tokens": len(turn.ids),
        "total_tokens": length + len(turn.ids),
        "prompt_tokens_details": None,
    }
    events.append({**_chunk({}), "choices": [], "usage": usage})
    lines = [b"data: " + orjson.dumps(event) + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]
    chunks = [b"%x\r\n%s\r\n" % (len(line), line) for line in lines]
    return [head, *chunks[:-1], chunks[-1] + b"0\r\n\r\n"]


def _call_deltas(turn: ScriptedTurn) -> Sequence[dict[str, Any]]:
    """The call as SGLang's tool-call parser streams it: its name, then its arguments piece by piece."""
    if not turn.code:
        return []
    first = {"id": "call_0123456789abcdef01234567", "index": 0, "type": "function"}
    named = {"tool_calls": [{**first, "function": {"name": CODE_TOOL_NAME, "arguments": ""}}]}
    rest = {"id": None, "index": 0, "type": "function"}
    return [
        named,
        *({"tool_calls": [{**rest, "function": {"name": None, "arguments": piece}}]} for piece in turn.arguments),
    ]


def _chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    filled = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None, **delta}
    choice = {"index": 0, "delta": filled, "logprobs": None, "finish_reason": finish_reason, "matched_stop": None}
    return {
        "id": "0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1767225600,
        "model": "scripted",
        "choices": [choice],
        "usage": None,
    }
