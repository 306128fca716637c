"""One agent's conversation with the policy: its exact tokens, and what of the agent's history they cover.

Knows the template, the parser and the trajectory; nothing of engines or budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from strands_rollout.chat_template import ChatTemplate
from strands_rollout.context_builder import ContextBuilder
from strands_rollout.strands_events import StreamEvent, turn_events
from strands_rollout.token_limits import Room
from strands_rollout.tool_parsers import ParseFailure, ToolParser
from strands_rollout.trajectory import Trajectory, Turn
from strands_rollout.turn_reader import ReadTurn, read_turn

Messages = Sequence[Mapping[str, Any]]


class Conversation:
    """Grows turn by turn; a new one is made for each.

    Args:
        template: Of the policy's tokenizer.
        parser: Of its tool calls.

    Attributes:
        trajectory: Tokens, mask, logprobs and turns of the last segment.
        segments: Trajectories before it: what the policy had read and written when the history was rewritten.
        parse_failures: Tool calls that could not be parsed.
        prompt_ids: The first prompt of the last segment, also where its generation failed.
        final_text: The last turn as text, control tokens included but its end of turn.
    """

    def __init__(self, template: ChatTemplate, parser: ToolParser) -> None:
        self._template = template
        self._parser = parser
        self.trajectory = Trajectory()
        self.segments: list[Trajectory] = []
        self.parse_failures: list[ParseFailure] = []
        self.prompt_ids: list[int] = []
        self.final_text = ""
        self._context = ContextBuilder(template)
        self._is_unread = False

    @property
    def covered_messages(self) -> int:
        """How many messages of the history the trajectory covers."""
        return self._context.covered_count

    @property
    def turn_count(self) -> int:
        """Turns in all segments."""
        return sum(len(segment.turns) for segment in self.segments) + len(self.trajectory.turns)

    def resume(self, trajectory: Trajectory, messages: Messages, covered: int) -> None:
        """Go on with a conversation that was begun elsewhere; see `SGLangModel.resume`."""
        self.trajectory = trajectory
        self.prompt_ids = trajectory.token_ids[: trajectory.prompt_length]
        for number, turn in enumerate(trajectory.turns, start=1):
            if turn.finish_reason != "abort":
                self._read(number, turn)
        self._context.accept(messages[:covered])
        # the turn was sampled, and the agent was stopped before it had the message
        self._is_unread = len(messages) == covered and not trajectory.is_open

    def takes_unread_turn(self, messages: Messages) -> bool:
        """Whether these messages were answered already, by a turn that the agent has not seen; true once."""
        is_unread, self._is_unread = self._is_unread and self._context.is_covered(messages), False
        return is_unread

    def start_segment_if_rewritten(self, messages: Messages) -> None:
        """Where the history does not extend what the policy has read, begin a new trajectory with it as prompt."""
        if not self.trajectory.turns or self._context.is_covered(messages) or self._context.is_extended_by(messages):
            return
        self.segments.append(self.trajectory)
        self.trajectory = Trajectory()
        self._context = ContextBuilder(self._template)

    def drop_empty_segment(self) -> None:
        """Forget a segment whose first generation failed."""
        if self.segments and not self.trajectory.turns:
            self.trajectory = self.segments.pop()

    async def new_context(
        self,
        messages: Messages,
        tool_specs: Messages | None,
        system_prompt: str | None,
        system_blocks: Messages | None,
        room: Room,
        min_turn_tokens: int,
    ) -> list[int]:
        """The context tokens that the next request adds; none inside an open turn. See `ContextBuilder.build`.

        Raises:
            TrajectoryError: The history does not extend what the policy has read.
            PromptError: A message holds something else than text.
            TemplateError: The template refuses the messages.
        """
        if self.trajectory.is_open and self._context.is_covered(messages):
            return []
        context_ids = await self._context.build(
            messages, tool_specs, system_prompt, system_blocks, self.trajectory, room, min_turn_tokens
        )
        if not self.trajectory.turns:
            self.prompt_ids = context_ids
        return context_ids

    def accept(self, messages: Messages) -> None:
        """Remember that the trajectory covers these messages."""
        self._context.accept(messages)

    def read_last_turn(self) -> Iterator[StreamEvent]:
        """The last turn as Strands events."""
        number, turn = self.turn_count, self.trajectory.turns[-1]
        read = self._read(number, turn)
        return turn_events(
            read.segments,
            _call_prefix(number),
            stop_reason=read.stop_reason,
            usage=_usage(turn),
            latency_s=turn.latency_s,
        )

    def failure_text(self, call_id: str) -> str:
        """What the policy is told about a call that could not be parsed."""
        return self._context.failure_texts[call_id]

    def _read(self, number: int, turn: Turn) -> ReadTurn:
        """Parse a turn, and remember what it called and what could not be parsed."""
        read = read_turn(self.trajectory, turn, self._template, self._parser)
        self.final_text = read.text
        self.parse_failures += read.failures
        self._context.note_calls(_call_prefix(number), read.segments)
        return read


def _call_prefix(number: int) -> str:
    """Of the tool-use ids of a turn, counted from 1."""
    return f"call_{number}_"


def _usage(turn: Turn) -> dict[str, int]:
    usage = {"inputTokens": turn.start, "outputTokens": turn.end - turn.start, "totalTokens": turn.end}
    if turn.cached_tokens is not None:
        usage["cacheReadInputTokens"] = turn.cached_tokens
    return usage
