"""The segments of a parsed turn, the protocols and base classes of parsers, and strict decoding of JSON.

A parser never raises an exception because of the model's text, and never repairs that text. An attempted call that does
not follow the format becomes a `ParseFailure`. The model reads the failure's reason. To add a format:

1. Put a class into the file of its kind (`json_object.py`, `json_arguments.py`, `bare_values.py`, `literals.py`).
2. If tags mark calls and reasoning, subclass `TaggedParser`: define the tags, and parse the call that follows a tag.
   Subclass `SectionParser` (`sections.py`) for calls in a section, `ArrayParser` (`json_object.py`) for calls in a JSON
   array. For formats without such tags, subclass `BaseParser`.
3. If values are enclosed in tags, parse them with `ValueTags` (`sections.py`). If the tools' schemas define the types
   of bare values, subclass `SchemaParser` (`bare_values.py`).
4. Add the class to the table in `__init__.py`; outside of this package, call `register_parser`.
5. Add a turn and a chat template to the tables in tests/support, and malformed calls to the tables in
   tests/tool_parsers.
"""

import json
import math
import re
import secrets
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

from strands_rollout.files.json_codec import Json

_MAX_DEPTH: Final = 100
_TOO_DEEP: Final = f"nested deeper than the {_MAX_DEPTH} levels that are allowed"
_WHITE_SPACE: Final = re.compile(r"[ \t\n\r]*")


class StrictJSONError(ValueError):
    """A text is not strict JSON of the expected kind, or is nested too deeply; the message says what is wrong."""


class JSONSource(str):
    """A text that pretends to have a single line, for fast decoding of many objects.

    `json` counts the lines before each error, which takes quadratic time in a text with many errors.
    """

    __slots__ = ()

    def count(self, *_: object) -> int:
        """Return 0; `json` calls this method to count the line breaks before an error."""
        return 0

    def rfind(self, *_: object) -> int:
        """Return -1; `json` calls this method to search for the last line break before an error."""
        return -1

    rindex = rfind


def skip_white_space(text: str, start: int) -> int:
    """Return the first position from `start` on that is not JSON white space."""
    return _WHITE_SPACE.match(text, start).end()  # type: ignore[union-attr] # the pattern matches the empty text


def decode_object(text: JSONSource, start: int, *, origin: int) -> tuple[dict[str, Any], int]:
    """Decode the JSON object at `start`; return the object and the position after it.

    Raises:
        StrictJSONError: There is no valid object at `start`. The error message gives offsets from `origin`.
    """
    if not text.startswith("{", start):
        expected = f"expected a JSON object, which begins with '{{', at offset {start - origin}"
        raise StrictJSONError(f"{expected}; got {quote(text, start)}")
    return decode_value(text, start, origin=origin)


def decode_single_value(text: str) -> Json:
    """Decode a text that is a single JSON value with optional white space around it.

    Raises:
        StrictJSONError: The text is not a valid value.
    """
    value, end = decode_value(JSONSource(text), skip_white_space(text, 0), origin=0)
    if skip_white_space(text, end) < len(text):
        raise StrictJSONError(f"expected nothing after the value, at offset {end}; got {quote(text, end)}")
    return value


def decode_value(text: JSONSource, start: int, *, origin: int) -> tuple[Any, int]:
    """Decode the JSON value at `start`; return the value and the position after it.

    Raises:
        StrictJSONError: There is no valid value at `start`. The error message gives offsets from `origin`.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as e:
        raise StrictJSONError(f"not valid JSON at offset {e.pos - origin}: {e.msg}") from e
    except RecursionError as e:
        raise StrictJSONError(_TOO_DEEP) from e
    except StrictJSONError:
        raise
    except ValueError as e:  # Python's limit on the digits of an int
        raise StrictJSONError(f"a number can't be read: {e}") from e
    # call `str.count`, since `JSONSource.count` returns 0
    if str.count(text, "{", start, end) + str.count(text, "[", start, end) > _MAX_DEPTH:
        check_depth(value)
    if text.find("\\ud", start, end) >= 0 or text.find("\\uD", start, end) >= 0:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as e:
            reason = "a string has half of a surrogate pair (\\ud800-\\udfff), which is no character"
            raise StrictJSONError(reason) from e
    return value, end


def has_json_type(value: object, types: Set[str]) -> bool:
    """Return whether a decoded value has one of these JSON types; False for strings, which formats write unquoted."""
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean") in types
    if isinstance(value, int | float):
        return "number" in types or ("integer" in types and (isinstance(value, int) or value.is_integer()))
    return ("object" if isinstance(value, dict) else "array") in types if isinstance(value, dict | list) else False


def check_depth(value: object) -> None:
    """Raise StrictJSONError if a value is nested deeper than 100 levels."""
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise StrictJSONError(_TOO_DEEP)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise StrictJSONError(f"the key {twice!r} stands twice in one object")
    return value


def _parse_float(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise StrictJSONError(f"the number {number[:40]} is too large for a float")
    return value


def _reject_constant(name: str) -> None:
    raise StrictJSONError(f"{name} is not JSON; numbers are finite")


_DECODER: Final = json.JSONDecoder(
    strict=True, object_pairs_hook=_unique_keys, parse_float=_parse_float, parse_constant=_reject_constant
)


NewId = Callable[[], str]


def random_id() -> str:
    """Return an id that is unique over all episodes."""
    return f"call_{secrets.token_hex(16)}"


@dataclass(slots=True)
class Reasoning:
    """Reasoning of the model, without its tags. Calls inside reasoning are drafts: they remain text."""

    text: str


@dataclass(slots=True)
class Text:
    """Text for the user: all text outside of reasoning and calls."""

    text: str


@dataclass(slots=True)
class ToolCall:
    """A call that follows the format.

    Attributes:
        id: Id from the parser's id source; unique in an episode.
        name: Name of the tool, not empty. The tool may not exist.
        arguments: A JSON object: finite numbers, no lone surrogates, values at most 100 levels deep.
        written_id: The id that the model wrote, if the format has ids. The call's result is shown with this id. The id
            need not be unique, since a model may write an id twice.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    written_id: str | None = field(default=None, compare=False)


@dataclass(slots=True)
class ParseFailure:
    """An attempted call that does not follow the format.

    Attributes:
        raw: The text of the attempt, including tags.
        reason: Explanation for the model: what is wrong and, in most cases, what was expected.
        name: The tool's name, if it can be read.
        written_id: The call's id, if it can be read; see `ToolCall`.
    """

    raw: str
    reason: str
    name: str | None = None
    written_id: str | None = field(default=None, compare=False)


Segment = Reasoning | Text | ToolCall | ParseFailure

ReadResult = tuple[Sequence[Segment], int]
"""The segments that begin at a tag, and the position after them."""


class ToolParser(Protocol):
    """Protocol of parsers of turns in one format. A parser is stateless, except for the source of call ids."""

    def segments(self, text: str, in_reasoning: bool = False) -> list[Segment]:  # noqa: FBT001, FBT002 - public signature
        """Split a finished turn into segments, in the order of the text; never raises because of the text.

        Segments of only white space are left out.

        Args:
            text: The sampled text, including control tokens, without the token that ended the turn.
            in_reasoning: True if the prompt has already opened the reasoning.
        """
        ...

    def parse(self, text: str, in_reasoning: bool = False) -> list[ToolCall | ParseFailure]:  # noqa: FBT001, FBT002
        """Return only the calls and failures of `segments`."""
        return [part for part in self.segments(text, in_reasoning) if isinstance(part, ToolCall | ParseFailure)]


@runtime_checkable
class UntypedParser(Protocol):
    """An optional protocol of parsers for formats that leave the types of values to the tools' schemas."""

    def for_tools(self, schemas: Mapping[str, Mapping[str, Any]]) -> ToolParser:
        """Return a parser of this format that knows these schemas: tool name -> JSON Schema of the tool's arguments.

        A call of an unknown tool is not a failure: its values are parsed by the format's rule for unknown types.
        """
        ...


@runtime_checkable
class CutTurnParser(Protocol):
    """An optional protocol of parsers that can separate reasoning from text in an unfinished turn."""

    def cut_segments(self, text: str, in_reasoning: bool = False) -> list[Segment]:  # noqa: FBT001, FBT002
        """Split an unfinished turn into reasoning and text; calls become text. See `ToolParser.segments`."""
        ...


class MalformedError(ValueError):
    """The text does not follow the format; the error becomes a `ParseFailure`.

    Attributes:
        name: The tool's name, if it could be read.
        position: Minimum end of the attempted call in the text; None if unknown.
        written_id: The call's id, if it could be read.
    """

    def __init__(self, reason: str, name: str | None = None, position: int | None = None) -> None:
        super().__init__(reason)
        self.name = name
        self.position = position
        self.written_id: str | None = None


class BaseParser(ToolParser):
    """Base class of parsers; `new_id` makes the ids of calls."""

    def __init__(self, new_id: NewId = random_id) -> None:
        self._new_id = new_id


class TaggedParser(BaseParser):
    """Base class for formats with tags around calls and reasoning: a single scan from left to right.

    Outside reasoning, a tag opens reasoning or a call. Reasoning ends at the first closing tag or, if there is none, at
    the end of the text. If a closing tag has no opening tag, all text before the closing tag is reasoning.
    """

    tags: ClassVar[re.Pattern[str]]
    """Matches all tags of calls and reasoning."""
    open_reasoning: ClassVar[str] = "<think>"
    close_reasoning: ClassVar[str] = "</think>"

    def segments(self, text: str, in_reasoning: bool = False) -> list[Segment]:  # noqa: FBT001, FBT002
        """Split a finished turn into segments, in time linear in the text; see `ToolParser.segments`."""
        return self._split(text, in_reasoning=in_reasoning, reads_calls=True)

    def cut_segments(self, text: str, in_reasoning: bool = False) -> list[Segment]:  # noqa: FBT001, FBT002
        """Split an unfinished turn into reasoning and text; see `CutTurnParser.cut_segments`."""
        return self._split(text, in_reasoning=in_reasoning, reads_calls=False)

    def _split(self, text: str, *, in_reasoning: bool, reads_calls: bool) -> list[Segment]:
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
            is_first = is_first and not text[start : tag.start()].strip()
            if tag[0] == self.open_reasoning:
                add_text(found, Text, text[start : tag.start()])
                end, start = self._end_of_reasoning(text, tag.end())
                add_text(found, Reasoning, text[tag.end() : end])
                position = start
                continue
            read = self._read_tag(source, tag, is_first=is_first)
            is_first = False
            # in a turn that was cut, a call is text
            if read is None or not (reads_calls or all(isinstance(part, Reasoning | Text) for part in read[0])):
                position = tag.end() if read is None else read[1]
                continue
            add_text(found, Text, text[start : tag.start()])
            segments, start = read
            found.extend(segments)
            position = start
        add_text(found, Text, text[start:])
        return [Reasoning(text[:reasoning_end]), *found] if text[:reasoning_end].strip() else found

    def _read_tag(self, text: JSONSource, tag: re.Match[str], *, is_first: bool) -> ReadResult | None:
        return (self._read_first(text, tag) if is_first else None) or self._read_call(text, tag)

    def _read_first(self, text: JSONSource, tag: re.Match[str]) -> ReadResult | None:  # noqa: ARG002 - for subclasses
        """Parse the segments at an answer's first tag (after any reasoning), if the format has a rule for this tag."""
        return None

    @abstractmethod
    def _read_call(self, text: JSONSource, tag: re.Match[str]) -> ReadResult | None:
        """Parse the segments at a tag of calls; return None if the tag is ordinary text there."""

    def _end_of_reasoning(self, text: str, start: int) -> tuple[int, int]:
        end = text.find(self.close_reasoning, start)
        return (len(text), len(text)) if end < 0 else (end, end + len(self.close_reasoning))


def decode_arguments(text: JSONSource, start: int, name: str) -> tuple[dict[str, Any], int]:
    """Decode a call's arguments, a JSON object after optional white space; return the object and its end.

    Raises:
        MalformedError: There is no valid object.
    """
    try:
        return decode_object(text, skip_white_space(text, start), origin=start)
    except StrictJSONError as e:
        raise MalformedError(f"the arguments of {name!r}: {e}", name) from e


def expect_tag(text: str, start: int, tag: str, name: str | None) -> int:
    """Require a tag after optional white space, and return the position after it.

    Raises:
        MalformedError: The tag is missing.
    """
    begin = skip_white_space(text, start)
    if not text.startswith(tag, begin):
        after = f" after the arguments of {name!r}" if name else ""
        raise MalformedError(f"expected {tag}{after}; got {quote(text, begin)}", name, start)
    return begin + len(tag)


def quote(text: str, position: int) -> str:
    """Quote up to 20 characters of a text, from a position on, for the reason of a failure."""
    return repr(text[position : position + 20]) if position < len(text) else "the end of the text"


def add_text(found: list[Segment], kind: type[Text | Reasoning], text: str) -> None:
    """Append a text as a segment, unless it is only white space."""
    if text.strip():
        found.append(kind(text))
