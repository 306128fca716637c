"""A training run's steps in wandb, set up by the environment alone (WANDB_MODE, WANDB_PROJECT ...).

Knows wandb, which may be absent; must not know what the numbers mean, nor read or write a key.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from strands_rollout.train.step_log import finite
from strands_rollout.wandb_run import check_wandb, start_run

_PROJECT: Final = "strands-rollout-train"
_ID_FILE: Final = "wandb_id"


class WandbLog:
    """A run in wandb, gone on with where the same folder was logged before; a context manager.

    Only what is given here is logged; see `start_run`.

    Args:
        out: The run's folder; wandb's own files lie in it unless WANDB_DIR is set.
        options: What the run was started with; nothing secret may be among them.

    Raises:
        ConfigError: wandb can't start a run.
    """

    def __init__(self, out: Path, options: Mapping[str, Any]) -> None:
        check_wandb()
        self._run = start_run(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=os.environ.get("WANDB_NAME", out.name),
            id=_run_id(out),
            resume="allow",
            dir=os.environ.get("WANDB_DIR", str(out)),
            config=dict(options),
        )
        # a resumed run does some steps again, which wandb's own step, a counter, would refuse
        self._run.define_metric("*", step_metric="step")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.finish(exit_code=0 if kind is None else 1)

    def append(self, record: Mapping[str, float | int | str | None]) -> None:
        """Log a step; what is no finite number is left out."""
        self._run.log({name: value for name, value in finite(record).items() if value is not None})

    def sum_up(self, summary: Mapping[str, Any]) -> None:
        """Log the run's result."""
        self._run.summary.update(dict(summary))


def _run_id(out: Path) -> str:
    """The id of this folder's run; a new one the first time."""
    file = out / _ID_FILE
    if file.exists():
        return file.read_text().strip()
    made = secrets.token_hex(4)
    file.write_text(made + "\n")
    return made
