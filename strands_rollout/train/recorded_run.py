"""A training run as its folder tells of it. Knows the folder's files; must not know what the numbers mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strands_rollout.errors import ConfigError
from strands_rollout.json_file import read_json
from strands_rollout.train.step_log import FILE_NAME, StepRecord, read_steps

OPTIONS_FILE: Final = "options.json"
SUMMARY_FILE: Final = "summary.json"
_EXPECTED: Final = "expected the folder of a training run"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What is known of a run, which may be running still.

    Attributes:
        folder: Where it was read.
        options: What it was started with, by name.
        made_by: The commit and the versions that it ran on, by name.
        steps: Its records.
        summary: Its result; None until it is finished.
    """

    folder: Path
    options: Mapping[str, Any]
    made_by: Mapping[str, Any]
    steps: list[StepRecord]
    summary: Mapping[str, Any] | None

    @property
    def seed(self) -> object:
        """The seed that it was started with."""
        return self.options.get("seed")

    @property
    def points(self) -> list[StepRecord]:
        """Its records, and its end."""
        return with_end(self.steps, self.summary)


def read_run(folder: Path) -> RecordedRun:
    """Read `options.json` (`options`, `versions`, `commit`), `steps.jsonl` and, where it is there, `summary.json`.

    Raises:
        ConfigError: A file is missing or holds something else, or no step is done yet.
    """
    told = read_json(folder / OPTIONS_FILE, advice=_EXPECTED)
    options = told.get("options")
    if not isinstance(options, dict):
        raise ConfigError(f"{folder / OPTIONS_FILE} has no options; expected the folder of a training run")
    steps = read_steps(folder / FILE_NAME)
    if not steps:
        raise ConfigError(f"{folder / FILE_NAME} is empty; expected a run with a step that is done; wait for it")
    versions = told.get("versions")
    made_by = {"commit": told.get("commit"), **(versions if isinstance(versions, dict) else {})}
    summary = folder / SUMMARY_FILE
    return RecordedRun(
        folder, options, made_by, steps, read_json(summary, advice=_EXPECTED) if summary.exists() else None
    )


def with_end(steps: Sequence[StepRecord], summary: Mapping[str, Any] | None) -> list[StepRecord]:
    """The records, and after the last one the accuracy that the last weights have: a record has that of its first.

    Args:
        steps: Of a run.
        summary: Its `accuracy_end` counts; None for a run that is not finished.
    """
    end = (summary or {}).get("accuracy_end")
    return [*steps, {"step": len(steps), "held_out_accuracy": end}] if isinstance(end, int | float) else list(steps)
