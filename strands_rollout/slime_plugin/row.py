"""A dataset row's prompt -> what an agent is started with: a system prompt, earlier turns, and the user's message.

Knows the two forms that slime hands over (a string, or a chat as a list of messages), and the images that it has
loaded beside a chat (slime/utils/data.py, slime/utils/processing_utils.py); nothing of tokens beyond the template's
control tokens, which give an already rendered prompt away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strands_rollout.chat_template import ChatTemplate
from strands_rollout.errors import PromptError
from strands_rollout.images import image_block

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EpisodePrompt:
    """What an agent starts with.

    Attributes:
        system_prompt: None for no system message.
        messages: Strands messages, at least one; the last is the user's.
    """

    system_prompt: str | None
    messages: list[Message]


async def episode_prompt(
    sample: Any,  # noqa: ANN401 - slime's Sample or ours
    configured_system: str | None,
    template: ChatTemplate | None,
) -> EpisodePrompt:
    """As `to_episode_prompt`, of a sample; in a thread where it holds images."""
    prompt, loaded = sample.prompt, getattr(sample, "multimodal_inputs", None)
    if isinstance(prompt, list) and any(isinstance(one, Mapping) and _has_image(one.get("content")) for one in prompt):
        return await asyncio.to_thread(to_episode_prompt, prompt, configured_system, template, loaded)
    return to_episode_prompt(prompt, configured_system, template, loaded)


def to_episode_prompt(
    prompt: object,
    configured_system: str | None,
    template: ChatTemplate | None,
    loaded: Mapping[str, Any] | None = None,
) -> EpisodePrompt:
    """Convert a prompt; a row's own system message replaces the configured system prompt, since it belongs to the task.

    Args:
        prompt: A dataset row's.
        configured_system: The settings' system prompt; None for none.
        template: The model's, which tells an already rendered prompt; None to pass that check over.
        loaded: The sample's `multimodal_inputs`: its `images`, where there are any, are those of the chat, in order.
            None where slime has no processor; text parts are lines then.

    Raises:
        PromptError: The prompt is empty, of a wrong type, not a chat that ends with a user's turn, or was already
            rendered by a chat template; or an image can't be read, or there is anything but text and images.
        ConfigError: There are images, and Pillow is not installed.
    """
    images = _loaded_images(loaded or {})
    if isinstance(prompt, str):
        if images:
            raise PromptError(
                f"got a string as prompt, and {len(images)} images; expected a chat with a part of each, as slime "
                "makes with --multimodal-keys and without --apply-chat-template"
            )
        _refuse_empty(prompt, "prompt")
        if template is not None:
            _refuse_rendered(prompt, template)
        return EpisodePrompt(configured_system, [_message("user", prompt)])
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise PromptError(
            f"got a prompt of type {type(prompt).__name__}; expected a string, or a chat as a list of "
            '{"role": ..., "content": ...} messages. Check --input-key.'
        )
    # slime cuts a text at each place of an image, and between all characters where a row has none
    between = "\n" if loaded is None else ""
    return _from_chat(prompt, configured_system, images, between)


def _from_chat(
    chat: Sequence[object], configured_system: str | None, images: list[object], between: str
) -> EpisodePrompt:
    if not chat:
        raise PromptError("got an empty chat as prompt; expected at least a user's message")
    system: list[str] = []
    messages: list[Message] = []
    unplaced = iter(images) if images else None
    for position, message in enumerate(chat):
        role, content = _role_and_content(message, position)
        if role == "system":
            if messages:
                raise PromptError(f"got a system message at position {position}; expected it before all other messages")
            system.append(_text(content, position, between))
        elif role == "user" and _has_image(content):
            messages.append({"role": role, "content": [_block(part, position, unplaced) for part in content]})
        else:
            messages.append(_message(role, _text(content, position, between)))
    if not messages or messages[-1]["role"] != "user":
        raise PromptError("got a chat that does not end with a user's message; expected one for the agent to answer")
    if unplaced is not None and (unused := len(list(unplaced))):
        raise PromptError(f"got {unused} of {len(images)} loaded images more than the chat has parts; expected as many")
    asked = messages[-1]["content"]
    if not any("image" in block for block in asked):
        _refuse_empty(asked[0]["text"], "user's message")
    return EpisodePrompt("\n".join(system) if system else configured_system, messages)


def _loaded_images(loaded: Mapping[str, Any]) -> list[object]:
    further = sorted(name for name, values in loaded.items() if name != "images" and values is not None and len(values))
    if further:
        raise PromptError(f"got {further} in the sample's multimodal_inputs; expected images only")
    images = loaded.get("images")
    return list(images) if images is not None else []


def _has_image(content: object) -> bool:
    return isinstance(content, list | tuple) and any(
        isinstance(part, Mapping) and part.get("type") == "image" for part in content
    )


def _block(part: object, position: int, loaded: Iterator[object] | None) -> dict[str, Any]:
    """Strands' content block of a part of a user's message."""
    if not isinstance(part, Mapping) or not ("text" in part or part.get("type") == "image"):
        raise PromptError(f"got the part {part!r:.200} at position {position} of the chat; expected text or an image")
    if "text" in part:
        return {"text": str(part["text"])}
    if loaded is not None:
        try:
            return image_block(next(loaded))
        except StopIteration:
            raise PromptError("got more parts of images than loaded images; expected as many") from None
    further = sorted(part.keys() - {"type", "image"})
    if further or part.get("image") is None:
        raise PromptError(
            f"got an image with {sorted(part)} at position {position} of the chat; expected type and image, or that "
            "slime has loaded it (--multimodal-keys, with a vision-language model)"
        )
    return image_block(part["image"])


def _role_and_content(message: object, position: int) -> tuple[str, Any]:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise PromptError(
            f'got {message!r:.200} at position {position} of the chat; expected {{"role": ..., "content": ...}}'
        )
    role = message["role"]
    if role not in ("system", "user", "assistant"):
        raise PromptError(
            f"got the role {role!r} at position {position} of the chat; expected system, user or assistant. "
            "Tool messages of an earlier episode can't be replayed as a prompt."
        )
    if message.get("tool_calls"):
        raise PromptError(f"got tool calls at position {position} of the chat; expected a prompt without tool use")
    return role, message["content"]


def _text(content: object, position: int, between: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) and "text" in part for part in content):
        return between.join(str(part["text"]) for part in content)
    raise PromptError(
        f"got content of type {type(content).__name__} at position {position} of the chat; expected a string, or a "
        "list of "
        '{"type": "text", "text": ...} parts, of a user also {"type": "image", "image": ...}'
    )


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": [{"text": text}]}


def _refuse_empty(text: str, what: str) -> None:
    if not text.strip():
        raise PromptError(f"got an empty {what}; expected the task's text. Check --input-key and the data file.")


def _refuse_rendered(prompt: str, template: ChatTemplate) -> None:
    if template.is_rendered(prompt):
        raise PromptError(
            f"got a prompt that a chat template already rendered ({prompt[:60]!r}...); expected the plain text or the "
            "chat. Remove --apply-chat-template from slime's arguments: the agent renders its conversation itself, "
            "and a second rendering would train on a wrapped prompt."
        )
