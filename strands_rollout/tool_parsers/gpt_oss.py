"""gpt-oss's format, harmony: a turn is messages, each with a channel and perhaps a recipient.

A turn with reasoning and a call, from the prompt's `<|start|>assistant` on: `<|channel|>analysis<|message|>...<|end|>`,
then `<|start|>assistant<|channel|>commentary to=functions.x <|constrain|>json<|message|>{}<|call|>`. The analysis
channel is reasoning; a message to `functions.x` is a call; the final channel, and commentary to nobody, is text.
Source: openai/harmony, docs/format.md, and gpt-oss-20b's chat template, which has the recipient before the channel.
"""

import re
from dataclasses import dataclass
from typing import Final

from strands_rollout.tool_parsers import base
from strands_rollout.tool_parsers.base import (
    BaseParser,
    MalformedError,
    ParseFailure,
    Reasoning,
    Segment,
    Text,
    ToolCall,
)

_CALL: Final = "<|call|>"
# possessive: white space is passed once, however much there is
_BEGIN: Final = re.compile(r"\s*+(?:<\|start\|>assistant)?+\s*+(?=<\|channel\|>|to=)")
_NEXT: Final = re.compile(r"<\|start\|>assistant(?=\s*+(?:<\|channel\|>|to=))|<\|channel\|>")
_HEADER: Final = re.compile(
    r"(?:to=(?P<first>[^\s<]{1,200}))?+\s*+<\|channel\|>(?P<channel>[a-z]{1,20})(?:\s++to=(?P<second>[^\s<]{1,200}))?+"
    r"\s*+(?:<\|constrain\|>)?+[^\s<]{0,40}\s*+<\|message\|>"
)
_RECIPIENT: Final = re.compile(r"to=(?:functions\.)?([^\s<]{1,200})")
_END: Final = re.compile(r"<\|(?:end|call|return)\|>")
_HEADER_END: Final = re.compile(r"<\|(?:message|end|call|return)\|>")


@dataclass(frozen=True, slots=True)
class _Header:
    """What stands before `<|message|>`; `end` is the position after it, `is_begun` whether a message may begin so."""

    channel: str
    recipient: str | None
    end: int
    is_begun: bool = True


class GptOssParser(BaseParser):
    """The format's parser; see `ToolParser`.

    The text begins after the prompt's `<|start|>assistant`, or inside the analysis message that the prompt opened. The
    last message has no closing token, where that ended the turn. A message ends at its closing token and at nothing
    else: what looks like a call in reasoning that is not closed is a draft. A call must be a message of its own on the
    commentary channel, to `functions.x`, with one JSON object, and end with `<|call|>`. Its type may
    be given or not, and is not read: arguments that are no JSON fail as such.
    """

    def segments(self, text: str, in_reasoning: bool = False) -> list[Segment]:  # noqa: FBT001, FBT002
        """Split the text into reasoning, text, calls and failures, in its order."""
        source, found = base.JSONSource(text), list[Segment]()
        position = 0
        if in_reasoning:
            position = self._read_message(source, 0, _Header("analysis", None, 0), found)
        while position < len(text):
            begin = _BEGIN.match(source, position)
            if begin is None:  # text that is in no message, up to the next one
                following = _NEXT.search(source, position)
                end = len(text) if following is None else following.start()
                base.add_text(found, Text, text[position:end])
                position = end
                continue
            header = _header(source, begin, is_first=position == 0)
            if header is None:
                position = _broken_header(source, position, found)
            else:
                position = self._read_message(source, position, header, found)
        return found

    def _read_message(self, text: base.JSONSource, start: int, header: _Header, found: list[Segment]) -> int:
        """Add a message's segment; the position after it."""
        if header.recipient is not None:
            segment, end = self._read_call(text, start, header)
            found.append(segment)
            return end
        close = _END.search(text, header.end)
        content = text[header.end : len(text) if close is None else close.start()]
        base.add_text(found, Reasoning if header.channel == "analysis" else Text, content)
        return len(text) if close is None else close.end()

    def _read_call(self, text: base.JSONSource, start: int, header: _Header) -> tuple[ToolCall | ParseFailure, int]:
        recipient = header.recipient or ""
        name = recipient.removeprefix("functions.")
        try:
            _check(header, recipient, name)
            arguments, end = base.decode_arguments(text, header.end, name)
            last = base.skip_white_space(text, end) == len(text)
            after = len(text) if last else base.end_of_tag(text, end, _CALL, name)
        except MalformedError as e:
            stop = _END.search(text, e.position or header.end)
            end = len(text) if stop is None else stop.end()
            return ParseFailure(text[start:end], str(e), name or None), end
        return ToolCall(self._new_id(), name, arguments), after


def _check(header: _Header, recipient: str, name: str) -> None:
    if not header.is_begun:
        raise MalformedError("a message begins with <|start|>assistant", name)
    if not recipient.startswith("functions.") or not name:
        raise MalformedError(f"got a message to {recipient!r}; expected a call to=functions.<tool>", name)
    if header.channel != "commentary":
        raise MalformedError(f"a call on the channel {header.channel!r}; expected commentary", name)


def _header(text: str, begin: re.Match[str], *, is_first: bool) -> _Header | None:
    header = _HEADER.match(text, begin.end())
    if header is None or (header["first"] and header["second"]):
        return None
    is_begun = is_first or bool(begin[0].strip())
    return _Header(header["channel"], header["first"] or header["second"], header.end(), is_begun)


def _broken_header(text: str, start: int, found: list[Segment]) -> int:
    """Add what has a header that can't be read: a failure if it is to somebody, else text."""
    head_end = _HEADER_END.search(text, start)
    recipient = _RECIPIENT.search(text, start, len(text) if head_end is None else head_end.start())
    close = _END.search(text, start)
    end = len(text) if close is None else close.end()
    if recipient is None:
        base.add_text(found, Text, text[start:end])
    else:
        expected = "expected <|channel|>commentary to=functions.<tool> <|constrain|>json<|message|>{...}<|call|>"
        found.append(ParseFailure(text[start:end], f"{expected}; got {base.got(text, start)}", recipient[1]))
    return end
