"""A whole conversation as text: the question, what the assistant says, what its tools answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the assistant, without the end-of-turn token.

    Attributes:
        text: From the first character after the generation prompt.
        is_learned: Whether the model is trained to say it; a deliberate mistake is not.
        tool_answer: What the tool answers, or None after the last turn.
    """

    text: str
    is_learned: bool
    tool_answer: str | None


@dataclass(frozen=True, slots=True)
class Episode:
    """A question and all turns of its solution.

    Attributes:
        question: The user's text.
        enable_thinking: False where the template itself opens and closes an empty reasoning block.
        turns: The last one answers in a box, all others call a tool; a guess has no others.
    """

    question: str
    enable_thinking: bool
    turns: tuple[Turn, ...]


def call_text(name: str, arguments: Mapping[str, object]) -> str:
    """A tool call as Qwen3 writes it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def said(reasoning: str, speech: str, *, enable_thinking: bool) -> str:
    """A turn's text; without thinking, the template has closed the reasoning before it."""
    return f"<think>\n{reasoning}\n</think>\n\n{speech}" if enable_thinking else speech


def conclusion(result: str, *, enable_thinking: bool) -> Turn:
    """The last turn: the result in a box."""
    text = said(f"The result is {result}.", f"The answer is \\boxed{{{result}}}.", enable_thinking=enable_thinking)
    return Turn(text, is_learned=True, tool_answer=None)
