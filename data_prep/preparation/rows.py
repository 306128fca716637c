"""What a source's row holds: the prompt as a chat, what tells one problem from another, and the columns of both."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from strands_rollout.errors import RolloutError


class PreparationError(RolloutError):
    """A data set can't be read, or what was read can't be made into a data file."""


class RowError(PreparationError):
    """One row can't be used; its message is the reason that is written beside it."""


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


_PROMPTS: Final = ("prompt", "problem", "question", "messages")
_ANSWERS: Final = ("label", "answer", "final_answer", "ground_truth", "expected_answer", "reward_model.ground_truth")
_LABELS: Final = (*_ANSWERS, "solution")


@dataclass(frozen=True, slots=True)
class Columns:
    """Where prompt and label are, as columns or dotted paths into a struct.

    `other_labels` are further columns with a label's name, where the label's column was not asked for.
    """

    prompt: str
    label: str
    other_labels: tuple[str, ...] = ()


def find_columns(schema: Any, prompt: str | None, label: str | None) -> Columns:  # noqa: ANN401 - a pyarrow.Schema
    """The columns asked for, or the first known names that are there, in any case.

    Raises:
        PreparationError: There is none; the message lists the columns that are.
    """
    names = _paths(schema)
    said, found = _find(names, "prompt", prompt, _PROMPTS), _find(names, "label", label, _LABELS)
    others = [name for name in names if name.lower() in _ANSWERS and name != found] if label is None else []
    return Columns(said, found, tuple(others))


def values_of(batch: Mapping[str, list[Any]], path: str) -> list[Any]:
    """The values of a column, or below it."""
    name, fields = _split(batch, path)
    values = batch[name]
    for field in fields:
        values = [None if value is None else value[field] for value in values]
    return values


def value_of(row: Mapping[str, Any], path: str) -> Any:  # noqa: ANN401 - whatever the source holds
    """The same value of one row."""
    return values_of({name: [value] for name, value in row.items()}, path)[0]


def column_of(names: Container[str], path: str) -> str:
    """The column that a path begins with, of those with these names."""
    return _split(names, path)[0]


def _split(names: Container[str], path: str) -> tuple[str, list[str]]:
    """A column and the fields below it; a column may have a dot in its name."""
    name, *fields = [path] if path in names else path.split(".")
    return name, fields


def _find(names: Sequence[str], what: str, asked: str | None, known: Sequence[str]) -> str:
    if asked is not None:
        if asked in names:
            return asked
        wanted = f"the column {asked!r}"
    else:
        lowered = {name.lower(): name for name in reversed(names)}
        for name in known:
            if name in lowered:
                return lowered[name]
        wanted = f"one of {', '.join(known)}"
    raise PreparationError(
        f"the source has no {what}: got the columns {', '.join(names)}; expected {wanted}. "
        f"Name the right one with --{what}-column (a dot leads into a struct)."
    )


def _paths(fields: Iterable[Any], above: str = "") -> list[str]:
    """Names of all columns, each followed by the dotted names of its fields where it is a struct."""
    import pyarrow.types as kinds

    paths = []
    for field in fields:
        paths.append(above + field.name)
        if kinds.is_struct(field.type):
            paths += _paths(map(field.type.field, range(field.type.num_fields)), f"{above}{field.name}.")
    return paths
