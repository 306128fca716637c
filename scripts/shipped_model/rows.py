"""The rows that the package ships, in the format of dapo-math-17k as slime reads it: a chat prompt and a label.

Knows files. Must not know tokens or models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shipped_model.episodes import answers_of
from shipped_model.problems import Problem


def rows_of(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """One row for each problem."""
    return [
        {"prompt": [{"role": "user", "content": problem.question}], "label": str(answer)}
        for problem, answer in zip(problems, answers_of(problems), strict=True)
    ]


def write_rows(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Writes one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads what `write_rows` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
