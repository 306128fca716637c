"""Strands history -> the new context tokens of the next request, cut to fit what the budgets leave.

Knows the chat template and what of the history the trajectory already covers; nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

from strands_rollout.chat_messages import ChatMessage, system_text, to_chat_messages, to_chat_tools
from strands_rollout.chat_template import ChatTemplate
from strands_rollout.errors import TrajectoryError
from strands_rollout.image_context import further_tokens, place_images, read_images
from strands_rollout.image_tokens import ReadImage
from strands_rollout.images import PlacedImage
from strands_rollout.strands_events import INVALID_TOOL_CALL, failure_message
from strands_rollout.token_limits import Room
from strands_rollout.tool_parsers import ParseFailure, Segment, ToolCall
from strands_rollout.trajectory import Trajectory
from strands_rollout.truncation import head_and_tail, is_far_over

# above this many characters a text is encoded in a thread: 10,000 take 3 ms, 8 where they are digits
_LONG_TEXT_CHARS: Final = 10_000
# what the policy reads of a message; Strands keeps notes of its own beside it
_READ: Final = itemgetter("role", "content")


class ContextBuilder:
    """Follows one conversation; holds what was already rendered.

    A message list must start with exactly the messages of the last call and the assistant's answer to them: history
    that was trimmed or rewritten, also in place, would no longer be what the policy read.

    Attributes:
        failure_texts: By tool-use id, what the policy is told about a call that could not be parsed.
        shown_ids: By tool-use id, the id under which the template shows a call's result: the one that the policy wrote,
            in formats that have one, else one of 9 letters and digits, as some templates want it. A history that was
            read before goes on with its own.
        new_images: Those among the ids that `build` gave last, until they are accepted.
    """

    def __init__(self, template: ChatTemplate, shown_ids: Mapping[str, str] | None = None) -> None:
        self._template = template
        self.shown_ids = dict(shown_ids or {})
        self._covered: list[tuple[str, Any]] = []
        self._tools: list[dict[str, Any]] = []
        self._head: tuple[str | None, list[dict[str, Any]]] | None = None
        self._tool_names: dict[str, str] = {}
        self.failure_texts: dict[str, str] = {}
        self.new_images: Sequence[PlacedImage] = ()

    async def build(
        self,
        messages: Sequence[Mapping[str, Any]],
        tool_specs: Sequence[Mapping[str, Any]] | None,
        system_prompt: str | None,
        system_blocks: Sequence[Mapping[str, Any]] | None,
        trajectory: Trajectory,
        room: Room,
        min_turn_tokens: int,
    ) -> list[int]:
        """The new context tokens; nothing is remembered before `accept`.

        Raises:
            TrajectoryError: The history does not extend what the policy has read.
            PromptError: A message holds something else than text and images.
            TemplateError: The template refuses the messages.
            ConfigError: There is an image, and no processor that reads it.
        """
        self.new_images = ()
        if not trajectory.turns:
            self._tools = to_chat_tools(tool_specs)
            system = system_text(system_prompt, system_blocks)
            self._head = (system or None, self._tools)
            head = [{"role": "system", "content": system}] if system else []
            chat = [*head, *self._under_shown_ids(to_chat_messages(messages))]
            images = await read_images(self._template, chat)
            ids = await _off_loop_if_long(chat, lambda: self._template.prompt_ids(chat, self._tools))
            return self._with_images(ids, images, 0)
        self._tools = self._tools or to_chat_tools(tool_specs)  # a conversation that another model began
        chat = self._new_chat_messages(messages)
        last_id = trajectory.token_ids[-1]
        images = await read_images(self._template, chat)
        if images and room.tokens is not None:
            room = Room(room.tokens - further_tokens(images), room.budget)
        ids = await _off_loop_if_long(chat, lambda: self._fitted_turn_ids(chat, last_id, room, min_turn_tokens))
        return self._with_images(ids, images, len(trajectory.token_ids))

    def _with_images(self, ids: list[int], images: Sequence[ReadImage], start: int) -> list[int]:
        if not images:
            return ids
        placed_ids, self.new_images = place_images(self._template, ids, images, start)
        return placed_ids

    @property
    def covered_count(self) -> int:
        """How many messages the trajectory covers."""
        return len(self._covered)

    def is_covered(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the trajectory covers exactly these messages."""
        return len(messages) == len(self._covered) and self._begin_as_covered(messages)

    def is_extended_by(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these are the covered messages, the answer to them, and maybe more."""
        covered = len(self._covered)
        return len(messages) > covered and messages[covered]["role"] == "assistant" and self._begin_as_covered(messages)

    def shows(
        self,
        tool_specs: Sequence[Mapping[str, Any]] | None,
        system_prompt: str | None,
        system_blocks: Sequence[Mapping[str, Any]] | None,
    ) -> bool:
        """Whether the policy has read this system prompt and these tools; taken for granted of what was resumed."""
        if self._head is None:
            return True
        system, tools = self._head
        is_same = (system_text(system_prompt, system_blocks) or None) == system
        return is_same and all(tool in tools for tool in to_chat_tools(tool_specs))

    def accept(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Remember that `messages`, which begin with those that were accepted before, are now part of the trajectory.

        A copy is kept: whoever has the messages may change them.
        """
        new = map(_READ, messages[len(self._covered) :])
        self._covered += [(role, _copy(content)) for role, content in new]
        self.new_images = ()

    def _begin_as_covered(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the messages begin with the covered ones, told without a step of Python for each."""
        return [*map(_READ, messages[: len(self._covered)])] == self._covered

    def note_calls(self, number: int, call_prefix: str, segments: Sequence[Segment]) -> None:
        """Remember the calls of a turn, under the ids that `turn_events` gave them."""
        for index, segment in enumerate(segments):
            call_id = f"{call_prefix}{index}"
            if isinstance(segment, ToolCall | ParseFailure):
                self.shown_ids[call_id] = segment.written_id or f"c{number:05d}{index:03d}"
            if isinstance(segment, ToolCall):
                self._tool_names[call_id] = segment.name
            elif isinstance(segment, ParseFailure):
                self._tool_names[call_id] = segment.name or INVALID_TOOL_CALL
                self.failure_texts[call_id] = failure_message(segment)

    def _new_chat_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
        covered = len(self._covered)
        if not self.is_extended_by(messages):
            raise TrajectoryError(
                f"got a history of {len(messages)} messages that does not extend the {covered} messages and the "
                "answer that the policy has read; expected only new messages at its end. Call model.reset() before a "
                "new conversation, and use NullConversationManager: a manager that drops or rewrites messages breaks "
                "token exactness."
            )
        chat = to_chat_messages(messages[covered + 1 :], self._tool_names)
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
        if not is_far_over(sum(map(len, texts)), allowed):
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


def _copy(content: Any) -> Any:  # noqa: ANN401 - any JSON value
    """The dicts and lists of a content anew, its texts as they are."""
    if isinstance(content, dict):
        return {key: value if isinstance(value, str) else _copy(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_copy(value) for value in content]
    return content


async def token_count(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tool_specs: Sequence[Mapping[str, Any]] | None,
    system_prompt: str | None,
    system_blocks: Sequence[Mapping[str, Any]] | None,
) -> int:
    """Tokens of Strands messages, exactly; tool results alone count as the turn that they open."""
    chat = to_chat_messages(messages)
    images = await read_images(template, chat)
    tools = to_chat_tools(tool_specs)
    if chat and chat[0]["role"] == "tool":
        ids = await _off_loop_if_long(chat, lambda: template.turn_ids(chat, tools, last_id=template.end_of_calls_id))
    else:
        system = system_text(system_prompt, system_blocks)
        prompt = [*([{"role": "system", "content": system}] if system else []), *chat]
        ids = await _off_loop_if_long(prompt, lambda: template.prompt_ids(prompt, tools))
    return len(place_images(template, ids, images, 0)[0] if images else ids)


async def _off_loop_if_long(chat: Sequence[ChatMessage], encode: Callable[[], list[int]]) -> list[int]:
    """What `encode` gives; in a thread where the messages are so long that it would hold the event loop up."""
    if sum(len(message["content"]) for message in chat) < _LONG_TEXT_CHARS:
        return encode()
    return await asyncio.to_thread(encode)
