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
    """A row can't be used; the message is the reason in the file of rejected rows."""


def to_chat(prompt: object) -> Chat:
    """Return the prompt as messages, without columns that are null.

    Raises:
        RowError: The prompt is empty, no chat, or does not end with a user's message.
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
        raise RowError("prompt: got a chat that does not end with a user's message with text in it")
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns, or dotted paths into a struct.

    `other_labels` are further columns with a label's name, if the label's column was not named.
    """

    prompt: str
    label: str
    other_labels: tuple[str, ...] = ()


def find_columns(features: Mapping[str, Any], prompt: str | None, label: str | None) -> Columns:
    """Return the requested columns, or the first known names among a data set's features, in any case.

    Raises:
        PreparationError: There is none; the message lists the columns that are there.
    """
    names = list(_paths(features))
    prompt = _find(names, "prompt", prompt, _PROMPTS)
    found = _find(names, "label", label, _LABELS)
    others = [name for name in names if name.lower() in _ANSWERS and name != found] if label is None else []
    return Columns(prompt, found, tuple(others))


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


def _find(names: Sequence[str], what: str, asked: str | None, known: Sequence[str]) -> str:
    if asked is not None and asked in names:
        return asked
    lowered = {name.lower(): name for name in reversed(names)}
    found = [lowered[name] for name in known if name in lowered and asked is None]
    if found:
        return found[0]
    wanted = f"one of {', '.join(known)}" if asked is None else f"the column {asked!r}"
    raise PreparationError(
        f"the source has no {what}: got the columns {', '.join(names)}; expected {wanted}. "
        f"Name the right one with --{what}-column (a dot leads into a struct)."
    )


def _paths(features: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the names of all columns, each followed by the dotted names of its fields if it is a struct."""
    for name, feature in features.items():
        yield above + name
        if isinstance(feature, Mapping):
            yield from _paths(feature, f"{above}{name}.")
