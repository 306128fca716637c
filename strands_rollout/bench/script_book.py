"""Finds the scripted turn that a request asks for, and refuses a request that is not the script's.

Knows requests' bodies; nothing of sockets. Ids are compared as the text that they are in the body, and an answer is
encoded once: the engine must stay light.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import orjson

from strands_rollout.bench.answer_bodies import chat_answer, generate_answer
from strands_rollout.bench.answer_script import AnswerScript

_TAIL_TOKENS: Final = 72
_IDS: Final = b'"input_ids":'
_INPUT_LOGPROBS: Final = re.compile(rb'"logprob_start_len": ?(\d+)')


class UnexpectedRequestError(Exception):
    """A request that no turn of any script expects."""


class ScriptBook:
    """All scripts of an engine, with the answers that were asked for so far.

    Args:
        scripts: The episodes.
        exact: Whether a request must hold the script's own tokens; else only its last ones name the turn.
    """

    def __init__(self, scripts: Sequence[AnswerScript], *, exact: bool = True) -> None:
        self._exact = exact
        self._turns = {_tail(ids): (script, number) for script in scripts for number, ids in enumerate(_inputs(script))}
        self._questions = {script.question: script for script in scripts}
        self._answers: dict[tuple[bytes, int | None], tuple[bytes, bytes]] = {}
        self._chats: dict[tuple[str, int], list[bytes]] = {}
        # whoever plays first must not wait longer than whoever plays next
        for tail in self._turns:
            self._answers[tail, None] = self._encode(tail, None)

    def generate(self, body: bytes) -> bytes:
        """The response to a `/generate` request.

        Raises:
            UnexpectedRequestError: No turn has this input.
        """
        start = body.find(_IDS) + len(_IDS)
        end = body.find(b"]", start) + 1
        # the last ids name the turn
        last = body[max(start, end - 16 * _TAIL_TOKENS) : end].replace(b" ", b"").strip(b"[]").split(b",")
        asked = _INPUT_LOGPROBS.search(body, end)
        key = (b",".join(last[-_TAIL_TOKENS:]), int(asked[1]) if asked else None)
        if key not in self._answers:
            self._answers[key] = self._encode(*key)
        expected, answer = self._answers[key]
        if self._exact and body[start:end] != expected and body[start:end].replace(b" ", b"") != expected:
            raise UnexpectedRequestError(_difference(orjson.loads(body[start:end]), orjson.loads(expected)))
        return answer

    def _encode(self, tail: bytes, input_logprobs_from: int | None) -> tuple[bytes, bytes]:
        """The input that a turn expects, and its answer."""
        found = self._turns.get(tail)
        if found is None:
            raise UnexpectedRequestError(f"got the input {tail!r:.200}, which ends no turn's input")
        script, number = found
        answer = generate_answer(script, number, input_logprobs_from=input_logprobs_from)
        return orjson.dumps(_inputs(script)[number]), answer

    def chat(self, body: bytes) -> list[bytes]:
        """The response to a `/v1/chat/completions` request, as pieces that are sent one by one.

        Raises:
            UnexpectedRequestError: No script has this question, or it has no such turn.
        """
        messages = orjson.loads(body)["messages"]
        question = _text(next(message["content"] for message in messages if message["role"] == "user"))
        number = sum(message["role"] == "assistant" for message in messages)
        script = self._questions.get(question)
        if script is None or number > script.tool_turns:
            raise UnexpectedRequestError(f"got {number} answers to {question!r:.200}, which no script has")
        if (question, number) not in self._chats:
            self._chats[question, number] = chat_answer(script, number)
        return self._chats[question, number]


def _inputs(script: AnswerScript) -> list[list[int]]:
    tokens = script.tokens()
    return [tokens[:length] for length in script.input_lengths()]


def _difference(got: Sequence[int], expected: Sequence[int]) -> str:
    at = next((n for n, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), "the end")
    return f"got {len(got)} input ids, expected {len(expected)}; they differ from {at} on"


def _tail(ids: Sequence[int]) -> bytes:
    return ",".join(map(str, ids[-_TAIL_TOKENS:])).encode()


def _text(content: object) -> str:
    """A message's content, which is a string or a list of text parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)  # type: ignore[attr-defined]
