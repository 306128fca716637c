"""What a preparation in this process leaves, as the tests look at it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Result:
    """A prepared file.

    Attributes:
        manifest: As written beside it.
        rows: Its lines.
        rejected: Those of the file of rejected rows.
        done_before: Whether the file was there.
    """

    manifest: dict[str, Any]
    rows: list[dict[str, Any]]
    rejected: list[dict[str, Any]]
    done_before: bool

    @property
    def problems(self) -> list[str]:
        return [row["prompt"][-1]["content"] for row in self.rows]

    @property
    def labels(self) -> list[str]:
        return [row["label"] for row in self.rows]


Prepare = Callable[..., Result]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
