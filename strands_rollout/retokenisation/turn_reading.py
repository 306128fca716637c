"""What a sampled turn holds, by the policy's own template and tool parser: prose, and calls.

Knows a tokenizer, its template and its parser; nothing of samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strands_rollout.chat_template import ChatTemplate
from strands_rollout.errors import ConfigError
from strands_rollout.tool_parsers import (
    AUTO,
    ParseFailure,
    Reasoning,
    Segment,
    Text,
    ToolCall,
    ToolParser,
    format_of_call,
    get_parser,
)


class TurnReading:
    """Reads turns of one policy.

    Attributes:
        template: The policy's.
        parser: Of its calls; None where none is named and the template writes no known format.

    Args:
        tokenizer: The policy's.
        template_kwargs: Handed to the template at each rendering.
        tool_parser: The format of its calls; "auto" for the one that the template writes.

    Raises:
        TemplateError: The template can't be used token-exactly.
        ConfigError: No parser has that name.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any], tool_parser: str = AUTO) -> None:  # noqa: ANN401
        self.template = ChatTemplate(tokenizer, **template_kwargs)
        self.parser: ToolParser | None = None
        if tool_parser != AUTO:
            self.parser = get_parser(tool_parser)
            return
        call = self.template.written_call
        try:
            self.parser = get_parser(format_of_call(call.turn, call.name, call.arguments))
        except ConfigError:  # an agent without tools needs none
            return

    def calls(self, ids: Sequence[int]) -> int | None:
        """How many calls a turn holds, malformed ones included; None without a parser."""
        if self.parser is None:
            return None
        return sum(isinstance(segment, ToolCall | ParseFailure) for segment in self._segments(ids))

    def prose(self, ids: Sequence[int]) -> list[tuple[int, int]] | None:
        """Where in a turn's text its prose begins and ends, in characters; None where all of it is."""
        segments = self._segments(ids)
        if not any(isinstance(segment, ToolCall | ParseFailure) for segment in segments):
            return None
        text, at, found = self.template.encoder.decode(ids), 0, []
        for segment in segments:
            if isinstance(segment, Text | Reasoning) and (begin := text.find(segment.text, at)) >= 0:
                at = begin + len(segment.text)
                found.append((begin, at))
        return found

    def _segments(self, ids: Sequence[int]) -> list[Segment]:
        if self.parser is None:
            return []
        encoder = self.template.encoder
        spoken = ids[:-1] if ids and encoder.is_control(ids[-1]) else ids
        return self.parser.segments(encoder.decode(spoken), in_reasoning=self.template.opens_reasoning)
