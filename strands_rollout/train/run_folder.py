"""The folder of a training run: what was asked, the log of its steps, its checkpoints, and the weights for engines.

Knows files. A folder belongs to one run: with other options it is refused, so that steps are never mixed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strands_rollout.errors import ConfigError
from strands_rollout.json_file import differences, read_json, write_json
from strands_rollout.locked_file import open_alone
from strands_rollout.train.checkpoint import Checkpoints
from strands_rollout.train.recorded_run import OPTIONS_FILE, SUMMARY_FILE
from strands_rollout.train.step_log import FILE_NAME, StepLog
from strands_rollout.train.train_options import TrainOptions


@dataclass(frozen=True, slots=True)
class TrainFolder:
    """A run's folder, by name; `claim` makes it.

    Attributes:
        path: Where.
    """

    path: Path

    @property
    def weights(self) -> Path:
        """The policy as a model folder."""
        return self.path.absolute() / "weights"

    @property
    def summary(self) -> Path:
        """The run's result."""
        return self.path / SUMMARY_FILE

    @property
    def curves(self) -> Path:
        """The run's plot."""
        return self.path / "curves.png"

    @property
    def checkpoints(self) -> Checkpoints:
        """From which the run goes on."""
        return Checkpoints(self.path / "checkpoints")

    def log(self, first_step: int) -> StepLog:
        """The log of steps; see `StepLog`."""
        return StepLog(self.path / FILE_NAME, first_step=first_step)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The folder, made if it is not there, which no other process can hold until the block ends.

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
        """Make the folder, which is held, the run's own; one without a checkpoint starts afresh.

        Args:
            options: What is asked.
            made_by: `commit` and `versions`.

        Raises:
            ConfigError: It is another run's; the message names what differs.
        """
        asked = self.path / OPTIONS_FILE
        if self.checkpoints.newest() is not None:
            told = read_json(asked).get("options")
            there = {name: value for name, value in (told or {}).items() if name in options.identity()}
            if differing := differences(there, options.identity()):
                raise ConfigError(
                    f"{self.path} holds another run: {differing}. Run it with what it was begun with, or choose "
                    "another --out"
                )
        write_json(asked, {"options": options.to_json(), **made_by})
        self.summary.unlink(missing_ok=True)
