"""A prompt as a data set has it -> a chat, and what of it tells one problem from another.

Knows the forms that data sets use, a string, a list of messages, and that list as JSON text; must not know columns or
labels.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any, Final

import orjson

from preparation.errors import RowError

Chat = list[dict[str, Any]]
_CHAT_AS_TEXT: Final = re.compile(r"""\s*\[?\s*\{\s*["'](?:role|content)["']\s*:""")
_ROLES: Final = ("system", "user", "assistant")


def to_chat(prompt: object) -> Chat:
    """The chat, with the columns that are null in all messages left out.

    Raises:
        RowError: The prompt is empty, no chat, or does not end with a user's message.
    """
    if isinstance(prompt, str) and _CHAT_AS_TEXT.match(prompt):
        prompt = _parsed(prompt)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise RowError(f"prompt: got {prompt!r:.80}; expected text, or a list of messages")
    chat = [_message(message) for message in prompt]
    if chat[-1]["role"] != "user" or not chat[-1]["content"].strip():
        raise RowError("prompt: got a chat that does not end with a user's message with text in it")
    return chat


def _parsed(text: str) -> object:
    """What a chat that is stored as JSON holds; one message alone is a chat, too."""
    try:
        chat = orjson.loads(text)
    except orjson.JSONDecodeError as e:
        raise RowError(f"prompt: got {text!r:.80}, which looks like a chat but is no JSON ({e})") from e
    return [chat] if isinstance(chat, dict) else chat


def problem_of(chat: Chat) -> str:
    """The words of the last message, which is the user's."""
    return str(chat[-1]["content"])


def identity_of(chat: Chat) -> str:
    """Equal for chats that say the same but for spacing and the composition of characters.

    Case counts, and so do superscripts: x² is not x2.
    """
    said = (f"{message['role']}\x00{message['content']}" for message in chat)
    return " ".join(unicodedata.normalize("NFC", "\x01".join(said)).split())


def _message(message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
        raise RowError(f'prompt: got the message {message!r:.80}; expected {{"role": ..., "content": "text"}}')
    if message.get("role") not in _ROLES:
        raise RowError(f"prompt: got the role {message.get('role')!r}; expected one of {', '.join(_ROLES)}")
    return {key: value for key, value in message.items() if value is not None}
