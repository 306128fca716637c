"""What the formats share whose calls and reasoning stand between tags: one scan from left to right.

Knows no format: each says which tags there are, and reads what a tag begins.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

from strands_rollout.tool_parsers.base import (
    NewId,
    ParseFailure,
    Reasoning,
    Segment,
    Text,
    ToolCall,
    add_segment,
    calls_and_failures,
    random_id,
)
from strands_rollout.tool_parsers.strict_json import JSONSource

_SPACE: Final = re.compile(r"\s*")


class TaggedParser(ABC):
    """A parser of such a format; see `ToolParser`.

    Outside reasoning its tag opens it, and the tags of calls open calls. Reasoning ends at its first closing tag;
    without one all the rest is reasoning. A closing tag that closes nothing says that everything before it was
    reasoning.

    Args:
        new_id: Makes the ids of calls.

    Attributes:
        tags: Matches the tags of calls and reasoning.
        open_reasoning: The tag that opens reasoning.
        close_reasoning: The tag that closes it.
    """

    tags: ClassVar[re.Pattern[str]]
    open_reasoning: ClassVar[str] = "<think>"
    close_reasoning: ClassVar[str] = "</think>"

    def __init__(self, new_id: NewId = random_id) -> None:
        self._new_id = new_id

    def parse(self, text: str, in_reasoning: bool = False) -> list[ToolCall | ParseFailure]:  # noqa: FBT001, FBT002
        """Return the calls and failures in the order of the text."""
        return calls_and_failures(self.segments(text, in_reasoning))

    def segments(self, text: str, in_reasoning: bool = False) -> list[Segment]:  # noqa: FBT001, FBT002
        """Split the text into reasoning, text, calls and failures, in its order, in time linear in the text."""
        source = JSONSource(text)
        found: list[Segment] = []
        reasoning_end, start = self._end_of_reasoning(text, 0) if in_reasoning else (0, 0)
        position, is_first = start, True
        while tag := self.tags.search(source, position):
            if tag[0] == self.close_reasoning:
                found.clear()
                reasoning_end, start = tag.span()
                position, is_first = start, True
                continue
            is_first = is_first and _SPACE.fullmatch(text, start, tag.start()) is not None
            read = self._read(source, tag, is_first=is_first)
            if read is None:
                position = tag.end()
                continue
            add_segment(found, Text(text[start : tag.start()]))
            segments, start = read
            position, is_first = start, is_first and tag[0] == self.open_reasoning
            for segment in segments:
                add_segment(found, segment)
        add_segment(found, Text(text[start:]))
        head: list[Segment] = []
        add_segment(head, Reasoning(text[:reasoning_end]))
        return head + found

    def _read(self, text: JSONSource, tag: re.Match[str], *, is_first: bool) -> tuple[Sequence[Segment], int] | None:
        """What a tag begins, and the position after it; None where it is no tag there."""
        if tag[0] != self.open_reasoning:
            return self._read_call(text, tag, is_first=is_first)
        end, after = self._end_of_reasoning(text, tag.end())
        return [Reasoning(text[tag.end() : end])], after

    @abstractmethod
    def _read_call(
        self, text: JSONSource, tag: re.Match[str], *, is_first: bool
    ) -> tuple[Sequence[Segment], int] | None:
        """What a tag of calls begins; see `_read`. `is_first` says that only reasoning stands before it."""

    def _end_of_reasoning(self, text: str, start: int) -> tuple[int, int]:
        """Where reasoning that goes on at `start` ends, and where the text goes on after it."""
        end = text.find(self.close_reasoning, start)
        return (len(text), len(text)) if end < 0 else (end, end + len(self.close_reasoning))
