"""Rows of a prompt data set, one JSON object a line, in the format of dapo-math-17k.

Knows the file format; nothing of samples. What a prompt may hold is decided by `prompt_messages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import orjson

from strands_rollout.errors import PromptError


@dataclass(frozen=True, slots=True)
class Row:
    """One problem.

    Attributes:
        prompt: A string, or a chat as a list of messages.
        label: The right answer.
    """

    prompt: str | list[dict[str, Any]]
    label: Any


def shipped_rows() -> Path:
    """The held-out problems that are installed with this package."""
    return Path(str(files("strands_rollout") / "data" / "demo.jsonl"))


def read_rows(path: Path, count: int) -> list[Row]:
    """The first `count` rows of a file; it starts again from the top when it has fewer.

    Raises:
        PromptError: See `load_rows`.
    """
    return list(islice(cycle(load_rows(path)), count))


def load_rows(path: Path, *, prompt_key: str = "prompt", label_key: str = "label") -> list[Row]:
    """All rows of a file, in order; blank lines are none.

    Raises:
        PromptError: The file can't be read, is empty, or a line is not an object with both keys.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise PromptError(f"can't read the data file {path}: {e.strerror}") from e
    keys = (prompt_key, label_key)
    rows = [_row(line, keys, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise PromptError(f"the data file {path} has no rows; expected one JSON object a line")
    return rows


def _row(line: bytes, keys: tuple[str, str], where: str) -> Row:
    prompt_key, label_key = keys
    expected = (
        f'expected a JSON object like {{"{prompt_key}": [{{"role": "user", "content": "..."}}], "{label_key}": "34"}}'
    )
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as e:
        raise PromptError(f"{where}: {e}; {expected}") from e
    if not isinstance(value, dict) or not {*keys} <= value.keys():
        raise PromptError(f"{where}: got {line[:80]!r}; {expected}")
    return Row(value[prompt_key], value[label_key])
