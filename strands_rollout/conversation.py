"""One agent's conversation with the policy: its exact tokens, and what of the agent's history they cover.

Knows the template, the parser and the trajectory; nothing of engines or budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strands_rollout.chat_template import ChatTemplate
from strands_rollout.context_builder import ContextBuilder
from strands_rollout.images import PlacedImage
from strands_rollout.strands_events import Answer, turn_answer
from strands_rollout.token_limits import Room
from strands_rollout.tool_parsers import ParseFailure, ToolParser, for_tool_specs
from strands_rollout.trajectory import Trajectory, Turn
from strands_rollout.turn_reader import ReadTurn, read_turn

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Segment:
    """One history that the policy has read and answered.

    Attributes:
        trajectory: Its tokens.
        parse_failures: Its tool calls that could not be parsed.
        final_text: Its last turn as text.
        stop_reason: Of its last turn, in Strands' words.
        is_aside: Whether it is not the agent's own history, but what a conversation manager asked.
    """

    trajectory: Trajectory
    parse_failures: list[ParseFailure]
    final_text: str
    stop_reason: str
    is_aside: bool = False


class Conversation:
    """Grows turn by turn; a new one is made for each.

    Args:
        template: Of the policy's tokenizer.
        parser: Of its tool calls.

    Attributes:
        trajectory: Tokens, mask, logprobs and turns of the last segment.
        segments: What came before it, each up to where the history was rewritten.
        asides: What the policy was asked beside the agent's own history.
        history: Tells the agent's messages, where they are known: a request about others is an aside.
        parse_failures: Tool calls of the last segment that could not be parsed.
        prompt_ids: The first prompt of the last segment, also where its generation failed.
        final_text: The last turn as text, control tokens included but its end of turn.
        stop_reason: Of the last turn, in Strands' words; "" before the first.
    """

    def __init__(self, template: ChatTemplate, parser: ToolParser) -> None:
        self._template = template
        self._parser = parser
        self.trajectory = Trajectory()
        self.segments: list[Segment] = []
        self.asides: list[Conversation] = []
        self.history: Callable[[], Messages] | None = None
        self.parse_failures: list[ParseFailure] = []
        self.prompt_ids: list[int] = []
        self.final_text = ""
        self.stop_reason = ""
        self._context = ContextBuilder(template)
        self._is_unread = False
        self._knows_tools = False

    def know_tools(self, tool_specs: Messages | None) -> None:
        """Read calls by the tools' schemas, where the format needs them; the first tools count.

        What was resumed was read without them, and is read again.
        """
        if self._knows_tools or not tool_specs:
            return
        self._knows_tools = True
        before, self._parser = self._parser, for_tool_specs(self._parser, tool_specs)
        if self._parser is not before and not self.segments:
            self._read_all()

    @property
    def covered_messages(self) -> int:
        """How many messages of the history the trajectory covers."""
        return self._context.covered_count

    @property
    def turn_count(self) -> int:
        """Turns in all segments."""
        return sum(len(segment.trajectory.turns) for segment in self.segments) + len(self.trajectory.turns)

    @property
    def earlier_response_length(self) -> int:
        """Response tokens of the segments before the last."""
        return sum(segment.trajectory.response_length for segment in self.segments)

    def last_segment(self) -> Segment:
        """The last segment as it is now."""
        return Segment(self.trajectory, self.parse_failures, self.final_text, self.stop_reason)

    def beside_last(self) -> list[Segment]:
        """All other segments in which the policy has sampled something, asides included."""
        asides = [replace(aside.last_segment(), is_aside=True) for aside in self.asides if aside.trajectory.turns]
        return [*self.segments, *asides]

    def resume(self, trajectory: Trajectory, messages: Messages, covered: int) -> None:
        """Go on with a conversation that was begun elsewhere.

        Args:
            trajectory: Its tokens and turns; owned by this conversation from here on. If it is open, its last turn is
                continued.
            messages: Its Strands messages.
            covered: How many of them the policy has read, so that the trajectory covers them and the turn after them.
        """
        self.trajectory = trajectory
        self.prompt_ids = trajectory.token_ids[: trajectory.prompt_length]
        self._read_all()
        self._context.accept(messages[:covered])
        # the turn was sampled, and the agent was stopped before it had the message
        self._is_unread = len(messages) == covered and not trajectory.is_open

    def takes_unread_turn(self, messages: Messages) -> bool:
        """Whether these messages were answered already, by a turn that the agent has not seen; true once."""
        is_unread, self._is_unread = self._is_unread and self._context.is_covered(messages), False
        return is_unread

    def for_history(
        self, messages: Messages, tool_specs: Messages | None, system_prompt: str | None, system_blocks: Messages | None
    ) -> Conversation:
        """Where these messages belong: here, if need be as a new segment, or in an aside.

        A history that does not extend what the policy has read begins a new trajectory, with all of it as prompt; so
        does another system prompt or a further tool, which stand before it. Arguments: as for `SGLangModel.answer`.
        """
        if not self.trajectory.turns:
            return self
        if self.history is not None and not _is_same_history(self.history(), messages):
            return self._aside_for(messages)
        is_shown = self._context.shows(tool_specs, system_prompt, system_blocks)
        is_asked_again = self._context.is_covered(messages) and not (self.trajectory.is_open or self._is_unread)
        is_extended = self._context.is_covered(messages) or self._context.is_extended_by(messages)
        if is_shown and is_extended and not is_asked_again:
            return self
        self.segments.append(self.last_segment())
        self.trajectory, self.parse_failures = Trajectory(), []
        self._context = ContextBuilder(self._template, self._context.shown_ids)
        return self

    def _aside_for(self, messages: Messages) -> Conversation:
        """The aside that these messages extend, as another agent's on the same model do; else a new one."""
        for aside in reversed(self.asides):
            if aside._context.is_extended_by(messages):
                return aside
        self.asides.append(Conversation(self._template, self._parser))
        return self.asides[-1]

    def drop_empty_segment(self) -> None:
        """Forget a segment whose first generation failed."""
        if self.segments and not self.trajectory.turns:
            last = self.segments.pop()
            self.trajectory, self.parse_failures = last.trajectory, last.parse_failures
            self.final_text, self.stop_reason = last.final_text, last.stop_reason

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
            PromptError: A message holds something else than text and images.
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

    @property
    def new_images(self) -> Sequence[PlacedImage]:
        """Those among the context tokens that `new_context` gave last, until they are accepted."""
        return self._context.new_images

    def accept(self, messages: Messages) -> None:
        """Remember that the trajectory covers these messages."""
        self._context.accept(messages)

    def last_answer(self) -> Answer:
        """The last turn as Strands takes it."""
        number, turn = self.turn_count, self.trajectory.turns[-1]
        read = self._read(number, turn)
        return turn_answer(
            read.segments,
            _call_prefix(number),
            stop_reason=read.stop_reason,
            usage=_usage(turn),
            latency_s=turn.latency_s,
        )

    def failure_text(self, call_id: str) -> str:
        """What the policy is told about a call that could not be parsed."""
        return self._context.failure_texts[call_id]

    def _read_all(self) -> None:
        """Read the turns of the last segment, but an open one."""
        self.parse_failures = []
        for number, turn in enumerate(self.trajectory.turns, start=1):
            if turn.finish_reason != "abort":
                self._read(number, turn)

    def _read(self, number: int, turn: Turn) -> ReadTurn:
        """Parse a turn, and remember what it called and what could not be parsed."""
        read = read_turn(self.trajectory, turn, self._template, self._parser)
        self.final_text, self.stop_reason = read.text, read.stop_reason
        self.parse_failures += read.failures
        self._context.note_calls(number, _call_prefix(number), read.segments)
        return read


def _is_same_history(history: Messages, messages: Messages) -> bool:
    """Whether a request is about the agent's own messages; Strands cleans what it sends, so the last one tells."""
    return len(history) == len(messages) and all(history[-1][key] == messages[-1][key] for key in ("role", "content"))


def _call_prefix(number: int) -> str:
    """Of the tool-use ids of a turn, counted from 1."""
    return f"call_{number}_"


def _usage(turn: Turn) -> dict[str, int]:
    usage = {"inputTokens": turn.start, "outputTokens": turn.end - turn.start, "totalTokens": turn.end}
    if turn.cached_tokens is not None:
        usage["cacheReadInputTokens"] = turn.cached_tokens
    return usage
