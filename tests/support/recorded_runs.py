"""Folders of training runs, as `strands-rollout train` leaves them, with values that a test gives."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strands_rollout.train.run_folder import StepLog, StepRecord


def step_records(count: int = 3, **values: Any) -> list[StepRecord]:
    """Steps with the same values in each; a function is given the step."""
    return [
        {"step": step, **{name: value(step) if callable(value) else value for name, value in values.items()}}
        for step in range(count)
    ]


def write_run(folder: Path, done: Sequence[StepRecord], *, summary=None, commit: str = "4d1c", **options) -> Path:
    folder.mkdir()
    told = {"options": {"out": str(folder), **options}, "versions": {"torch": "2.9"}, "commit": commit}
    (folder / "options.json").write_text(json.dumps(told))
    with StepLog(folder / "steps.jsonl") as log:
        for record in done:
            log.append(record)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder
