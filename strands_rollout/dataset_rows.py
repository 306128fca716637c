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
        PromptError: The file can't be read, is empty, or a line is not an object with `prompt` and `label`.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise PromptError(f"can't read the data file {path}: {e.strerror}") from e
    rows = [_row(line, f"{path}:{number}") for number, line in enumerate(lines[:count], start=1) if line.strip()]
    if not rows:
        raise PromptError(f"the data file {path} has no rows; expected one JSON object a line")
    return list(islice(cycle(rows), count))


def _row(line: bytes, where: str) -> Row:
    expected = 'expected a JSON object like {"prompt": [{"role": "user", "content": "..."}], "label": "34"}'
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as e:
        raise PromptError(f"{where}: {e}; {expected}") from e
    if not isinstance(value, dict) or not {"prompt", "label"} <= value.keys():
        raise PromptError(f"{where}: got {line[:80]!r}; {expected}")
    return Row(value["prompt"], value["label"])
