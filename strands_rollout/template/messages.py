"""Strands messages and tool specifications -> the message and tool dicts that chat templates read.

Keeps all content of a message and its order. A content with images is a list of parts, as templates of
vision-language models read it; any other is a string. Knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from strands_rollout.errors import PromptError

ChatMessage = dict[str, Any]
_IGNORED_BLOCKS = ("cachePoint", "guardContent")


_BLANK: Final = "[blank text]"


def to_chat_messages(
    messages: Iterable[Mapping[str, Any]], tool_names: Mapping[str, str] | None = None
) -> list[ChatMessage]:
    """Convert Strands messages, in order, one tool message per tool result.

    Args:
        messages: Strands messages (`role` user or assistant, `content` a list of blocks).
        tool_names: Tool name by tool-use id, for calls that are not among `messages`.

    Returns:
        Messages of roles user, assistant and tool, as Hugging Face chat templates expect them. A message without any
        content becomes one with an empty string.

    Raises:
        PromptError: A block can't be expressed (a document, a video, an image of an assistant ...).
    """
    names = dict(tool_names or {})
    chat: list[ChatMessage] = []
    for message in messages:
        convert = _assistant_message if message["role"] == "assistant" else _user_messages
        chat += convert(message["content"], names)
    return chat


def system_text(system_prompt: str | None, blocks: Sequence[Mapping[str, Any]] | None = None) -> str | None:
    """The system prompt as one string; its text blocks, when given, win over the plain string."""
    texts = [block["text"] for block in blocks or () if "text" in block]
    text = "\n".join(texts) if texts else system_prompt
    return None if text is None else _encodable(text)


def to_chat_tools(tool_specs: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Strands tool specifications in the form of OpenAI's `tools`, which chat templates read.

    Only a property's own words are kept: Strands adds `"description": "Property x"` where there is none, as is.
    """
    return [
        {
            "type": "function",
            "function": {
                "name": spec["name"],
                "description": spec["description"],
                "parameters": spec["inputSchema"].get("json", spec["inputSchema"]),
            },
        }
        for spec in tool_specs or ()
    ]


def take_images(chat: Iterable[ChatMessage]) -> list[bytes]:
    """Take the bytes of the images out of new messages, in the order of their parts, which stay."""
    return [
        part.pop("image")
        for message in chat
        if isinstance(message["content"], list)
        for part in message["content"]
        if "image" in part
    ]


def tool_result_text(content: Iterable[Mapping[str, Any]]) -> str:
    """All blocks of a tool result, in order, one per line; JSON blocks as JSON; "" when there is none."""
    return "\n".join(_block_text(block) for block in content)


def _assistant_message(content: Sequence[Mapping[str, Any]], names: dict[str, str]) -> list[ChatMessage]:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        if "toolUse" in block:
            use = block["toolUse"]
            names[use["toolUseId"]] = use["name"]
            function = {"name": use["name"], "arguments": use["input"]}
            calls.append({"type": "function", "id": use["toolUseId"], "function": function})
        elif "reasoningContent" in block:
            reasoning.append(block["reasoningContent"].get("reasoningText", {}).get("text", ""))
        elif not _is_ignored(block):
            texts.append(_block_text(block))
    message: ChatMessage = {"role": "assistant", "content": "".join(_cleaned(content, texts, has_calls=bool(calls)))}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _cleaned(content: Sequence[Mapping[str, Any]], texts: list[str], *, has_calls: bool) -> list[str]:
    """The texts as Strands streams them to any model, so that a turn reads the same where it is asked directly."""
    if not content:
        return [_BLANK]
    return [text if text.strip() else _BLANK for text in texts if text.strip() or not has_calls]


def _user_messages(content: Sequence[Mapping[str, Any]], names: dict[str, str]) -> list[ChatMessage]:
    chat: list[ChatMessage] = []
    shown_blocks: list[Mapping[str, Any]] = []
    for block in content:
        if "toolResult" in block:
            result = block["toolResult"]
            call_id = result["toolUseId"]
            shown = _user_content(result["content"])
            chat.append({"role": "tool", "name": names.get(call_id, "tool"), "tool_call_id": call_id, "content": shown})
        elif not _is_ignored(block):
            shown_blocks.append(block)
    if shown_blocks or not chat:
        chat.append({"role": "user", "content": _user_content(shown_blocks)})
    return chat


def _user_content(blocks: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    if any("image" in block for block in blocks):
        return [_image_part(block) if "image" in block else _text_part(block) for block in blocks]
    return tool_result_text(blocks)


def _image_part(block: Mapping[str, Any]) -> dict[str, Any]:
    data = block["image"].get("source", {}).get("bytes")
    if not isinstance(data, bytes):
        raise PromptError(
            f"got an image block with the source {sorted(block['image'].get('source', {}))}; expected "
            '{"format": ..., "source": {"bytes": ...}}: images that lie elsewhere are not fetched'
        )
    return {"type": "image", "image": data}


def _text_part(block: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": _block_text(block)}


def _is_ignored(block: Mapping[str, Any]) -> bool:
    return any(key in block for key in _IGNORED_BLOCKS)


def _block_text(block: Mapping[str, Any]) -> str:
    if "text" in block:
        return _encodable(str(block["text"]))
    if "json" in block:
        return _encodable(json.dumps(block["json"], ensure_ascii=False))
    if "citationsContent" in block:
        return _encodable("".join(part.get("text", "") for part in block["citationsContent"].get("content", ())))
    raise PromptError(
        f"got a content block of kind {sorted(block)!r}; expected text or json, or an image of a user or a tool: this "
        "model reads nothing else. Give the agent tools and prompts that return these."
    )


def _encodable(text: str) -> str:
    """The text with a question mark for each lone surrogate, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
