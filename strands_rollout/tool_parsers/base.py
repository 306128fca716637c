"""What every tool-call format is parsed into, and the promise that a parser makes.

Knows no format. Parsers never raise over what a model wrote and never repair it: what does not follow the format
becomes a `ParseFailure`, so that the model can be told.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

NewId = Callable[[], str]


def random_id() -> str:
    """An id that no other call has, in any episode."""
    return f"call_{uuid.uuid4().hex}"


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
        written_id: The id that the model itself wrote, in formats that have one; its result is shown under it. A model
            may write one twice.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    written_id: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ParseFailure:
    """One attempt at a call that does not follow the format.

    Attributes:
        raw: The text of the attempt, tags included.
        reason: What was found where, and what was expected: words for the model.
        name: The tool that was meant, where it can be read.
        written_id: The call's id, likewise; see `ToolCall`.
    """

    raw: str
    reason: str
    name: str | None = None
    written_id: str | None = field(default=None, compare=False)


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


@runtime_checkable
class UntypedParser(Protocol):
    """What a parser may have beside `ToolParser`: its format's values have no types, but for the tools' schemas."""

    def for_tools(self, schemas: Mapping[str, Mapping[str, Any]]) -> ToolParser:
        """The same parser for these tools.

        Args:
            schemas: The JSON Schema of each tool's arguments, by the tool's name. A tool that is not among them is no
                failure, as everywhere: its values are read by the format's rule for values of no known type.
        """
        ...


class MalformedError(ValueError):
    """What a parser found at a place does not follow the format; becomes a `ParseFailure`.

    Args:
        reason: Words for the model.
        name: The tool that was meant, where it can be read.
        position: The attempt goes on at least up to here; None where nothing of it could be read.

    Attributes:
        written_id: The id of the call, where it could be read.
    """

    def __init__(self, reason: str, name: str | None = None, position: int | None = None) -> None:
        super().__init__(reason)
        self.name = name
        self.position = position
        self.written_id: str | None = None


def calls_and_failures(segments: Iterable[Segment]) -> list[ToolCall | ParseFailure]:
    """Only the calls and failures, in their order."""
    return [segment for segment in segments if isinstance(segment, ToolCall | ParseFailure)]


def add_segment(found: list[Segment], segment: Segment) -> None:
    """Append a segment, unless it is text of white space only."""
    if not isinstance(segment, Text | Reasoning) or segment.text.strip():
        found.append(segment)
