"""What every tool-call format is parsed into, the promise that a parser makes, and the scan that most formats share.

Parsers never raise over what a model wrote and never repair it: what does not follow the format becomes a
`ParseFailure`, so that the model can be told. To add a format:

1. Put a class into the file of its kind (`json_object.py`, `json_arguments.py`, `bare_values.py`, `literals.py`).
2. Where tags mark calls and reasoning, subclass `TaggedParser`: list the tags, and read the call that a tag begins.
   `SectionParser` (`sections.py`) has calls in a section, `ArrayParser` in a JSON array.
3. Where values stand between tags, let `ValueTags` (`sections.py`) read them; where they are bare text that the tools'
   schemas type, subclass `SchemaParser`. Else write `ToolParser`'s methods.
4. Add it to the table in `__init__.py`; outside of this package, call `register_parser`.
5. Add a turn and a chat template to the tables of tests/support, and what must fail to those of tests/tool_parsers.
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
    """The text at this place is not such a value; the message says what was expected."""


class JSONSource(str):
    """A text to decode many objects from.

    `json` counts the lines up to each error, which makes many errors in one text quadratic; here a text has one line.
    """

    __slots__ = ()

    def count(self, *_: object) -> int:
        """No lines."""
        return 0

    def rfind(self, *_: object) -> int:
        """No line break."""
        return -1

    rindex = rfind


def skip_white_space(text: str, start: int) -> int:
    """The first position from `start` on that is not JSON white space."""
    return _WHITE_SPACE.match(text, start).end()  # type: ignore[union-attr] # it matches nothing, too


def decode_object(text: JSONSource, start: int, *, origin: int) -> tuple[dict[str, Any], int]:
    """Decode the object that begins at `start`; return it and the position after it.

    Raises:
        StrictJSONError: There is no such object; positions in the message count from `origin`.
    """
    if not text.startswith("{", start):
        expected = f"expected a JSON object, which begins with '{{', at offset {start - origin}"
        raise StrictJSONError(f"{expected}; got {got(text, start)}")
    return decode_value(text, start, origin=origin)


def whole_value(text: str) -> Json:
    """The value that is all of a text, but for white space around it.

    Raises:
        StrictJSONError: It is not one.
    """
    value, end = decode_value(JSONSource(text), skip_white_space(text, 0), origin=0)
    if skip_white_space(text, end) < len(text):
        raise StrictJSONError(f"expected nothing after the value, at offset {end}; got {got(text, end)}")
    return value


def decode_value(text: JSONSource, start: int, *, origin: int) -> tuple[Any, int]:
    """Decode the value that begins at `start`; see `decode_object`."""
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
    # of `str`, since a `JSONSource` counts nothing
    if str.count(text, "{", start, end) + str.count(text, "[", start, end) > _MAX_DEPTH:
        check_depth(value)
    if text.find("\\ud", start, end) >= 0 or text.find("\\uD", start, end) >= 0:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as e:
            reason = "a string has half of a surrogate pair (\\ud800-\\udfff), which is no character"
            raise StrictJSONError(reason) from e
    return value, end


def fits(value: object, types: Set[str]) -> bool:
    """Whether a decoded value is one of these JSON types but a string, which these formats write without quotes."""
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean") in types
    if isinstance(value, int | float):
        return "number" in types or ("integer" in types and (isinstance(value, int) or value.is_integer()))
    return ("object" if isinstance(value, dict) else "array") in types if isinstance(value, dict | list) else False


def check_depth(value: object) -> None:
    """Raise StrictJSONError where a value is nested more deeply than a call's arguments may be."""
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise StrictJSONError(f"the key {twice!r} stands twice in one object")
    return value


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise StrictJSONError(f"the number {number[:40]} is too large for a float")
    return value


def _refuse_constant(name: str) -> None:
    raise StrictJSONError(f"{name} is not JSON; numbers are finite")


_DECODER: Final = json.JSONDecoder(
    strict=True, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant
)


NewId = Callable[[], str]


def random_id() -> str:
    """An id that no other call has, in any episode."""
    return f"call_{secrets.token_hex(16)}"


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
        reason: For the model: what was found where, and what was expected.
        name: The tool that was meant, where it can be read.
        written_id: The call's id, likewise; see `ToolCall`.
    """

    raw: str
    reason: str
    name: str | None = None
    written_id: str | None = field(default=None, compare=False)


Segment = Reasoning | Text | ToolCall | ParseFailure

Read = tuple[Sequence[Segment], int]
"""What a tag begins, and the position after it."""


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
        return [part for part in self.segments(text, in_reasoning) if isinstance(part, ToolCall | ParseFailure)]


@runtime_checkable
class UntypedParser(Protocol):
    """What a parser may have beside `ToolParser`: its format's values have no types, but for the tools' schemas."""

    def for_tools(self, schemas: Mapping[str, Mapping[str, Any]]) -> ToolParser:
        """The same parser for these tools: the JSON Schema of each one's arguments, by its name.

        A tool that is not among them is no failure, as everywhere: its values are read by the format's rule for values
        of no known type.
        """
        ...


@runtime_checkable
class CutTurnParser(Protocol):
    """What a parser may have beside `ToolParser`: it tells the reasoning of a turn that was cut from its text."""

    def cut_segments(self, text: str, in_reasoning: bool = False) -> list[Segment]:  # noqa: FBT001, FBT002
        """Split a turn that was not finished into reasoning and text, in which calls are text; as `segments`."""
        ...


class MalformedError(ValueError):
    """What a parser found at a place does not follow the format; becomes a `ParseFailure`.

    The attempt goes on at least up to `position`; None where nothing of it could be read.
    """

    def __init__(self, reason: str, name: str | None = None, position: int | None = None) -> None:
        super().__init__(reason)
        self.name = name
        self.position = position
        self.written_id: str | None = None


class BaseParser(ToolParser):
    """A parser that makes its calls' ids with `new_id`."""

    def __init__(self, new_id: NewId = random_id) -> None:
        self._new_id = new_id


class TaggedParser(BaseParser):
    """A parser of a format whose calls and reasoning stand between tags: one scan from left to right.

    Outside reasoning its tag opens it, and the tags of calls open calls. Reasoning ends at its first closing tag;
    without one all the rest is reasoning. A closing tag that closes nothing says that everything before it was
    reasoning.
    """

    tags: ClassVar[re.Pattern[str]]
    """Matches the tags of calls and reasoning."""
    open_reasoning: ClassVar[str] = "<think>"
    close_reasoning: ClassVar[str] = "</think>"

    def segments(self, text: str, in_reasoning: bool = False) -> list[Segment]:  # noqa: FBT001, FBT002
        """Split the text into reasoning, text, calls and failures, in its order, in time linear in the text."""
        return self._split(text, in_reasoning=in_reasoning, reads_calls=True)

    def cut_segments(self, text: str, in_reasoning: bool = False) -> list[Segment]:  # noqa: FBT001, FBT002
        """Split the text into reasoning and text, likewise."""
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
            if read is None or not (reads_calls or all(isinstance(one, Reasoning | Text) for one in read[0])):
                position = tag.end() if read is None else read[1]
                continue
            add_text(found, Text, text[start : tag.start()])
            segments, start = read
            found.extend(segments)
            position = start
        add_text(found, Text, text[start:])
        return [Reasoning(text[:reasoning_end]), *found] if text[:reasoning_end].strip() else found

    def _read_tag(self, text: JSONSource, tag: re.Match[str], *, is_first: bool) -> Read | None:
        return (self._read_first(text, tag) if is_first else None) or self._read_call(text, tag)

    def _read_first(self, text: JSONSource, tag: re.Match[str]) -> Read | None:  # noqa: ARG002 - for subclasses
        """What a tag begins that only reasoning stands before, where the format has a rule for that."""
        return None

    @abstractmethod
    def _read_call(self, text: JSONSource, tag: re.Match[str]) -> Read | None:
        """What a tag of calls begins, and the position after it; None where it is no tag there."""

    def _end_of_reasoning(self, text: str, start: int) -> tuple[int, int]:
        """Where reasoning that goes on at `start` ends, and where the text goes on after it."""
        end = text.find(self.close_reasoning, start)
        return (len(text), len(text)) if end < 0 else (end, end + len(self.close_reasoning))


def decode_arguments(text: JSONSource, start: int, name: str) -> tuple[dict[str, Any], int]:
    """The JSON object of a call's arguments, white space before it, and the position after it."""
    try:
        return decode_object(text, skip_white_space(text, start), origin=start)
    except StrictJSONError as e:
        raise MalformedError(f"the arguments of {name!r}: {e}", name) from e


def end_of_tag(text: str, start: int, tag: str, name: str | None) -> int:
    """The position after a tag that must stand there, white space before it; raises MalformedError."""
    begin = skip_white_space(text, start)
    if not text.startswith(tag, begin):
        after = f" after the arguments of {name!r}" if name else ""
        raise MalformedError(f"expected {tag}{after}; got {got(text, begin)}", name, start)
    return begin + len(tag)


def got(text: str, position: int) -> str:
    """What stands at a position, for a reason."""
    return repr(text[position : position + 20]) if position < len(text) else "the end of the text"


def add_text(found: list[Segment], kind: type[Text | Reasoning], text: str) -> None:
    """Append a text as a segment, unless it is white space only."""
    if text.strip():
        found.append(kind(text))
