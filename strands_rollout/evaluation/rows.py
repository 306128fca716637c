"""Rows of a prompt data set, one JSON object a line, in the format of dapo-math-17k."""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import orjson

from strands_rollout.errors import PromptError
from strands_rollout.files import open_regular
from strands_rollout.samples import Sample


@dataclass(frozen=True, slots=True)
class Row:
    """One problem.

    Its prompt is a string, or a chat as a list of messages; `strands_rollout_settings` in its metadata are its
    episode's; `line` is where it is in its file, from 1, 0 where it is in none.
    """

    prompt: str | list[dict[str, Any]]
    label: Any
    line: int = field(default=0, compare=False)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def sample(self, **more: Any) -> Sample:  # noqa: ANN401 - further fields of a sample
        """A new sample of it, which shares nothing with others."""
        return Sample(
            prompt=copy.deepcopy(self.prompt), label=self.label, metadata=copy.deepcopy(dict(self.metadata)), **more
        )


def shipped_rows() -> Path:
    """The held-out problems that are installed with this package."""
    return Path(str(files("strands_rollout") / "data" / "demo.jsonl"))


def read_rows(path: Path, count: int) -> list[Row]:
    """The first `count` rows of a file; it starts again from the top when it has fewer."""
    return list(islice(cycle(load_rows(path)), count))


def load_rows(path: Path, *, prompt_key: str = "prompt", label_key: str = "label") -> list[Row]:
    """All rows of a file, in order; blank lines are none. A row's `metadata` is taken along, as slime does.

    Raises:
        PromptError: The file can't be read, is empty, or a line is not an object with both keys, or has metadata that
            is none.
    """
    rows = []
    for _, row in each_row(path, prompt_key=prompt_key, label_key=label_key):
        if isinstance(row, PromptError):
            raise row
        rows.append(row)
    return rows


def each_row(
    path: Path, *, prompt_key: str = "prompt", label_key: str = "label"
) -> Iterator[tuple[int, Row | PromptError]]:
    """The number of each line, from 1, and its row, or what is wrong with it; blank lines are left out.

    Raises:
        PromptError: The file can't be read, or is empty.
    """
    is_empty = True
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    is_empty = False
                    yield number, _row_or_error(line.rstrip(b"\r\n"), (prompt_key, label_key), path, number)
    except OSError as e:
        raise PromptError(f"can't read the data file {path}: {e.strerror}") from e
    if is_empty:
        raise PromptError(f"the data file {path} has no rows; expected one JSON object a line")


def _row_or_error(line: bytes, keys: tuple[str, str], path: Path, number: int) -> Row | PromptError:
    try:
        return _row(line, keys, path, number)
    except PromptError as e:
        return e


def _row(line: bytes, keys: tuple[str, str], path: Path, number: int) -> Row:
    where, (prompt_key, label_key) = f"{path}:{number}", keys
    expected = (
        f'expected a JSON object like {{"{prompt_key}": [{{"role": "user", "content": "..."}}], "{label_key}": "34"}}'
    )
    try:
        # as slime reads it: other parsers make a float of an integer above 64 bits
        value = json.loads(line.decode())
        if rb"\u" in line:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as e:
        raise PromptError(f"{where}: {e}; {expected}") from e
    if not isinstance(value, dict) or not {*keys} <= value.keys():
        raise PromptError(f"{where}: got {line[:80]!r}; {expected}")
    metadata = value.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise PromptError(f"{where}: got metadata={metadata!r:.80}; expected an object")
    return Row(value[prompt_key], value[label_key], number, metadata)


def json_line(value: Mapping[str, Any]) -> bytes:
    """An object as a line of such a file; what JSON has no form for becomes a list or a text."""
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
    except TypeError:  # an integer above 64 bits, or half a surrogate pair
        plain = json.dumps(value, default=lambda one: one.tolist() if hasattr(one, "tolist") else str(one))
        return plain.encode() + b"\n"
