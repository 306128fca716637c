"""The state of a training run between two steps, from which it goes on after a kill.

Knows files. A checkpoint is there whole or not at all; the one before is removed when the next is there.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from strands_rollout.dataset_rows import json_line
from strands_rollout.errors import ConfigError
from strands_rollout.sample_type import Sample
from strands_rollout.train.rollouts import Group

_NAME: Final = re.compile(r"step-(\d{6})")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is.

    Attributes:
        step: The next step.
        next_position: The next prompt that no group has.
        waiting: Groups that an abort cut off.
        facts: What the summary tells of the steps before, by name.
    """

    step: int
    next_position: int
    waiting: Sequence[Group] = ()
    facts: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def newest(self) -> Path | None:
        """The folder of the newest; None where there is none."""
        names = [path for path in self._folder.glob("step-*") if _NAME.fullmatch(path.name)]
        return max(names, key=lambda path: path.name, default=None)

    def begin(self, step: int) -> Path:
        """An empty folder for the policy's part of the next one; `finish` it."""
        folder = self._folder / f"step-{step:06d}.part"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def finish(self, folder: Path, progress: Progress) -> None:
        """Write the run's part, make the checkpoint count, and remove the older ones."""
        value = {
            "step": progress.step,
            "next_position": progress.next_position,
            "facts": progress.facts,
            "waiting": [
                {
                    "position": group.position,
                    "episodes": {at: [one.to_dict() for one in samples] for at, samples in group.episodes.items()},
                }
                for group in progress.waiting
            ],
        }
        (folder / "progress.json").write_bytes(json_line(json.loads(json.dumps(value, default=str))))
        final = folder.with_suffix("")
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
        for path in self._folder.glob("step-*"):
            if path != final:
                shutil.rmtree(path)

    @staticmethod
    def read(folder: Path) -> Progress:
        """The run's part of a checkpoint.

        Raises:
            ConfigError: It can't be read.
        """
        path = folder / "progress.json"
        try:
            value = json.loads(path.read_bytes())
            waiting = [
                Group(
                    one["position"],
                    {int(at): list(map(Sample.from_dict, samples)) for at, samples in one["episodes"].items()},
                )
                for one in value["waiting"]
            ]
            return Progress(value["step"], value["next_position"], waiting, value["facts"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ConfigError(f"can't go on from {path}: {e!r}; start afresh in another folder with --out") from e
