"""One history that the policy reads and answers: its exact tokens, and how new messages become the next context tokens.

A sampled turn becomes the Strands message that it is.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from strands.types.exceptions import StructuredOutputException

from strands_rollout.errors import TrajectoryError
from strands_rollout.files import Json
from strands_rollout.log_once import log_once
from strands_rollout.model.images import PlacedImage, ReadImage, further_tokens, place_images, read_images
from strands_rollout.model.sampling import Room
from strands_rollout.model.trajectory import Trajectory, Turn
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.template.messages import ChatMessage, cleaned, system_text, to_chat_messages, to_chat_tools
from strands_rollout.template.tokens import LONG_TEXT_CHARS, are_far_over, head_and_tail
from strands_rollout.tool_parsers import CutTurnParser, ParseFailure, Reasoning, Segment, Text, ToolCall, ToolParser
from strands_rollout.validation import explained

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=BaseModel)

INVALID_TOOL_CALL: Final = "invalid_tool_call"
UNPARSED: Final = "_unparsed"
"""The end of the tool-use id of a call that could not be parsed: the policy may write any name, but no id."""

# parser and error, for one traceback each: a policy may repeat what makes a parser fail

StreamEvent = dict[str, Any]

# of ids that are shown, which templates limit to nine letters and digits; one for each conversation
_LETTERS: Final = "cdefghijklmnopqrstuvwxyzab"

TRANSIENT: Final = "a text was shown in one request and not in the next"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model call gives an agent's loop.

    Attributes:
        message: The assistant's message.
        stop_reason: Strands' stop reason.
        usage: inputTokens, outputTokens, totalTokens, and cacheReadInputTokens where known.
        metrics: latencyMs, and timeToFirstByteMs: an answer comes whole.
    """

    message: dict[str, Any]
    stop_reason: str
    usage: dict[str, int]
    metrics: dict[str, int]


def call_id(call_prefix: str, index: int, segment: Segment) -> str:
    """The tool-use id of a turn's segment; it alone tells a call that could not be parsed from one of any name."""
    return f"{call_prefix}{index}{UNPARSED if isinstance(segment, ParseFailure) else ''}"


def failure_message(reason: str) -> str:
    """What the policy reads about a tool call that could not be parsed; `reason` as in its `ParseFailure`."""
    return f"Error: the tool call could not be parsed and was not run: {reason}"


def turn_answer(read: ReadTurn, call_prefix: str, turn: Turn) -> Answer:
    """A turn as one assistant message, as Strands' loop takes it.

    Empty text is left out, and a `ParseFailure` becomes a call of the tool `invalid_tool_call`, so that Strands answers
    it with an error result and the loop continues. The policy may call a tool of that name too: see `call_id`.

    Args:
        read: The turn as text.
        call_prefix: Tool-use ids begin with it.
        turn: Its tokens and times.
    """
    blocks = (_block(segment, call_id(call_prefix, at, segment)) for at, segment in enumerate(read.segments))
    first, end, latency_s = turn.parts[0], turn.parts[-1].end, sum(part.latency_s for part in turn.parts)
    usage = {"inputTokens": first.start, "outputTokens": end - first.start, "totalTokens": end}
    latency_ms = round(latency_s * 1000)
    if first.cached_tokens is not None:
        usage["cacheReadInputTokens"] = first.cached_tokens
    return Answer(
        message={"role": "assistant", "content": [block for block in blocks if block]},
        stop_reason=read.stop_reason,
        usage=usage,
        metrics={"latencyMs": latency_ms, "timeToFirstByteMs": latency_ms},
    )


def answer_events(answer: Answer) -> Iterator[StreamEvent]:
    """An answer as a stream: messageStart, the content blocks, messageStop, metadata."""
    yield {"messageStart": {"role": "assistant"}}
    for index, block in enumerate(answer.message["content"]):
        start, delta = _start_and_delta(block)
        yield {"contentBlockStart": {"contentBlockIndex": index, "start": start}}
        yield {"contentBlockDelta": {"contentBlockIndex": index, "delta": delta}}
        yield {"contentBlockStop": {"contentBlockIndex": index}}
    yield {"messageStop": {"stopReason": answer.stop_reason}}
    yield {"metadata": {"usage": answer.usage, "metrics": {"latencyMs": answer.metrics["latencyMs"]}}}


def _block(segment: Segment, use_id: str) -> dict[str, Any]:
    """A segment as a content block; empty where Strands has none for it."""
    if isinstance(segment, Text):
        return {"text": segment.text} if segment.text else {}
    if isinstance(segment, Reasoning):
        return {"reasoningContent": {"reasoningText": {"text": segment.text}}} if segment.text else {}
    if isinstance(segment, ToolCall):
        return {"toolUse": {"toolUseId": use_id, "name": segment.name, "input": segment.arguments}}
    arguments = {"raw": segment.raw, "reason": segment.reason}
    return {"toolUse": {"toolUseId": use_id, "name": INVALID_TOOL_CALL, "input": arguments}}


def _start_and_delta(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if "text" in block:
        return {}, {"text": block["text"]}
    if "reasoningContent" in block:
        return {}, {"reasoningContent": {"text": block["reasoningContent"]["reasoningText"]["text"]}}
    use = block["toolUse"]
    start = {"toolUse": {"toolUseId": use["toolUseId"], "name": use["name"]}}
    return start, {"toolUse": {"input": json.dumps(use["input"], ensure_ascii=False)}}


@dataclass(frozen=True, slots=True)
class ReadTurn:
    """A turn as text.

    Attributes:
        text: Everything that was sampled but the token that ended the turn; other control tokens included.
        segments: Never empty; without calls where the turn was cut.
        stop_reason: Strands' stop reason.
    """

    text: str
    segments: list[Segment]
    stop_reason: str


def read_turn(trajectory: Trajectory, turn: Turn, template: ChatTemplate, parser: ToolParser) -> ReadTurn:
    """Decode and parse a turn of a trajectory; one that was cut by length or abort is never searched for calls."""
    last = turn.parts[-1]
    ids = trajectory.token_ids[turn.parts[0].start : last.end]
    ended = last.finish_reason == "stop" and ids[-1] in (*template.end_ids, last.matched)
    text = template.encoder.decode(ids[:-1] if ended else ids)
    if last.finish_reason != "stop":
        cut: list[Segment] = []
        if isinstance(parser, CutTurnParser):
            cut = _segments(parser, parser.cut_segments, text, in_reasoning=template.opens_reasoning)
        is_read = cut and not any(isinstance(segment, ToolCall | ParseFailure) for segment in cut)
        return ReadTurn(text, cut if is_read else [Text(text)], "max_tokens")
    segments = _segments(parser, parser.segments, text, in_reasoning=template.opens_reasoning) or [Text("")]
    if any(isinstance(segment, ToolCall | ParseFailure) for segment in segments):
        return ReadTurn(text, segments, "tool_use")
    return ReadTurn(text, segments, "stop_sequence" if isinstance(last.matched, str) else "end_turn")


def _segments(
    parser: ToolParser, split: Callable[..., list[Segment]], text: str, *, in_reasoning: bool
) -> list[Segment]:
    """A turn's segments as a method of the parser splits them; one failure with all of it where the parser raises.

    A parser's input is sampled text alone. Were its error one of the episode's, the sample would not be trained, and
    the policy could choose not to be.
    """
    try:
        return split(text, in_reasoning=in_reasoning)
    except MemoryError:
        raise
    except Exception as e:  # a user's parser may raise anything; every turn comes here, so no guard is entered
        kind = (type(parser), type(e))
        words = "bug in a tool parser parser=%s: it raises over sampled text"
        log_once(logger, logging.ERROR, words, kind[0].__name__, key=kind, exc_info=e)
        return [ParseFailure(text, f"the turn can't be read: {type(e).__name__}")]


Messages = Sequence[Mapping[str, Any]]

# what the policy reads of a message; Strands keeps notes of its own beside it
_READ: Final = itemgetter("role", "content")


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What Strands asks of a model.

    Attributes:
        messages: The agent's history; not changed.
        tool_specs: The tools that the policy may call.
        system_prompt: The agent's system prompt as text.
        system_blocks: The same as content blocks, which count where both are given.
        agent: Who asks, where that is known.
        signal: The agent's cancel signal, which is its alone, where it is known.
        params: Sampling parameters of this turn alone, beside the model's.
        is_matched: Whether the messages are known to extend what the policy has read, if it has read any. To compare a
            long history costs more than all else.
    """

    messages: Messages
    tool_specs: Messages | None = None
    system_prompt: str | None = None
    system_blocks: Messages | None = None
    agent: Any = None
    signal: Any = None
    params: Mapping[str, Any] | None = None
    is_matched: bool = False

    @property
    def history(self) -> Messages:
        """The agent's own messages, without what was added for this request alone; the request's where not known."""
        own = getattr(self.agent, "messages", None)
        return own if isinstance(own, list) and len(own) == len(self.messages) else self.messages


class HistorySegment:
    """One history of an agent that the policy reads and answers, turn by turn.

    Each history must start with exactly the messages of the last call and the assistant's answer to them: one that was
    trimmed or rewritten, also in place, would no longer be what the policy read.

    Args:
        template: Of the policy's tokenizer.
        shown_ids: Those of the segment before.

    Attributes:
        trajectory: Tokens, mask, logprobs and turns.
        prompt_ids: The first prompt, also where its generation failed.
        parse_failures: Tool calls that could not be parsed.
        final_text: The last turn as text, control tokens included but its end of turn.
        stop_reason: Of the last turn, in Strands' words; "" before the first.
        failure_texts: By tool-use id, what the policy reads about a call that could not be parsed.
        shown_ids: By tool-use id, the id under which the template shows a call's result: the one that the policy wrote,
            in formats that have one, else one of 9 letters and digits, as some templates want it. A history that was
            read before keeps its own.
        new_images: Those among the tokens that `new_context` gave last, until they are accepted.
        ended_by: Why the next request began another segment, as text; "" for the last segment.
        transient_texts: Messages that the policy has read with a text that the agent's history has not.
    """

    def __init__(self, template: ChatTemplate, shown_ids: Mapping[str, str] | None = None) -> None:
        self._template = template
        self.trajectory = Trajectory()
        self.prompt_ids: list[int] = []
        self.parse_failures: list[ParseFailure] = []
        self.final_text = ""
        self.stop_reason = ""
        self.failure_texts: dict[str, str] = {}
        self.shown_ids = dict(shown_ids or {})
        self.new_images: Sequence[PlacedImage] = ()
        self.ended_by = ""
        self.transient_texts = 0
        self._covered: list[tuple[str, Any]] = []
        self._as_read: dict[int, tuple[str, Any]] = {}
        self._answer: tuple[str, Any] = ("assistant", [])
        self._tools: list[dict[str, Any]] = []
        self._head: tuple[str | None, list[dict[str, Any]]] | None = None
        self._tool_names: dict[str, str] = {}

    @property
    def covered_messages(self) -> int:
        """How many messages of the history the trajectory covers."""
        return len(self._covered)

    @property
    def head(self) -> tuple[str | None, list[dict[str, Any]]]:
        """The system prompt and the tools of the first request; none of a segment that was resumed."""
        return self._head or (None, [])

    def snapshot(self) -> HistorySegment:
        """What it is now, also while another thread samples into it."""
        frozen = copy.copy(self)
        frozen.trajectory = self.trajectory.snapshot()
        return frozen

    def is_covered(self, messages: Messages) -> bool:
        """Whether the trajectory covers exactly these messages."""
        return len(messages) == len(self._covered) and self._begin_as_covered(messages)

    def covers(self, call: ModelCall) -> bool:
        """Whether the trajectory covers exactly a call's messages, or those of its agent without what it adds now."""
        return self.is_covered(call.messages) or self.is_covered(call.history)

    def is_extended_by(self, messages: Messages) -> bool:
        """Whether these are the covered messages, the answer to them, and maybe more."""
        covered = len(self._covered)
        return len(messages) > covered and messages[covered]["role"] == "assistant" and self._begin_as_covered(messages)

    def changes_in_head(self, call: ModelCall) -> list[str]:
        """What of a call's system prompt and tools the policy has not read, named; nothing is known after a resume.

        Fewer tools are no change: of those that it has read, Strands shows only the one that it insists on.
        """
        if self._head is None:
            return []
        system, known = self._head
        specs = [*(call.tool_specs or ())]
        named: list[str] = []
        if specs != known:  # most often all are the same
            read = to_chat_tools(known)
            changed = to_chat_tools([spec for spec in specs if spec not in known])
            unread = [tool for tool in changed if tool not in read and repr(tool) not in map(repr, read)]
            named = [f"the tool {tool['function']['name']!r}" for tool in unread]  # a NaN is no NaN but reads like one
        is_same = (system_text(call.system_prompt, call.system_blocks) or None) == system
        return named if is_same else ["the system prompt", *named]

    async def new_context(self, call: ModelCall, room: Room, min_turn_tokens: int) -> list[int]:
        """The context tokens that the next request adds; none inside an open turn. Remembered by `accept` only.

        Tool results are cut where they leave less than `min_turn_tokens` of the room.

        Raises:
            TrajectoryError: The history does not extend what the policy has read, or the system prompt is another, or a
                tool is.
            PromptError: A message holds something else than text and images.
            TemplateError: The template refuses the messages.
            ConfigError: There is an image, and no processor that reads it.
        """
        trajectory, self.new_images = self.trajectory, ()
        if not trajectory.turns:
            self.prompt_ids = await self._first_prompt(call)
            return self.prompt_ids
        changes = self.changes_in_head(call)
        if changes:
            raise TrajectoryError(
                f"got a request that changes {', '.join(changes)} in mid-conversation; expected what the policy has "
                "read in its first prompt, which stays as it is. Set the system prompt and all tools before "
                "the first turn; or let a change begin a new segment: build the agent in an agent_factory (with "
                "fan_out each segment is a sample), or give SGLangModel on_rewritten_history='segment'."
            )
        if trajectory.is_open and self.covers(call):
            return []
        self._tools = self._tools or to_chat_tools(call.tool_specs)  # a conversation that another model began
        chat = self._new_chat_messages(call)
        last_id = trajectory.token_ids[-1]
        images = await _read_images(self._template, chat)
        if images and room.tokens is not None:
            room = Room(room.tokens - further_tokens(images), room.budget)
        ids = await _off_loop_if_long(chat, lambda: self._fitted_turn_ids(chat, last_id, room, min_turn_tokens))
        return self._with_images(ids, images, len(trajectory.token_ids)) if images else ids

    async def _first_prompt(self, call: ModelCall) -> list[int]:
        self._tools = to_chat_tools(call.tool_specs)
        system = system_text(call.system_prompt, call.system_blocks)
        # a copy: the caller may change its specifications
        self._head = (system or None, _copy([*(call.tool_specs or ())]))
        head = [{"role": "system", "content": system}] if system else []
        chat = [*head, *self._under_shown_ids(to_chat_messages(call.messages))]
        images = await _read_images(self._template, chat)
        ids = await _off_loop_if_long(chat, lambda: self._template.prompt_ids(chat, self._tools))
        return self._with_images(ids, images, 0) if images else ids

    def _with_images(self, ids: list[int], images: Sequence[ReadImage], start: int) -> list[int]:
        placed_ids, self.new_images = place_images(self._template, ids, images, start)
        return placed_ids

    def without_transient(self, call: ModelCall) -> dict[int, tuple[str, Any]]:
        """By their indices, the new messages of a call that the agent keeps otherwise, as it keeps them."""
        start, history = len(self._covered), call.history
        both = zip(map(_READ, call.messages[start:]), map(_READ, history[start:]), strict=True)
        return {
            index: (kept[0], _copy(kept[1]))
            for index, (read, kept) in enumerate(both, start)
            if kept != read and cleaned(kept) != cleaned(read)
        }

    def accept(self, messages: Messages, kept: Mapping[int, tuple[str, Any]] | None = None) -> None:
        """Remember that `messages`, which begin with those that were accepted before, are now part of the trajectory.

        A copy is kept: the caller may change its messages.

        Args:
            messages: As the policy has read them.
            kept: By their indices, those that the next request may have without transient text, as they are then.
        """
        start = len(self._covered)
        read = [(role, _copy(content)) for role, content in map(_READ, messages[start:])]
        for index in kept or {}:
            self._as_read[index] = read[index - start]
            read[index - start] = (kept or {})[index]
        self._covered += read
        self.new_images = ()

    def forget_history(self) -> None:
        """Cover no message: the agent's history is another by now."""
        self._covered = []

    def read_turn(self, index: int, number: int, parser: ToolParser, conversation: int) -> Answer:
        """Parse a turn, and remember what it called and what could not be parsed; the turn as Strands takes it.

        Args:
            index: Of the turn in the trajectory.
            number: Of the turn in the conversation, from 1.
            parser: Of tool calls.
            conversation: Its number; a history may hold calls of several.
        """
        turn = self.trajectory.turns[index]
        read = read_turn(self.trajectory, turn, self._template, parser)
        self.final_text, self.stop_reason = read.text, read.stop_reason
        call_prefix = f"agent{conversation}_call_{number}_" if conversation else f"call_{number}_"
        for at, segment in enumerate(read.segments):
            use_id = call_id(call_prefix, at, segment)
            if isinstance(segment, ToolCall | ParseFailure):
                letter = _LETTERS[conversation % len(_LETTERS)]
                self.shown_ids[use_id] = segment.written_id or f"{letter}{number:05d}{at:03d}"
            if isinstance(segment, ToolCall):
                self._tool_names[use_id] = segment.name
            elif isinstance(segment, ParseFailure):
                self._tool_names[use_id] = segment.name or INVALID_TOOL_CALL
                self.failure_texts[use_id] = failure_message(segment.reason)
                self.parse_failures.append(segment)
        answer = turn_answer(read, call_prefix, turn)
        self._answer = ("assistant", answer.message["content"])
        return answer

    def is_continued_by(self, messages: Messages) -> bool:
        """Whether these are the covered messages, exactly the answer to them, and more."""
        covered = len(self._covered)
        return self.is_extended_by(messages) and cleaned(_READ(messages[covered])) == cleaned(self._answer)

    def _begin_as_covered(self, messages: Messages) -> bool:
        """Whether the messages begin with the covered ones; one comparison in C where they do, however many they are.

        Strands cleans what it sends on one of its ways to a model and not on another.
        """
        given = [*map(_READ, messages[: len(self._covered)])]
        if given == self._covered:
            return True
        for index, read in self._as_read.items():  # what was shown once may be shown again
            if index < len(given) and given[index] == read:
                given[index] = self._covered[index]
        return given == self._covered or [*map(cleaned, given)] == [*map(cleaned, self._covered)]

    def why_not_extended_by(self, call: ModelCall) -> str:
        """Why a call begins another segment, as text: its head or a message changed, or it repeats a request."""
        if changes := self.changes_in_head(call):
            return f"the request changed {', '.join(changes)}"
        for number, (kept, given) in enumerate(zip(self._covered, map(_READ, call.messages), strict=False)):
            read = self._as_read.get(number, kept)
            if cleaned(read) != cleaned(given):
                before, now = _text_of(read[1]), _text_of(given[1])
                is_text_alone = _without_text(read[1]) == _without_text(given[1])
                if is_text_alone and (shown := lines_around(before, now)):
                    return f"{TRANSIENT}: message {number} had {shown!r:.300}"
                return f"message {number} of the history was rewritten"
        is_shorter = len(call.messages) < len(self._covered)
        return "messages were taken from the history" if is_shorter else "the policy was asked for another answer"

    def _new_chat_messages(self, call: ModelCall) -> list[ChatMessage]:
        messages, covered = call.messages, len(self._covered)
        if not (call.is_matched or self.is_extended_by(messages)):
            raise TrajectoryError(
                f"got a history of {len(messages)} messages that does not extend the {covered} messages and the "
                "answer that the policy has read; expected only new messages at its end. Call model.reset() before a "
                "new conversation, and use NullConversationManager: a manager that drops or rewrites messages breaks "
                "token exactness."
            )
        chat = to_chat_messages(messages[covered + 1 :], self._tool_names, answered=messages[covered])
        if not chat:
            raise TrajectoryError(
                "got no message after the policy's last answer; expected tool results or a user turn to answer."
            )
        for message in chat:
            text = self.failure_texts.get(message.get("tool_call_id", ""))
            if text is not None:
                message["content"] = text
        return self._under_shown_ids(chat)

    def _under_shown_ids(self, chat: list[ChatMessage]) -> list[ChatMessage]:
        for message in chat:
            if "tool_call_id" in message:
                message["tool_call_id"] = self.shown_ids.get(message["tool_call_id"], message["tool_call_id"])
            for call in message.get("tool_calls", ()):
                call["id"] = self.shown_ids.get(call["id"], call["id"])
        return chat

    def _fitted_turn_ids(
        self, chat: list[ChatMessage], last_id: int | None, room: Room, min_turn_tokens: int
    ) -> list[int]:
        """Ids of the new messages; tool results are cut, evenly, while they leave less than `min_turn_tokens`."""
        texts = [message["content"] for message in chat]
        # images are never cut, nor what stands beside them
        tool_indices = [
            index for index, message in enumerate(chat) if message["role"] == "tool" and isinstance(texts[index], str)
        ]
        if room.tokens is None or not tool_indices:
            return self._template.turn_ids(chat, self._tools, last_id=last_id)
        allowed = max(room.tokens - min_turn_tokens, 0)
        if not are_far_over([texts[index] for index in tool_indices], allowed, self._template.encoder):
            ids = self._template.turn_ids(chat, self._tools, last_id=last_id)
            if len(ids) <= allowed:
                return ids
        cap = allowed
        while True:
            for index in tool_indices:
                chat[index]["content"] = head_and_tail(texts[index], cap, self._template.encoder)
            ids = self._template.turn_ids(chat, self._tools, last_id=last_id)
            if len(ids) <= allowed or cap == 0:
                return ids
            # the overshoot is shared by the results; at least one token less each time, so this ends
            cap = max(0, cap - max(1, (len(ids) - allowed) // len(tool_indices)))


def lines_around(before: str, now: str) -> str:
    """The lines that a text had around those of another, as a reminder stands around a message; "" where it had not."""
    had, has = ([" ".join(line.split()) for line in text.splitlines() if line.strip()] for text in (before, now))
    starts = range(len(had) - len(has) + 1)
    start = next((at for at in starts if had[at : at + len(has)] == has), None)
    return "" if start is None else "\n".join([*had[:start], *had[start + len(has) :]])


def _text_of(content: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(block["text"] for block in content if "text" in block)


def _without_text(content: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [block for block in content if "text" not in block]


def is_same_history(history: Messages, messages: Messages) -> bool:
    """Whether a request is about the agent's own messages, of which the last one tells.

    Strands cleans what it sends, and plugins add text to it.
    """
    if not history or len(history) != len(messages) or history[-1]["role"] != messages[-1]["role"]:
        return False
    return all(block in messages[-1]["content"] for block in history[-1]["content"])


def who_asks(state: Mapping[str, Any] | None, signal: object, messages: Messages) -> object:
    """The agent that an invocation's state names; None where it may be another.

    The agents of a graph that work at once share one state. Newer Strands hands their own signals to the model too.
    """
    agent = (state or {}).get("agent")
    if signal is not None:
        return agent if getattr(agent, "_cancel_signal", None) is signal else None
    return agent if is_same_history(getattr(agent, "messages", ()), messages) else None


def validated_output(output_model: type[T], message: dict[str, Any], tool_name: str) -> T:
    """The instance that an answer is: the arguments of its call of this tool, or its text."""
    calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
    text = "".join(block.get("text", "") for block in message["content"]).strip()
    arguments = next((call["input"] for call in calls if call["name"] == tool_name), None)
    try:
        return output_model.model_validate(json.loads(text) if arguments is None else arguments)
    except (ValidationError, ValueError, RecursionError) as e:
        got = f"a call with {arguments!r}" if arguments is not None else f"the text {text[:200]!r}"
        why = explained(e, output_model) if isinstance(e, ValidationError) else e
        raise StructuredOutputException(
            f"got {got}; expected a call of the tool {tool_name!r} with valid arguments, or their JSON alone: {why}"
        ) from e


async def token_count(template: ChatTemplate, call: ModelCall) -> int:
    """Tokens of Strands messages, exactly; tool results alone count as the turn that they open."""
    chat = to_chat_messages(call.messages)
    images = await _read_images(template, chat)
    tools = to_chat_tools(call.tool_specs)
    if chat and chat[0]["role"] == "tool":
        ids = await _off_loop_if_long(chat, lambda: template.turn_ids(chat, tools, last_id=template.end_of_calls_id))
    else:
        system = system_text(call.system_prompt, call.system_blocks)
        prompt = [*([{"role": "system", "content": system}] if system else []), *chat]
        ids = await _off_loop_if_long(prompt, lambda: template.prompt_ids(prompt, tools))
    return len(place_images(template, ids, images, 0)[0] if images else ids)


def _copy(content: object) -> Json:
    """The dicts and lists of a content anew, its texts as they are."""
    if isinstance(content, dict):
        return {key: value if isinstance(value, str) else _copy(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_copy(value) for value in content]
    return content


async def _read_images(template: ChatTemplate, chat: Sequence[ChatMessage]) -> list[ReadImage]:
    """The images of new messages, if there are any: the content of most messages is a text."""
    return [] if all(isinstance(message["content"], str) for message in chat) else await read_images(template, chat)


async def _off_loop_if_long(chat: Sequence[ChatMessage], encode: Callable[[], list[int]]) -> list[int]:
    """What `encode` gives; in a thread where the messages are so long that it would hold the event loop up."""
    if sum(map(_char_count, chat)) < LONG_TEXT_CHARS:
        return encode()
    return await asyncio.to_thread(encode)


def _char_count(message: ChatMessage) -> int:
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(str(part.get("text", ""))) for part in content)
