"""Blocks between two tags, read as calls or failures: a block with one call, and a section of several.

Knows where a block and a failure end; what is in a block is read by the format.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from strands_rollout.tool_parsers.base import MalformedError, NewId, ParseFailure, ToolCall
from strands_rollout.tool_parsers.strict_json import JSONSource, StrictJSONError, decode_object, skip_white_space


class Call(NamedTuple):
    """A tool's name and arguments, and the id that stands beside them, if any."""

    name: str
    arguments: dict[str, Any]
    written_id: str | None = None


@dataclass(frozen=True, slots=True)
class SectionTags:
    """The tags of a section with one call or more.

    Attributes:
        open: Opens the section.
        close: Closes it.
        open_call: Opens a call.
        close_call: Closes it.
        any: Matches each of the last three.
    """

    open: str
    close: str
    open_call: str
    close_call: str
    any: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        inner = (self.close, self.open_call, self.close_call)
        object.__setattr__(self, "any", re.compile("|".join(map(re.escape, inner))))


ReadInside = Callable[[JSONSource, int], tuple[Call, int]]
"""Text and a position after a call's opening tag -> the call, and the position after it; or raises MalformedError."""


def read_block(
    text: str, tag: re.Match[str], close: str, read: Callable[[str], Call], new_id: NewId
) -> tuple[ToolCall | ParseFailure, int]:
    """The call of a block whose format has no way to write its closing tag as content: it ends at the first one.

    Args:
        text: The whole text.
        tag: The tag that opens the block.
        close: The tag that closes it.
        read: Reads what is between them; raises MalformedError.
        new_id: Makes the call's id.
    """
    end = text.find(close, tag.end())
    inside = text[tag.end() : len(text) if end < 0 else end]
    after = len(text) if end < 0 else end + len(close)
    try:
        name, arguments, _ = read(inside)
    except MalformedError as e:
        reasons, meant = [str(e)], e.name
    else:
        if end >= 0:
            return ToolCall(new_id(), name, arguments), after
        reasons, meant = [], name
    if end < 0:
        reasons.append(f"unterminated: there is no {close} after it")
    return ParseFailure(text[tag.start() : after], "; ".join(reasons), meant), after


def read_section(
    text: JSONSource, tag: re.Match[str], tags: SectionTags, read: ReadInside, new_id: NewId
) -> tuple[list[ToolCall | ParseFailure], int]:
    """The calls of a section, and the position after it.

    A call that is malformed is a failure, and the next one counts. A section that is never closed is one failure:
    where it would have ended is not known.
    """
    found: list[ToolCall | ParseFailure] = []
    position = skip_white_space(text, tag.end())
    while not text.startswith(tags.close, position):
        if position == len(text):
            reason = f"unterminated: there is no {tags.close} after it"
            reasons = [part.reason for part in found if isinstance(part, ParseFailure)]
            named = next((part.name for part in found if part.name), None)
            return [ParseFailure(text[tag.start() :], "; ".join([*reasons, reason]), named)], position
        segment, position = _read_one(text, position, tags, read, new_id)
        found.append(segment)
        position = skip_white_space(text, position)
    end = position + len(tags.close)
    return found or [ParseFailure(text[tag.start() : end], "there is no call between the tags")], end


def read_stray(text: str, tag: re.Match[str], tags: SectionTags) -> tuple[list[ParseFailure], int]:
    """The failure that a tag outside of a section is: with its call, where it opens one."""
    end = tag.end()
    if tag[0] == tags.open_call:
        ends = re.compile("|".join(map(re.escape, (tags.close_call, tags.open, tags.close))))
        nearest = ends.search(text, end)
        end = len(text) if nearest is None else nearest.start() + len(tags.close_call) * (nearest[0] == tags.close_call)
    return [ParseFailure(text[tag.start() : end], f"{tag[0]} stands outside of {tags.open} ... {tags.close}")], end


def decode_arguments(text: JSONSource, start: int, name: str) -> tuple[dict[str, Any], int]:
    """The JSON object of a call's arguments, white space before it, and the position after it."""
    try:
        return decode_object(text, skip_white_space(text, start), origin=start)
    except StrictJSONError as e:
        raise MalformedError(f"the arguments of {name!r}: {e}", name) from e


def end_of_tag(text: str, start: int, tag: str, name: str) -> int:
    """The position after a tag that must stand there, white space before it; raises MalformedError."""
    begin = skip_white_space(text, start)
    if not text.startswith(tag, begin):
        raise MalformedError(f"expected {tag} after the arguments of {name!r}; got {got(text, begin)}", name, start)
    return begin + len(tag)


def got(text: str, position: int) -> str:
    """What stands there, in words for the model."""
    return repr(text[position : position + 20]) if position < len(text) else "the end of the text"


def _read_one(
    text: JSONSource, start: int, tags: SectionTags, read: ReadInside, new_id: NewId
) -> tuple[ToolCall | ParseFailure, int]:
    """What begins there in a section: a call, or an attempt at one up to where the next thing begins."""
    if not text.startswith(tags.open_call, start):
        end = _end_of_failure(text, start, tags)
        return ParseFailure(text[start:end], f"expected {tags.open_call} or {tags.close}; got {got(text, start)}"), end
    inside = start + len(tags.open_call)
    try:
        call, end = read(text, inside)
        after = end_of_tag(text, end, tags.close_call, call.name)
    except MalformedError as e:
        end = _end_of_failure(text, e.position or inside, tags)
        return ParseFailure(text[start:end], str(e), e.name, e.written_id), end
    return ToolCall(new_id(), call.name, call.arguments, call.written_id), after


def _end_of_failure(text: str, start: int, tags: SectionTags) -> int:
    """Where an attempt ends: after the call's closing tag, or before the next other tag of the section."""
    nearest = tags.any.search(text, start)
    if nearest is None:
        return len(text)
    return nearest.end() if nearest[0] == tags.close_call else nearest.start()
