"""Render new messages as the context tokens that the next request adds to a branch; count the tokens of messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from strands_rollout.errors import TrajectoryError
from strands_rollout.model.images import ReadImage, extra_image_tokens, place_images, read_images
from strands_rollout.model.sampling import RemainingBudget
from strands_rollout.record.agent_request import AgentRequest
from strands_rollout.record.record import Branch, ExtendBranch, Head, StrandsMessages, copy_content
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.template.messages import ChatMessage, system_text, to_chat_messages, to_chat_tools
from strands_rollout.template.tokens import LONG_TEXT_CHARS, clearly_exceed, truncate_middle


async def first_prompt(template: ChatTemplate, branch: Branch, head: Head, messages: StrandsMessages) -> list[int]:
    """Render the first prompt of a branch; return its ids, and store them on the branch with the head and the images.

    Raises:
        PromptError: A message has content that can't be converted, such as a document; a user's image can't be read; or
            a tool's name contains a lone surrogate.
        TemplateError: The template refuses the messages or the tools, or does not show each image once.
        ConfigError: Pillow or the processor is missing for a user's image, or the image's conversion fails.
    """
    branch.chat_tools = to_chat_tools(head.tools)
    # copy the tools: the caller may change its tool specifications
    branch.head = Head(head.system, copy_content([*head.tools]))
    system = [{"role": "system", "content": head.system}] if head.system else []
    chat = [*system, *to_chat_messages(messages)]
    _set_shown_ids(branch, chat)
    images = await _read_images(template, chat)
    ids = await _off_loop_if_long(chat, lambda: template.prompt_ids(chat, branch.chat_tools))
    branch.prompt_ids = _with_images(template, branch, ids, images, 0) if images else ids
    return branch.prompt_ids


async def turn_context(
    template: ChatTemplate, place: ExtendBranch, head: Head, remaining: RemainingBudget, min_turn_tokens: int
) -> list[int]:
    """Return the ids of the messages after a branch's last answer; cut tool results that are too long.

    If `remaining` has a limit, results without an image are shortened or emptied to leave `min_turn_tokens` for the
    turn. Images in the messages are stored on the branch.

    Raises:
        TrajectoryError: There is no message after the answer.
        PromptError: A message has content that can't be converted, such as a document; or a user's image can't be read.
        TemplateError: The template refuses the messages, or does not show each image once.
        ConfigError: Pillow or the processor is missing for a user's image, or the image's conversion fails.
    """
    branch = place.branch
    branch.chat_tools = branch.chat_tools or to_chat_tools(head.tools)  # a resumed branch has no tools
    chat = to_chat_messages(place.new_messages, branch.calls.tools, answered=place.answer)
    if not chat:
        raise TrajectoryError(
            "the request has no message after the policy's last answer; expected tool results or a user message"
        )
    for message in chat:
        text = branch.calls.failure_texts.get(message.get("tool_call_id", ""))
        if text is not None:
            message["content"] = text
    _set_shown_ids(branch, chat)
    last_id = branch.trajectory.token_ids[-1]
    images = await _read_images(template, chat)
    if images and remaining.tokens is not None:
        remaining = RemainingBudget(remaining.tokens - extra_image_tokens(images), remaining.budget)

    def encode() -> list[int]:
        return _fit_turn_ids(template, chat, branch.chat_tools, last_id, remaining, min_turn_tokens)

    ids = await _off_loop_if_long(chat, encode)
    return _with_images(template, branch, ids, images, len(branch.trajectory.token_ids)) if images else ids


def _with_images(
    template: ChatTemplate, branch: Branch, ids: list[int], images: Sequence[ReadImage], start: int
) -> list[int]:
    placed_ids, branch.new_images = place_images(template, ids, images, start)
    return placed_ids


def _set_shown_ids(branch: Branch, chat: list[ChatMessage]) -> None:
    for message in chat:
        if "tool_call_id" in message:
            message["tool_call_id"] = branch.calls.shown_ids.get(message["tool_call_id"], message["tool_call_id"])
        for call in message.get("tool_calls", ()):
            call["id"] = branch.calls.shown_ids.get(call["id"], call["id"])


def _fit_turn_ids(
    template: ChatTemplate,
    chat: list[ChatMessage],
    tools: list[dict[str, Any]],
    last_id: int | None,
    remaining: RemainingBudget,
    min_turn_tokens: int,
) -> list[int]:
    """Return the ids of new messages; shorten or empty tool results to leave `min_turn_tokens`."""
    texts = [message["content"] for message in chat]
    # a result with an image is never cut
    tool_indices = [
        index for index, message in enumerate(chat) if message["role"] == "tool" and isinstance(texts[index], str)
    ]
    if remaining.tokens is None or not tool_indices:
        return template.turn_ids(chat, tools, last_id=last_id)
    allowed = max(remaining.tokens - min_turn_tokens, 0)
    if not clearly_exceed([texts[index] for index in tool_indices], allowed, template.encoder):
        ids = template.turn_ids(chat, tools, last_id=last_id)
        if len(ids) <= allowed:
            return ids
    cap = allowed
    while True:
        for index in tool_indices:
            chat[index]["content"] = truncate_middle(texts[index], cap, template.encoder)
        ids = template.turn_ids(chat, tools, last_id=last_id)
        if len(ids) <= allowed or cap == 0:
            return ids
        # each result is cut by its share of the excess tokens; the cap shrinks in each pass, so the loop ends
        cap = max(0, cap - max(1, (len(ids) - allowed) // len(tool_indices)))


async def token_count(template: ChatTemplate, request: AgentRequest) -> int:
    """Return the exact number of tokens of Strands messages, including the generation prompt.

    Messages are counted as a first prompt, with the system prompt and the tools. But if they begin with a tool result,
    they are counted as the context after an answer.
    """
    chat = to_chat_messages(request.messages)
    images = await _read_images(template, chat)
    tools = to_chat_tools(request.tool_specs)
    if chat and chat[0]["role"] == "tool":
        ids = await _off_loop_if_long(chat, lambda: template.turn_ids(chat, tools, last_id=template.end_of_calls_id))
    else:
        system = system_text(request.system_prompt, request.system_blocks)
        prompt = [*([{"role": "system", "content": system}] if system else []), *chat]
        ids = await _off_loop_if_long(prompt, lambda: template.prompt_ids(prompt, tools))
    return len(place_images(template, ids, images, 0)[0] if images else ids)


async def _read_images(template: ChatTemplate, chat: Sequence[ChatMessage]) -> list[ReadImage]:
    return [] if all(isinstance(message["content"], str) for message in chat) else await read_images(template, chat)


async def _off_loop_if_long(chat: Sequence[ChatMessage], encode: Callable[[], list[int]]) -> list[int]:
    if sum(map(_char_count, chat)) < LONG_TEXT_CHARS:
        return encode()
    return await asyncio.to_thread(encode)


def _char_count(message: ChatMessage) -> int:
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(str(part.get("text", ""))) for part in content)
