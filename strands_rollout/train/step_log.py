"""A training run's steps, one JSON object a line, appended as they end.

Knows the file and that a record has a `step`; must not know what its numbers mean. A line is written whole with one
call, so that a kill leaves at most its beginning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeAlias

from strands_rollout.errors import ConfigError, RolloutError

StepRecord: TypeAlias = dict[str, float | int | str | None]
"""What one step says of itself. None: it was measured and is no finite number; a key that lacks was not measured."""

FILE_NAME: Final = "steps.jsonl"


class StepLog:
    """The file, gone on with where it is there; a context manager.

    Write a step's record before its checkpoint: a run that was killed between the two then repeats the step.

    Args:
        path: Made if it is missing, in a folder that is there.
        first_step: The first step that will be written: 0 for a new run, the checkpoint's for a resumed one. Records
            from it on are dropped, and so is a half-written last line.

    Attributes:
        records: All that the file holds, in order of their steps.

    Raises:
        ConfigError: The file can't be used, is no log of steps, or does not reach to `first_step`.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        self._path = path
        there = read_steps(path) if path.exists() else []
        self.records = [record for record in there if _step_of(record) < first_step]
        reached = _step_of(self.records[-1]) + 1 if self.records else 0
        if reached != first_step:
            raise ConfigError(
                f"{path} ends before step {reached}; expected all steps before {first_step}, where the checkpoint "
                "goes on; put the log back, or choose another --out"
            )
        try:
            _rewrite(path, self.records)
            self._file = path.open("ab", buffering=0)
        except OSError as e:
            raise ConfigError(f"can't write {path}: {e.strerror}; choose another --out") from e

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, record: Mapping[str, float | int | str | None]) -> StepRecord:
        """Write a step; what is no finite number is written as null. Returns the record as written.

        Raises:
            RolloutError: It is not the next step, or can't be written.
        """
        written = finite(record)
        if written.get("step") != len(self.records):
            raise RolloutError(f"got step {written.get('step')}; expected {len(self.records)}, the next one")
        line = _line(written)
        try:
            if self._file.write(line) != len(line):
                raise RolloutError(f"can't write to {self._path}: no room; make some and resume the run")
        except OSError as e:
            raise RolloutError(f"can't write to {self._path}: {e.strerror}; make room and resume the run") from e
        self.records.append(written)
        return written


def read_steps(path: Path) -> list[StepRecord]:
    """The records of a log, which may be growing: a last line without its end is left out.

    Raises:
        ConfigError: The file can't be read, or a line of it is not the next step's record.
    """
    try:
        whole_lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as e:
        raise ConfigError(f"can't read {path}: {e.strerror}; expected the log of a training run") from e
    return list(_records(whole_lines, path))


def finite(record: Mapping[str, float | int | str | None]) -> StepRecord:
    """The record with None for what is no finite number, as JSON has no form for those."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }


def _records(lines: Sequence[bytes], path: Path) -> Iterator[StepRecord]:
    for step, line in enumerate(lines):
        try:
            record = json.loads(line)
        except ValueError as e:
            raise ConfigError(f"{path}:{step + 1} is no JSON ({e}); expected the record of step {step}") from e
        if not isinstance(record, dict) or _step_of(record) != step:
            raise ConfigError(f"{path}:{step + 1} is another thing than the record of step {step}; remove the file")
        if not all(value is None or isinstance(value, int | float | str) for value in record.values()):
            raise ConfigError(f"{path}:{step + 1} holds more than numbers and texts; expected the record of a step")
        yield record


def _step_of(record: Mapping[str, object]) -> int:
    step = record.get("step")
    return step if isinstance(step, int) else -1


def _line(record: StepRecord) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _rewrite(path: Path, records: Sequence[StepRecord]) -> None:
    """Make the file hold these alone, in one move: a kill leaves the old file or the new one."""
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(b"".join(map(_line, records)))
    beside.replace(path)
