"""What every tool-call format is parsed into, and the promise that a parser makes.

Knows no format. Parsers never raise over what a model wrote and never repair it: what does not follow the format
becomes a `ParseFailure`, so that the model can be told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

NewId = Callable[[], str]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself, without its tags. Calls inside it are drafts and stay text."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the reader: outside reasoning and outside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that follows the format.

    Attributes:
        id: From the parser's id source; unique over an episode.
        name: Not empty; whether such a tool exists is not known here.
        arguments: A JSON object: finite numbers, no lone surrogates, at most 100 levels deep.
    """

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParseFailure:
    """One attempt at a call that does not follow the format.

    Attributes:
        raw: The text of the attempt, tags included.
        reason: What was found where, and what was expected: words for the model.
        name: The tool that was meant, where it can be read.
    """

    raw: str
    reason: str
    name: str | None = None


Segment = Reasoning | Text | ToolCall | ParseFailure


class ToolParser(Protocol):
    """One family's format. Pure but for the ids that it gives to calls."""

    def segments(self, text: str, in_reasoning: bool = False) -> list[Segment]:  # noqa: FBT001, FBT002 - public signature
        """Split a finished turn into its parts, in the order of the text; never raises over the text.

        Parts that are only white space are left out.

        Args:
            text: The sampled text, special tokens included, without the token that ended the turn.
            in_reasoning: Whether the prompt already opened the reasoning.
        """
        ...

    def parse(self, text: str, in_reasoning: bool = False) -> list[ToolCall | ParseFailure]:  # noqa: FBT001, FBT002
        """Return only the calls and failures of `segments`."""
        ...
