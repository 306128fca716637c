"""An engine that answers immediately from scripts, with as little CPU as possible.

Runs as a process of its own: `python -m benchmarks.scripted_engine SCRIPTS... [--core N] [--any-input]
[--image-tokens N]`. It prints its port and exits when its stdin closes. It supports only HTTP/1.1 with content lengths.
Answers have the form of SGLang 0.5.2x and are encoded once. Requests for tokens that no script expects are refused;
with --any-input, only the last tokens of a request are compared. The process also plays the gateway's clients.
"""

import argparse
import asyncio
import contextlib
import gc
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from benchmarks import gateway_client
from benchmarks.measuring import pin_to
from benchmarks.script import Script, Turn, load_scripts
from strands_rollout.code_tool.tool import CODE_TOOL_NAME

_CONTEXT_LENGTH: Final = 131_072
_HEAD: Final = b"date: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
_REASONS: Final = {200: b"OK", 404: b"Not Found"}
_TAIL_TOKENS: Final = 72  # the last ids of an input, which identify its turn
_IDS: Final = b'"input_ids":'
_IMAGE: Final = b'"data:image/'
_CONTENT_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_INPUT_LOGPROBS: Final = re.compile(rb'"logprob_start_len": ?(\d+)')


def _http_answer(answer: object, status: int = 200) -> bytes:
    body = orjson.dumps(answer)
    length = b"content-length: %d\r\ncontent-type: application/json\r\n\r\n" % len(body)
    return b"HTTP/1.1 %d %s\r\n%s%s%s" % (status, _REASONS[status], _HEAD, length, body)


_INFO: Final = _http_answer(
    {
        "model_path": "scripted",
        "tokenizer_path": "scripted",
        "weight_version": "default",
        "has_image_understanding": False,
        "context_length": _CONTEXT_LENGTH,
        "object": "list",
        "data": [{"id": "scripted", "object": "model", "max_model_len": _CONTEXT_LENGTH}],
    }
)


def _generate_answer(script: Script, number: int, input_logprobs_from: int | None, prompt_tokens: int | None) -> bytes:
    """Return the answer to `/generate` for a turn.

    Args:
        script: The script of the turn.
        number: The turn's number, from 0.
        input_logprobs_from: The request's `logprob_start_len`; None if the request has none.
        prompt_tokens: The request's number of tokens; None for the number in the script.
    """
    turn, lengths = script.turns[number], script.input_lengths()
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop", "matched": turn.ids[-1]},
        "prompt_tokens": lengths[number] if prompt_tokens is None else prompt_tokens,
        "weight_version": "default",
        "weight_versions": [{"version": "default", "start": 0, "end": len(turn.ids)}],
        "total_retractions": 0,
        "input_token_logprobs": _input_logprobs(script, number, input_logprobs_from),
        "output_token_logprobs": [
            [logprob, token, None] for logprob, token in zip(turn.logprobs, turn.ids, strict=True)
        ],
        "completion_tokens": len(turn.ids),
        "cached_tokens": lengths[number - 1] + len(script.turns[number - 1].ids) - 1 if number else 0,
        "e2e_latency": 0.0625,
    }
    return _http_answer({"text": turn.text, "output_ids": turn.ids, "meta_info": meta})


def _input_logprobs(script: Script, number: int, start: int | None) -> list[list[Any]]:
    """Return [logprob, id, text] of each input token from `start` on; as in SGLang, the first logprob is None."""
    if start is None:
        return []
    ids, drawn = script.input_ids(number)[start:], script.logprobs()
    return [[None if n == 0 else drawn[n % len(drawn)], token, None] for n, token in enumerate(ids)]


def _chat_answer(script: Script, number: int) -> list[bytes]:
    """Return the streamed answer to `/v1/chat/completions` for a turn: its head, then its chunks, a chunk per token."""
    turn = script.turns[number]
    head = b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    deltas = [
        {"role": "assistant", "content": ""},
        *({"content": piece} for piece in turn.content),
        *_call_deltas(turn),
    ]
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
    return [b"HTTP/1.1 200 OK\r\n" + _HEAD + head, *chunks[:-1], chunks[-1] + b"0\r\n\r\n"]


def _call_deltas(turn: Turn) -> list[dict[str, Any]]:
    """Return the call as SGLang's tool-call parser streams it: its name, then its arguments piece by piece."""
    if not turn.code:
        return []
    call: dict[str, Any] = {"index": 0, "type": "function"}
    first = {**call, "id": "call_0123456789abcdef01234567", "function": {"name": CODE_TOOL_NAME, "arguments": ""}}
    rest = [{**call, "id": None, "function": {"name": None, "arguments": piece}} for piece in turn.arguments]
    return [{"tool_calls": [one]} for one in (first, *rest)]


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


class _UnexpectedRequestError(Exception):
    """A request that no turn of any script expects."""


class _Scripts:
    """All scripts, with their encoded answers.

    Ids are compared as text, without parsing the body, to save CPU. Unless `exact`, only the last ids, which identify
    the turn, must equal the script's; each image of a request stands for `image_tokens` tokens.
    """

    def __init__(self, scripts: Sequence[Script], *, exact: bool, image_tokens: int) -> None:
        self._exact, self._image_tokens = exact, image_tokens
        self._turns = {
            _tail(script.input_ids(number)): (script, number)
            for script in scripts
            for number in range(len(script.turns))
        }
        self._questions = {script.question: script for script in scripts}
        self._chats: dict[tuple[str, int], list[bytes]] = {}
        # encode the answers now: the first variant must not wait longer for them than the next variant
        self._answers = {(tail, None, None): self._encode(tail, None, None) for tail in self._turns}

    def generate(self, body: bytes) -> bytes:
        start = body.find(_IDS) + len(_IDS)
        end = body.find(b"]", start) + 1
        # the last ids identify the turn
        last = body[max(start, end - 16 * _TAIL_TOKENS) : end].replace(b" ", b"").strip(b"[]").split(b",")
        start_match = _INPUT_LOGPROBS.search(body, end)
        length = None if self._exact else body.count(b",", start, end) + 1 + self._extra_image_tokens(body)
        tail = b",".join(last[-_TAIL_TOKENS:])
        key: tuple[bytes, Any, Any] = (tail, int(start_match[1]) if start_match else None, length)
        if key not in self._answers:
            self._answers[key] = self._encode(*key)
        expected, answer = self._answers[key]
        if self._exact and body[start:end] != expected and body[start:end].replace(b" ", b"") != expected:
            raise _UnexpectedRequestError(_difference(orjson.loads(body[start:end]), orjson.loads(expected)))
        return answer

    def _extra_image_tokens(self, body: bytes) -> int:
        """Return how many tokens the images of a request add to its ids, which have one id per image."""
        return body.count(_IMAGE) * (self._image_tokens - 1)

    def _encode(self, tail: bytes, input_logprobs_from: int | None, length: int | None) -> tuple[bytes, bytes]:
        """Return the input that a turn expects, and its answer."""
        if tail not in self._turns:
            raise _UnexpectedRequestError(f"no turn expects an input that ends with {tail!r:.200}")
        script, number = self._turns[tail]
        answer = _generate_answer(script, number, input_logprobs_from, length)
        return orjson.dumps(script.input_ids(number)), answer

    def chat(self, body: bytes) -> list[bytes]:
        messages = orjson.loads(body)["messages"]
        content = next(message["content"] for message in messages if message["role"] == "user")
        question = content if isinstance(content, str) else "".join(part["text"] for part in content)
        number = sum(message["role"] == "assistant" for message in messages)
        script = self._questions.get(question)
        if script is None or number > script.tool_turns:
            raise _UnexpectedRequestError(f"got {number} answers to {question!r:.200}, which no script has")
        if (question, number) not in self._chats:
            self._chats[question, number] = _chat_answer(script, number)
        return self._chats[question, number]

    def results_of(self, question: str) -> list[str]:
        return [turn.result for turn in self._questions[question].turns[:-1]]


def _tail(ids: Sequence[int]) -> bytes:
    return ",".join(map(str, ids[-_TAIL_TOKENS:])).encode()


def _difference(got: Sequence[int], expected: Sequence[int]) -> str:
    at = next((n for n, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), "the end")
    return f"got {len(got)} input ids, expected {len(expected)}; the first difference is at {at}"


class _Server:
    """HTTP server of the scripts; counts answered generations, bytes including HTTP heads, and opened connections."""

    def __init__(self, scripts: _Scripts) -> None:
        self._scripts = scripts
        self._counts = dict.fromkeys(("requests", "bytes_in", "bytes_out", "connections"), 0)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._counts["connections"] += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # the client has disconnected
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(_content_length(head))
                self._counts["bytes_in"] += len(head) + len(body)
                path = head.split(b" ", 2)[1]
                for piece in [await self._play(body)] if path == b"/play" else self._answer(path, body):
                    writer.write(piece)
                    await asyncio.sleep(0)  # streamed tokens come one by one, so let other connections run
        writer.close()

    async def _play(self, body: bytes) -> bytes:
        """Make the client play an episode through the gateway."""
        api, url, key, question = orjson.loads(body)
        try:
            await gateway_client.play(api, url, key, question, self._scripts.results_of(question))
        except (ValueError, OSError, asyncio.IncompleteReadError) as e:
            print(f"not played: {e}", file=sys.stderr, flush=True)
            return _http_answer({}, status=404)
        return _http_answer({})

    def _answer(self, path: bytes, body: bytes) -> list[bytes]:
        if path == b"/counters":
            return [_http_answer({**self._counts, "cpu_s": time.process_time()})]
        try:
            if path == b"/generate":
                answer = [self._scripts.generate(body)]
            elif path == b"/v1/chat/completions":
                answer = self._scripts.chat(body)
            else:
                return [_INFO]
            self._counts["requests"] += 1
        except _UnexpectedRequestError as e:
            print(f"refused: {e}", file=sys.stderr, flush=True)
            answer = [_http_answer({"error": {"message": str(e)}}, status=404)]
        self._counts["bytes_out"] += sum(map(len, answer))
        return answer


def _content_length(head: bytes) -> int:
    found = _CONTENT_LENGTH.search(head)
    return int(found[1]) if found else 0


async def _serve(scripts: _Scripts) -> None:
    server = await asyncio.start_server(_Server(scripts).connected, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # returns when the parent process closes it or ends


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scripts", type=Path, nargs="+")
    parser.add_argument("--core", type=int)
    parser.add_argument("--any-input", action="store_true")
    parser.add_argument("--image-tokens", type=int, default=1)
    options = parser.parse_args()
    pin_to(options.core)
    found = [script for path in options.scripts for script in load_scripts(path)]
    scripts = _Scripts(found, exact=not options.any_input, image_tokens=options.image_tokens)
    gc.freeze()
    asyncio.run(_serve(scripts))


if __name__ == "__main__":
    main()
