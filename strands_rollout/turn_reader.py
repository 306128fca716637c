"""One sampled turn -> what the agent loop must know of it: segments in order, calls, failures, stop reason.

Knows the parser and the template's control tokens; nothing of HTTP, budgets or history.
"""

from __future__ import annotations

from dataclasses import dataclass

from strands_rollout.chat_template import ChatTemplate
from strands_rollout.tool_parsers import ParseFailure, Segment, Text, ToolCall, ToolParser
from strands_rollout.trajectory import Trajectory, Turn


@dataclass(frozen=True, slots=True)
class ReadTurn:
    """A turn as text.

    Attributes:
        text: Everything that was sampled but the token that ended the turn; other control tokens included.
        segments: Never empty; one `Text` with everything where the turn was cut.
        stop_reason: Strands' stop reason.
    """

    text: str
    segments: list[Segment]
    stop_reason: str

    @property
    def failures(self) -> list[ParseFailure]:
        """The turn's tool calls that could not be parsed."""
        return [segment for segment in self.segments if isinstance(segment, ParseFailure)]


def read_turn(trajectory: Trajectory, turn: Turn, template: ChatTemplate, parser: ToolParser) -> ReadTurn:
    """Decode and parse a turn of a trajectory; one that was cut by length or abort is never searched for calls."""
    ids, last = trajectory.token_ids[turn.start : turn.end], turn.parts[-1]
    ended = last.finish_reason == "stop" and ids[-1] in (*template.end_ids, last.matched)
    text = template.encoder.decode(ids[:-1] if ended else ids)
    if last.finish_reason != "stop":
        return ReadTurn(text, [Text(text)], "max_tokens")
    segments = parser.segments(text, in_reasoning=template.opens_reasoning) or [Text("")]
    if any(isinstance(segment, ToolCall | ParseFailure) for segment in segments):
        return ReadTurn(text, segments, "tool_use")
    return ReadTurn(text, segments, "stop_sequence" if isinstance(last.matched, str) else "end_turn")
