"""The text of an assistant's turn taken apart: reasoning, content and tool calls in Qwen3's (Hermes) format.

Knows text only. The same function serves whole answers and, called again with more text, streams: what it has returned
of an unfinished text stays a prefix of what it returns later.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

_THINK, _THINK_END = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"


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
    """Take a turn apart.

    Args:
        text: All of the turn so far.
        in_reasoning: The prompt already opened the reasoning.
        with_calls: Whether to look for tool calls.
        final: Nothing more will come; otherwise what may turn out to be part of a tag is held back.
    """
    opened = text.lstrip()
    if in_reasoning or opened.startswith(_THINK):
        body = text if in_reasoning else opened[len(_THINK) :]
        reasoning, closed, rest = body.partition(_THINK_END)
        if not closed:
            shown = body if final else _without_partial(body, _THINK_END)
            return ChatParts(shown.strip("\n"), "", ())
        content, calls = _content(rest, with_calls=with_calls, final=final)
        return ChatParts(reasoning.strip("\n"), content, calls)
    if not final and _THINK.startswith(opened):
        return ChatParts("", "", ())
    content, calls = _content(text, with_calls=with_calls, final=final)
    return ChatParts("", content, calls)


def _content(text: str, *, with_calls: bool, final: bool) -> tuple[str, tuple[ChatCall, ...]]:
    if not with_calls:
        return text.strip("\n"), ()
    pieces: list[str] = []
    calls: list[ChatCall] = []
    while True:
        before, found, after = text.partition(_CALL)
        if not found:
            pieces.append(text if final else _without_partial(text, _CALL))
            break
        pieces.append(before)
        body, closed, rest = after.partition(_CALL_END)
        if not closed:
            pieces.append(found + after if final else "")
            break
        call = _parsed(body)
        if call is None:
            pieces.append(found + body + closed)
        else:
            calls.append(call)
        text = rest
    return "".join(pieces).strip("\n"), tuple(calls)


def _parsed(body: str) -> ChatCall | None:
    """The call that a block spells, or None if it is not exactly a JSON object with a name and an arguments object."""
    try:
        call = json.loads(body)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ChatCall(call["name"], json.dumps(arguments, ensure_ascii=False))


def _without_partial(text: str, tag: str) -> str:
    """`text` without an ending that could be the beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return text[:-length]
    return text
