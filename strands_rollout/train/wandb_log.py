"""A training run's steps in wandb, set up by the environment alone (WANDB_MODE, WANDB_PROJECT ...).

Knows wandb, which may be absent; must not know what the numbers mean, nor read or write a key.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from strands_rollout.errors import ConfigError
from strands_rollout.train.step_log import finite

_PROJECT: Final = "strands-rollout-train"
_ID_FILE: Final = "wandb_id"
_WITHOUT_KEY: Final = frozenset({"offline", "dryrun", "disabled"})


def check_wandb() -> None:
    """Refuse to log before anything runs.

    Raises:
        ConfigError: wandb is not installed, or would ask for a key.
    """
    if find_spec("wandb") is None:
        raise ConfigError("--wandb needs wandb, which is not installed; pip install 'strands-rollout[wandb]'")
    mode = os.environ.get("WANDB_MODE", "")
    if mode not in _WITHOUT_KEY and not os.environ.get("WANDB_API_KEY"):
        raise ConfigError(
            "--wandb found no WANDB_API_KEY in the environment; set it, or WANDB_MODE=offline to upload later"
        )


class WandbLog:
    """A run in wandb, gone on with where the same folder was logged before; a context manager.

    Only what is given here is logged: no command line, no output, no code, no name of a git remote, as any of these may
    hold a secret.

    Args:
        out: The run's folder; wandb's own files lie in it unless WANDB_DIR is set.
        options: What the run was started with; nothing secret may be among them.

    Raises:
        ConfigError: wandb can't start a run.
    """

    def __init__(self, out: Path, options: Mapping[str, Any]) -> None:
        check_wandb()
        import wandb

        quiet = wandb.Settings(
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                name=os.environ.get("WANDB_NAME", out.name),
                id=_run_id(out),
                resume="allow",
                dir=os.environ.get("WANDB_DIR", str(out)),
                config=dict(options),
                settings=quiet,
            )
        except (wandb.Error, OSError) as e:
            raise ConfigError(f"wandb can't start a run: {e}; mend that, or set WANDB_MODE=offline") from e
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
