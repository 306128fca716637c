"""A row of a source: the columns of prompt and label, and the prompt as a chat."""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from strands_rollout.errors import RolloutError

Chat = list[dict[str, Any]]
_CHAT_AS_TEXT: Final = re.compile(r"""\s*\[?\s*\{\s*["'](?:role|content)["']\s*:""")
_ROLES: Final = ("system", "user", "assistant")
_PROMPTS: Final = ("prompt", "problem", "question", "messages")
_ANSWERS: Final = ("label", "answer", "final_answer", "ground_truth", "expected_answer", "reward_model.ground_truth")
_LABELS: Final = (*_ANSWERS, "solution")


class PreparationError(RolloutError):
    """A data set can't be read, or can't be converted to a data file."""


class RowError(PreparationError):
    """A row can't be used; the file of rejected rows has the message as the reason."""


def to_chat(prompt: object) -> Chat:
    """Return a prompt, which is text or a chat, as messages without the keys whose value is null.

    Raises:
        RowError: The prompt is empty, is neither a text nor a chat, or does not end with a user's message.
    """
    if isinstance(prompt, str) and _CHAT_AS_TEXT.match(prompt):
        try:
            prompt = orjson.loads(prompt)
        except orjson.JSONDecodeError as e:
            raise RowError(f"prompt: got {prompt!r:.80}, which looks like a chat but is not valid JSON ({e})") from e
        prompt = [prompt] if isinstance(prompt, dict) else prompt
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise RowError(f"prompt: got {prompt!r:.80}; expected text, or a list of messages")
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise RowError(f'prompt: got the message {message!r:.80}; expected {{"role": ..., "content": "text"}}')
        if message.get("role") not in _ROLES:
            raise RowError(f"prompt: got the role {message.get('role')!r}; expected one of {', '.join(_ROLES)}")
    if prompt[-1]["role"] != "user" or not prompt[-1]["content"].strip():
        raise RowError(f"prompt: got {prompt[-1]!r:.80} as the last message; expected a user's message with text")
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a source, as names or dotted paths into a struct.

    Attributes:
        prompt: The column of the prompt.
        label: The column of the label.
        other_labels: Other columns with a known name for answers; empty if the user named the label's column.
    """

    prompt: str
    label: str
    other_labels: tuple[str, ...] = ()


def find_columns(features: Mapping[str, Any], prompt: str | None, label: str | None) -> Columns:
    """Return the requested columns; if a column is None, find it by its known names, in upper or lower case.

    Raises:
        PreparationError: There is no such column; the message lists the existing columns.
    """
    names = list(_paths(features))
    prompt = _find(names, "prompt", prompt, _PROMPTS)
    label_column = _find(names, "label", label, _LABELS)
    others = [name for name in names if name.lower() in _ANSWERS and name != label_column] if label is None else []
    return Columns(prompt, label_column, tuple(others))


def value_of(row: Mapping[str, Any], path: str) -> Any:  # noqa: ANN401 - any value of the source
    """Return the value of a column, or of a field in it."""
    column = column_of(row, path)
    value = row[column]
    for name in path.removeprefix(column).split(".")[1:]:
        value = None if value is None else value[name]
    return value


def column_of(names: Container[str], path: str) -> str:
    """Return the column at the start of a path; a column's name may contain a dot."""
    return path if path in names else path.partition(".")[0]


def _find(names: Sequence[str], role: str, requested: str | None, known: Sequence[str]) -> str:
    if requested is not None and requested in names:
        return requested
    by_lower_name = {name.lower(): name for name in reversed(names)}
    found = [by_lower_name[name] for name in known if name in by_lower_name and requested is None]
    if found:
        return found[0]
    expected = f"one of {', '.join(known)}" if requested is None else f"the column {requested!r}"
    raise PreparationError(
        f"the source has no {role}: got the columns {', '.join(names)}; expected {expected}. "
        f"Name the right column with --{role}-column (a.b is field b of column a)"
    )


def _paths(features: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, feature in features.items():
        yield prefix + name
        if isinstance(feature, Mapping):
            yield from _paths(feature, f"{prefix}{name}.")
