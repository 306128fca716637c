"""Folders of training runs, as `strands-rollout train` writes them, with given values."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strands_rollout.train.run_folder import StepLog, StepRecord


def step_records(count: int = 3, **values: Any) -> list[StepRecord]:
    """Return records of `count` steps with the same values; a value may be a function of the step."""
    return [
        {"step": step, **{name: value(step) if callable(value) else value for name, value in values.items()}}
        for step in range(count)
    ]


def write_run(folder: Path, done: Sequence[StepRecord], *, summary=None, commit: str = "4d1c", **options) -> Path:
    """Write the folder of a run, finished if there is a `summary`, and return it."""
    folder.mkdir()
    contents = {"options": {"out": str(folder), **options}, "versions": {"torch": "2.9"}, "commit": commit}
    (folder / "options.json").write_text(json.dumps(contents))
    with StepLog(folder / "steps.jsonl") as log:
        for record in done:
            log.append(record)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder
