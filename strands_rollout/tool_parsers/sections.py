"""The base class of parsers for formats with a section of calls, and the reader of values between tags."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from strands_rollout.files.json_codec import Json
from strands_rollout.tool_parsers import base
from strands_rollout.tool_parsers.base import MalformedError, ParseFailure, ReadResult, TaggedParser, ToolCall

ReadCall = tuple[str, dict[str, Any], str | None, int]
"""A call: the tool's name, the arguments, the id that the model wrote (or None), and the position after the call."""


class Section(NamedTuple):
    """The tags around a section of calls and around each call; `read` parses a call after its opening tag."""

    open: str
    close: str
    open_call: str
    close_call: str
    read: Callable[[base.JSONSource, int], ReadCall]

    def find_failure_end(self, text: str, start: int, *others: str) -> int:
        """Return the end of a malformed call: after its closing tag or before one of `others`, whichever comes first.

        If there is neither, the call extends to the end of the text.
        """
        nearest = re.compile("|".join(map(re.escape, (self.close_call, *others)))).search(text, start)
        if nearest is None:
            return len(text)
        return nearest.end() if nearest[0] == self.close_call else nearest.start()


class SectionParser(TaggedParser):
    """Base class for formats with a section of calls. A call outside of a section is a failure.

    Each malformed call in a section is a failure; the calls after it are parsed. A section without a closing tag is a
    single failure, since its end is unknown; so is a section without calls.
    """

    sections: Mapping[str, Section]
    """Text that occurs in the tags of a section -> the section. The first match is used, so "" must be last."""

    def _read_call(self, text: base.JSONSource, tag: re.Match[str]) -> ReadResult:
        section = next(section for part, section in self.sections.items() if part in tag[0])
        if tag[0] == section.open:
            return self._read_section(text, tag, section)
        is_call = tag[0] == section.open_call
        end = section.find_failure_end(text, tag.end(), section.open, section.close) if is_call else tag.end()
        reason = f"{tag[0]} stands outside of {section.open} ... {section.close}"
        return [ParseFailure(text[tag.start() : end], reason)], end

    def _read_section(self, text: base.JSONSource, tag: re.Match[str], section: Section) -> ReadResult:
        found: list[ToolCall | ParseFailure] = []
        position = base.skip_white_space(text, tag.end())
        while not text.startswith(section.close, position):
            if position == len(text):
                reasons = [part.reason for part in found if isinstance(part, ParseFailure)]
                reasons.append(f"unterminated: there is no {section.close} after it")
                named = next((part.name for part in found if part.name), None)
                return [ParseFailure(text[tag.start() :], "; ".join(reasons), named)], position
            segment, position = self._read_section_call(text, position, section)
            found.append(segment)
            position = base.skip_white_space(text, position)
        end = position + len(section.close)
        return found or [ParseFailure(text[tag.start() : end], "there is no call between the tags")], end

    def _read_section_call(
        self, text: base.JSONSource, start: int, section: Section
    ) -> tuple[ToolCall | ParseFailure, int]:
        if not text.startswith(section.open_call, start):
            end = section.find_failure_end(text, start, section.close, section.open_call)
            reason = f"expected {section.open_call} or {section.close}; got {base.quote(text, start)}"
            return ParseFailure(text[start:end], reason), end
        inside = start + len(section.open_call)
        try:
            name, arguments, written_id, after = section.read(text, inside)
        except MalformedError as e:
            end = section.find_failure_end(text, e.position or inside, section.close, section.open_call)
            return ParseFailure(text[start:end], str(e), e.name, e.written_id), end
        return ToolCall(self._new_id(), name, arguments, written_id), after


@dataclass(frozen=True, slots=True)
class ValueTags:
    """Parser of arguments whose values are enclosed in tags, for formats without escapes.

    A value ends at the first tag that `inner` matches. That tag must be `close`.

    Attributes:
        open: Matches the text before a value; its first group is the key.
        close: The tag after a value.
        inner: Matches the start of each tag that a value can't contain: `close`, or a tag that shows that `close` is
            missing.
        key_format: Names a key in a failure's reason; a format string with fields for the key and the tool's name.
        value_format: Names a value in a failure's reason; has the same fields.
        unclosed_format: Format string of the reason for a value without `close`; its fields are `value`, `close`, the
            `tag` found instead, and the `rest` of the text.
        key_of: Converts the written form of a key to the key.
    """

    open: re.Pattern[str]
    close: str
    inner: re.Pattern[str]
    key_format: str
    value_format: str
    unclosed_format: str = "{value} is not closed by {close}; got {rest}"
    key_of: Callable[[str], str] = str

    def read(
        self, text: str, start: int, tool: str, value_of: Callable[[re.Match[str], str, str], Json]
    ) -> tuple[dict[str, Any], int]:
        """Parse arguments.

        Args:
            text: The text with the arguments.
            start: Position of the first argument, if there is one.
            tool: Name of the called tool.
            value_of: Returns a value, given the match of `open`, the key, and the text between the tags.

        Returns:
            The arguments, and the position after the last; `start` if there are none.

        Raises:
            MalformedError: A value has no closing tag or can't be converted, or a key occurs twice.
        """
        arguments, position = dict[str, Any](), start
        while opened := self.open.match(text, position):
            key, end = self.key_of(opened[1]), self.inner.search(text, opened.end())
            at = len(text) if end is None else end.start()
            if not text.startswith(self.close, at):
                tag = "the end of the block" if end is None else repr(end[0])
                value = self.value_format.format(key, tool)
                reason = self.unclosed_format.format(value=value, close=self.close, tag=tag, rest=base.quote(text, at))
                raise MalformedError(reason, tool, at)
            position = at + len(self.close)
            if key in arguments:
                raise MalformedError(f"{self.key_format.format(key, tool)} stands twice", tool, position)
            try:
                arguments[key] = value_of(opened, key, text[opened.end() : at])
            except MalformedError as e:
                e.name, e.position = tool, position
                raise
        return arguments, position
