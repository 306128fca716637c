"""Finds what the assistant said last, outside its reasoning, its tool calls and every tool's output.

Knows the markers of ChatML and of Qwen/Hermes tool use, as text. All functions are pure, and linear in the text.
"""

from __future__ import annotations

import re
from typing import Final

_TURN_START: Final = "<|im_start|>"
_TURN_END: Final = re.compile(r"<\|im_end\|>|<\|endoftext\|>")
_THINK_TAG: Final = re.compile(r"</?think>")
_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_RESULT_OPEN, _RESULT_CLOSE = "<tool_response>", "</tool_response>"


def last_assistant_text(response: str, *, in_reasoning: bool = False) -> str:
    """Cut the assistant's last words out of a whole response that is known as text only.

    Everything up to the last `</tool_response>` is taken for tool output or older than it, so that a tool's output
    can't pose as the assistant, whatever markers it contains. Text alone can't tell two things: a response cut off
    inside a tool's output that contains a forged `</tool_response>`, and templates that mark tool output otherwise.
    Where the last turn's own text is known, pass that to `spoken_text` instead.

    Args:
        response: Decoded response tokens, control tokens included: from the first assistant turn to the end.
        in_reasoning: The prompt has opened `<think>` for the first assistant turn.

    Returns:
        What is left of the last assistant turn, stripped; "" if it gave no answer, as `spoken_text` says.
    """
    _, result_close, rest = response.rpartition(_RESULT_CLOSE)
    rest = rest.partition(_RESULT_OPEN)[0]
    first, *later = rest.split(_TURN_START)
    for turn in reversed(later):
        role, _, text = turn.partition("\n")
        if role.strip() == "assistant":
            return spoken_text(text)
    return spoken_text(first, in_reasoning=in_reasoning and not result_close)


def spoken_text(turn: str, *, in_reasoning: bool = False) -> str:
    """What one assistant turn says to the user: without reasoning, tool calls and tool results it made up.

    Args:
        turn: The decoded text of one assistant turn.
        in_reasoning: The prompt had opened `<think>`, so that the turn begins inside the reasoning.

    Returns:
        The rest, stripped. "" when the reasoning never ended, or when the turn ends in a tool call: it was a step then,
        not an answer.
    """
    said = _TURN_END.split(turn, maxsplit=1)[0]
    said = _without_reasoning(said, in_reasoning=in_reasoning)
    said = _without_blocks(said, _RESULT_OPEN, _RESULT_CLOSE)[0]
    said, after_last_call = _without_blocks(said, _CALL_OPEN, _CALL_CLOSE)
    return said.strip() if after_last_call.strip() else ""


def _without_reasoning(text: str, *, in_reasoning: bool) -> str:
    """Drop `<think>...</think>`; a stray `</think>` ends reasoning from the start, an unclosed `<think>` leaves ""."""
    kept: list[str] = []
    start = 0
    for tag in _THINK_TAG.finditer(text):
        if tag[0] == "</think>":
            if not in_reasoning:
                kept.clear()
            start = tag.end()
        elif not in_reasoning:
            kept.append(text[start : tag.start()])
        in_reasoning = tag[0] == "<think>"
    return "" if in_reasoning else "".join([*kept, text[start:]])


def _without_blocks(text: str, opening: str, closing: str) -> tuple[str, str]:
    """Drop each block, and all after an unclosed one; return the rest, and the part of it after the last block."""
    kept: list[str] = []
    start = 0
    while (block := text.find(opening, start)) >= 0:
        kept.append(text[start:block])
        end = text.find(closing, block)
        start = len(text) if end < 0 else end + len(closing)
    return "".join([*kept, text[start:]]), text[start:]
