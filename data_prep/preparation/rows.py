"""Which columns of a source hold the prompt and the label, and their values.

Knows names and values; must not know what a prompt or a label means.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from preparation.errors import PreparationError

_PROMPTS: Final = ("prompt", "problem", "question", "messages")
_ANSWERS: Final = (
    *("label", "answer", "final_answer", "ground_truth", "expected_answer"),
    "reward_model.ground_truth",
)
_LABELS: Final = (*_ANSWERS, "solution")


@dataclass(frozen=True, slots=True)
class Columns:
    """Where prompt and label are.

    Attributes:
        prompt: Column, or a dotted path into a struct.
        label: Likewise.
        other_labels: Further columns with a label's name, where the label's column was not asked for.
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


def _paths(schema: Any) -> list[str]:  # noqa: ANN401 - a pyarrow.Schema
    """Names of all columns, each followed by the dotted names of its fields where it is a struct."""
    return [path for field in schema for path in _paths_below(field, "")]


def _paths_below(field: Any, above: str) -> list[str]:  # noqa: ANN401 - a pyarrow.Field
    import pyarrow.types as kinds

    paths = [above + field.name]
    if kinds.is_struct(field.type):
        for position in range(field.type.num_fields):
            paths += _paths_below(field.type.field(position), f"{paths[0]}.")
    return paths
