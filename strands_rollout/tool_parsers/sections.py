"""Formats with several calls in a section between two tags, each call between two more; and values between tags."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from strands_rollout.files.json_codec import Json
from strands_rollout.tool_parsers import base
from strands_rollout.tool_parsers.base import MalformedError, ParseFailure, Read, TaggedParser, ToolCall

ReadCall = tuple[str, dict[str, Any], str | None, int]
"""A call's tool, its arguments, the id that the model wrote, if any, and the position after its closing tag."""


class Section(NamedTuple):
    """The tags of a section with one call or more, and what reads a call after its own opening tag."""

    open: str
    close: str
    open_call: str
    close_call: str
    read: Callable[[base.JSONSource, int], ReadCall]

    def end_of_failure(self, text: str, start: int, *others: str) -> int:
        """Where an attempt at a call ends: after the call's closing tag, or before the next of the others."""
        nearest = re.compile("|".join(map(re.escape, (self.close_call, *others)))).search(text, start)
        if nearest is None:
            return len(text)
        return nearest.end() if nearest[0] == self.close_call else nearest.start()


class SectionParser(TaggedParser):
    """A parser of such formats. Calls outside of a section are failures.

    A call that is malformed is a failure, and the next one counts. A section that is never closed is one failure: where
    it would have ended is not known.
    """

    sections: Mapping[str, Section]
    """By a text that their tags have, and those before them have not."""

    def _read_call(self, text: base.JSONSource, tag: re.Match[str]) -> Read:
        section = next(section for sign, section in self.sections.items() if sign in tag[0])
        if tag[0] == section.open:
            return self._read_section(text, tag, section)
        is_call = tag[0] == section.open_call
        end = section.end_of_failure(text, tag.end(), section.open, section.close) if is_call else tag.end()
        reason = f"{tag[0]} stands outside of {section.open} ... {section.close}"
        return [ParseFailure(text[tag.start() : end], reason)], end

    def _read_section(self, text: base.JSONSource, tag: re.Match[str], section: Section) -> Read:
        found: list[ToolCall | ParseFailure] = []
        position = base.skip_white_space(text, tag.end())
        while not text.startswith(section.close, position):
            if position == len(text):
                reasons = [part.reason for part in found if isinstance(part, ParseFailure)]
                reasons.append(f"unterminated: there is no {section.close} after it")
                named = next((part.name for part in found if part.name), None)
                return [ParseFailure(text[tag.start() :], "; ".join(reasons), named)], position
            segment, position = self._read_one(text, position, section)
            found.append(segment)
            position = base.skip_white_space(text, position)
        end = position + len(section.close)
        return found or [ParseFailure(text[tag.start() : end], "there is no call between the tags")], end

    def _read_one(self, text: base.JSONSource, start: int, section: Section) -> tuple[ToolCall | ParseFailure, int]:
        """What begins there in a section: a call, or an attempt at one up to where the next thing begins."""
        if not text.startswith(section.open_call, start):
            end = section.end_of_failure(text, start, section.close, section.open_call)
            reason = f"expected {section.open_call} or {section.close}; got {base.got(text, start)}"
            return ParseFailure(text[start:end], reason), end
        inside = start + len(section.open_call)
        try:
            name, arguments, written_id, after = section.read(text, inside)
        except MalformedError as e:
            end = section.end_of_failure(text, e.position or inside, section.close, section.open_call)
            return ParseFailure(text[start:end], str(e), e.name, e.written_id), end
        return ToolCall(self._new_id(), name, arguments, written_id), after


@dataclass(frozen=True, slots=True)
class ValueTags:
    """The tags around the values of arguments, in formats that escape nothing: a value ends at the first tag.

    Attributes:
        open: What stands before a value; its first group is the key.
        close: The tag after a value.
        inner: The beginnings of all tags that a value can't hold: another than `close` may be a forgotten close.
        key_words: How a key is named to the model, by key and tool.
        value_words: How a value is named, likewise.
        unclosed: What is said of a value without `close`, by `value`, `close`, the `tag` that was found, and the `rest`
            of the text from there.
        key_of: Makes the key of what is written for it.
    """

    open: re.Pattern[str]
    close: str
    inner: re.Pattern[str]
    key_words: str
    value_words: str
    unclosed: str = "{value} is not closed by {close}; got {rest}"
    key_of: Callable[[str], str] = str

    def read(
        self, text: str, start: int, tool: str, value_of: Callable[[re.Match[str], str, str], Json]
    ) -> tuple[dict[str, Any], int]:
        """Read the arguments that begin at a position.

        Args:
            text: The text that holds them.
            start: Where the first one may begin.
            tool: The tool that is called.
            value_of: Makes a value of the match of `open`, the key, and what stands between the tags.

        Returns:
            The arguments, and the position after the last one.

        Raises:
            MalformedError: A value is not closed, or is none of its type, or a key stands twice.
        """
        arguments, position = dict[str, Any](), start
        while opened := self.open.match(text, position):
            key, end = self.key_of(opened[1]), self.inner.search(text, opened.end())
            at = len(text) if end is None else end.start()
            if not text.startswith(self.close, at):
                tag = "the end of the block" if end is None else repr(end[0])
                value = self.value_words.format(key, tool)
                reason = self.unclosed.format(value=value, close=self.close, tag=tag, rest=base.got(text, at))
                raise MalformedError(reason, tool, at)
            position = at + len(self.close)
            if key in arguments:
                raise MalformedError(f"{self.key_words.format(key, tool)} stands twice", tool, position)
            try:
                arguments[key] = value_of(opened, key, text[opened.end() : at])
            except MalformedError as e:
                e.name, e.position = tool, position
                raise
        return arguments, position
