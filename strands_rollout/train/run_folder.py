"""The folder of a training run: what was asked, the log of its steps, its checkpoints, and the weights for engines.

A folder belongs to one run: with other options it is refused, so that steps are never mixed. A line of the log is
written whole with one call, so that a kill leaves at most its beginning. A checkpoint is there whole or not at all; the
one before is removed when the next is there.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.evaluation.rows import json_line
from strands_rollout.files import differences, open_alone, read_json, write_json
from strands_rollout.samples import Sample
from strands_rollout.train.options import TrainOptions
from strands_rollout.train.rollouts import Group

StepRecord: TypeAlias = dict[str, float | int | str | None]
"""The figures of one step. None: it was measured and is no finite number; a missing key was not measured."""

FILE_NAME: Final = "steps.jsonl"
OPTIONS_FILE: Final = "options.json"
SUMMARY_FILE: Final = "summary.json"
POLICY_FILE: Final = "policy.pt"
_CHECKPOINT: Final = re.compile(r"step-\d{6}")


class StepLog:
    """A run's steps, one JSON object a line, appended as they end; a context manager.

    Write a step's record before its checkpoint: a run that was killed between the two then repeats the step. Records
    from `first_step` on, the first that will be written, are dropped, and so is a half-written last line; `records` are
    all that the file holds.

    Raises:
        ConfigError: The file can't be used, is no log of steps, or does not reach to `first_step`.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        self._path = path
        there = read_steps(path) if path.exists() else []
        self.records = there[:first_step]
        if len(self.records) != first_step:
            raise ConfigError(
                f"{path} ends before step {len(self.records)}; expected all steps before {first_step}, where the "
                "checkpoint resumes; put the log back, or choose another --out"
            )
        try:
            # rewritten in one move: a kill leaves the old file or the new one
            beside = path.with_name(path.name + ".new")
            beside.write_bytes(b"".join(map(_line, self.records)))
            beside.replace(path)
            self._file = path.open("ab", buffering=0)
        except OSError as e:
            raise ConfigError(f"can't write {path}: {e.strerror}; choose another --out") from e

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
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
    records = []
    for step, line in enumerate(whole_lines):
        try:
            record = json.loads(line)
        except ValueError as e:
            raise ConfigError(f"{path}:{step + 1} is no JSON ({e}); expected the record of step {step}") from e
        if not isinstance(record, dict) or record.get("step") != step:
            raise ConfigError(f"{path}:{step + 1} is not the record of step {step}; remove the file")
        if not all(value is None or isinstance(value, int | float | str) for value in record.values()):
            raise ConfigError(f"{path}:{step + 1} holds more than numbers and texts; expected the record of a step")
        records.append(record)
    return records


def finite(record: Mapping[str, float | int | str | None]) -> StepRecord:
    """The record with None for what is no finite number, as JSON has no form for those."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }


def with_end(steps: Sequence[StepRecord], summary: Mapping[str, Any] | None) -> list[StepRecord]:
    """The records of a run, and after the last one the accuracy of the last weights: a record has that of its first.

    `summary` is None for a run that is not finished.
    """
    end = (summary or {}).get("accuracy_end")
    return [*steps, {"step": len(steps), "held_out_accuracy": end}] if isinstance(end, int | float) else list(steps)


def _line(record: StepRecord) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run is: the next step, the first prompt without a group, and the groups that an abort interrupted.

    `facts` are what the summary will report of the steps before, by name.
    """

    step: int
    next_position: int
    waiting: Sequence[Group] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """As a line of JSON; what metadata holds beyond JSON becomes text."""
        waiting = [
            {
                "position": group.position,
                "episodes": {at: [sample.to_dict() for sample in own] for at, own in group.episodes.items()},
            }
            for group in self.waiting
        ]
        value = {"step": self.step, "next_position": self.next_position, "facts": self.facts, "waiting": waiting}
        return json_line(json.loads(json.dumps(value, default=str)))

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """The run's part of a checkpoint.

        Raises:
            ConfigError: It can't be read.
        """
        path = checkpoint / "progress.json"
        try:
            value = json.loads(path.read_bytes())
            waiting = [
                Group(
                    group["position"],
                    {int(at): list(map(Sample.from_dict, own)) for at, own in group["episodes"].items()},
                )
                for group in value["waiting"]
            ]
            return cls(value["step"], value["next_position"], waiting, value["facts"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ConfigError(f"can't resume from {path}: {e!r}; start afresh in another folder with --out") from e


class TrainFolder:
    """A run's folder; `held` makes it, `claim` makes it the run's own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights = path.absolute() / "weights"
        self.steps = path / FILE_NAME
        self.summary = path / SUMMARY_FILE
        self.curves = path / "curves.png"
        self.samples = path / "samples"
        self._checkpoints = path / "checkpoints"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder if it is not there, and keep other processes out of it until the block ends.

        Raises:
            ConfigError: Another process holds it, or it can't be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"can't make {self.path}: {e.strerror}; choose another folder with --out") from e
        lock = open_alone(self.path / "lock")
        try:
            yield
        finally:
            os.close(lock)

    def claim(self, options: TrainOptions, made_by: Mapping[str, Any]) -> None:
        """Record what is asked of the run; without a checkpoint it starts afresh.

        Raises:
            ConfigError: The folder is another run's; the message names what differs.
        """
        asked = self.path / OPTIONS_FILE
        if self.newest_checkpoint() is not None:
            recorded = read_json(asked).get("options") or {}
            there = {name: value for name, value in recorded.items() if name in options.identity()}
            if differing := differences(there, options.identity()):
                raise ConfigError(
                    f"{self.path} holds another run: {differing}. Run it with what it was begun with, or choose "
                    "another --out"
                )
        write_json(asked, {"options": options.to_json(), **made_by})
        self.summary.unlink(missing_ok=True)

    def newest_checkpoint(self) -> Path | None:
        """The folder of the newest checkpoint; None where there is none."""
        found = [path for path in self._checkpoints.glob("step-*") if _CHECKPOINT.fullmatch(path.name)]
        return max(found, default=None)

    def save_checkpoint(self, state: RunState, save_policy: Callable[[Path], None]) -> None:
        """Write a checkpoint, and then remove the older ones; `save_policy` writes the file it is given."""
        final = self._checkpoints / f"step-{state.step:06d}"
        part = final.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        save_policy(part / POLICY_FILE)
        (part / "progress.json").write_bytes(state.to_json())
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        for path in self._checkpoints.glob("step-*"):
            if path != final:
                shutil.rmtree(path)
