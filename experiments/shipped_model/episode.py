"""Episodes as text: the question, the assistant's turns, and the tools' answers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the assistant, without the end-of-turn token.

    Attributes:
        text: Text after the generation prompt.
        is_learned: True if the model is trained on the turn; False for a deliberate mistake.
        tool_answer: Answer of the tool; None for the last turn.
    """

    text: str
    is_learned: bool
    tool_answer: str | None


@dataclass(frozen=True, slots=True)
class Episode:
    """A question and all turns of its solution.

    Attributes:
        question: Text of the user's message.
        enable_thinking: False if the template itself writes an empty reasoning block.
        turns: The last turn answers in a box, all others call a tool; a guess has only the last turn.
    """

    question: str
    enable_thinking: bool
    turns: tuple[Turn, ...]


def call_text(name: str, arguments: Mapping[str, object]) -> str:
    """Return a tool call in Qwen3's format."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def turn_text(reasoning: str, answer: str, *, enable_thinking: bool) -> str:
    """Return a turn's text.

    If `enable_thinking` is false, this is only the answer: the template writes an empty reasoning block before it.
    """
    return f"<think>\n{reasoning}\n</think>\n\n{answer}" if enable_thinking else answer


def conclusion(result: str, *, enable_thinking: bool) -> Turn:
    """Return the last turn, with the result in a box."""
    text = turn_text(f"The result is {result}.", f"The answer is \\boxed{{{result}}}.", enable_thinking=enable_thinking)
    return Turn(text, is_learned=True, tool_answer=None)
