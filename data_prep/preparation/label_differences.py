"""Columns that also have a label's name, compared with the one that was taken: 0 and 1 beside the answer are no labels.

Knows values of rows; must not know how columns are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from preparation.errors import RowError
from preparation.labels import normalised


class LabelDifferences:
    """The first difference of each such column."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Any]] = {}

    def look_at(self, column: str, labels: Sequence[object], others: Sequence[object]) -> None:
        """Compare the next rows, until a difference is found."""
        if column in self._found:
            return
        for label, other in zip(labels, others, strict=True):
            one, another = _text(label), _text(other)
            if one and another and one != another:
                self._found[column] = {"column": column, "label": one, "other": another}
                return

    def facts(self) -> list[dict[str, Any]]:
        """For the manifest: each column that differs, with an example."""
        return list(self._found.values())


def _text(label: object) -> str:
    """The normalised label; "" for what is none."""
    try:
        return normalised(label)
    except RowError:
        return ""
