"""A dataset row's prompt -> what an agent is started with: a system prompt, earlier turns, and the user's message.

Knows the two forms that slime hands over (a string, or a chat as a list of messages); nothing of tokens beyond the
template's control tokens, which give an already rendered prompt away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strands_rollout.chat_template import ChatTemplate
from strands_rollout.errors import PromptError

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


def to_episode_prompt(prompt: object, configured_system: str | None, template: ChatTemplate | None) -> EpisodePrompt:
    """Convert a prompt; a row's own system message replaces the configured system prompt, since it belongs to the task.

    Args:
        prompt: A dataset row's.
        configured_system: The settings' system prompt; None for none.
        template: The model's, which tells an already rendered prompt; None to pass that check over.

    Raises:
        PromptError: The prompt is empty, of a wrong type, not a chat that ends with a user's turn, or was already
            rendered by a chat template.
    """
    if isinstance(prompt, str):
        _refuse_empty(prompt, "prompt")
        if template is not None:
            _refuse_rendered(prompt, template)
        return EpisodePrompt(configured_system, [_message("user", prompt)])
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise PromptError(
            f"got a prompt of type {type(prompt).__name__}; expected a string, or a chat as a list of "
            '{"role": ..., "content": ...} messages. Check --input-key.'
        )
    return _from_chat(prompt, configured_system)


def _from_chat(chat: Sequence[object], configured_system: str | None) -> EpisodePrompt:
    if not chat:
        raise PromptError("got an empty chat as prompt; expected at least a user's message")
    system: list[str] = []
    messages: list[Message] = []
    for position, message in enumerate(chat):
        role, text = _role_and_text(message, position)
        if role == "system":
            if messages:
                raise PromptError(f"got a system message at position {position}; expected it before all other messages")
            system.append(text)
        else:
            messages.append(_message(role, text))
    if not messages or messages[-1]["role"] != "user":
        raise PromptError("got a chat that does not end with a user's message; expected one for the agent to answer")
    _refuse_empty(messages[-1]["content"][0]["text"], "user's message")
    return EpisodePrompt("\n".join(system) if system else configured_system, messages)


def _role_and_text(message: object, position: int) -> tuple[str, str]:
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
    return role, _text(message["content"], position)


def _text(content: object, position: int) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) and "text" in part for part in content):
        return "\n".join(str(part["text"]) for part in content)
    raise PromptError(
        f"got content of type {type(content).__name__} at position {position} of the chat; expected a string, or a "
        "list of "
        '{"type": "text", "text": ...} parts: this package reads text only'
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
