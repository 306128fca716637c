"""Files of rows, one JSON object a line. Must not know what a row says."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_rows(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Writes one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads what `write_rows` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
