"""Where a step's metrics go: one log line, wandb, and slime's TensorBoard.

Knows wandb and slime's logging by name; both may be absent. Must not know what the metrics mean.
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

logger = logging.getLogger(__name__)

_SLIME_METRICS: Final = "slime.observability.metric_utils"
_SLIME_LOGGING: Final = "slime.observability.logging_utils"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under column names; a cell is text, a number or None."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | int | float | None]]


@dataclass(slots=True)
class StepMetrics:
    """What one step logs.

    Attributes:
        rollout_id: slime's number of the rollout.
        step_key: The metric that slime's charts have as their x-axis.
        numbers: By full name.
        tables: By full name.
    """

    rollout_id: int
    step_key: str
    numbers: dict[str, float] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)


def step_of(args: Any, rollout_id: int) -> int:  # noqa: ANN401 - slime's Namespace
    """The step under which slime logs this rollout; the rollout's own number where slime is absent."""
    compute = getattr(sys.modules.get(_SLIME_METRICS), "compute_rollout_step", None)
    return rollout_id if compute is None else int(compute(args, rollout_id))


def log_line(metrics: StepMetrics, step: int) -> None:
    """One INFO line of key=value pairs."""
    pairs = " ".join(f"{name}={value:.4g}" for name, value in metrics.numbers.items())
    logger.info("agent metrics rollout_id=%s %s=%s %s", metrics.rollout_id, metrics.step_key, step, pairs)


def log_to_wandb(args: Any, metrics: StepMetrics, step: int) -> None:  # noqa: ANN401
    """Numbers and tables in one call, as slime logs: the step is a metric, wandb's own step is left alone.

    Nothing happens unless `args.use_wandb` is set and this process has a run.
    """
    if not getattr(args, "use_wandb", False):
        return
    import wandb

    if wandb.run is None:
        return
    tables = {
        name: wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        for name, table in metrics.tables.items()
    }
    wandb.log({**metrics.numbers, **tables, metrics.step_key: step})


def log_to_tensorboard(args: Any, metrics: StepMetrics, step: int) -> None:  # noqa: ANN401
    """The numbers, through slime's own logging, which holds the writer; nothing where slime is absent."""
    log = getattr(sys.modules.get(_SLIME_LOGGING), "log", None)
    if log is None or not getattr(args, "use_tensorboard", False):
        return
    # wandb has had the numbers, together with the tables
    without_wandb = Namespace(**{**vars(args), "use_wandb": False})
    log(without_wandb, {**metrics.numbers, metrics.step_key: step}, metrics.step_key)
