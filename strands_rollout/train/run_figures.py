"""What one training run amounts to, in a few figures, and their spread over seeds. Pure.

Knows the names in a step's record and in a run's summary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Final

from strands_rollout.train.recorded_run import RecordedRun

GOAL: Final = 0.95
_TIMES: Final = ("rollout_s", "train_s", "sync_s", "eval_s")


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure of the runs that differ in their seed alone.

    Attributes:
        mean: None unless each run has the figure: the mean of the rest would flatter.
        std: The sample's standard deviation; None for less than two runs.
        by_seed: Each run's, None where it has none.
    """

    mean: float | None
    std: float | None
    by_seed: list[float | None]


def spread_of(by_seed: Sequence[float | None]) -> Spread:
    """The spread of one figure."""
    known = [value for value in by_seed if value is not None]
    if not known or len(known) < len(by_seed):
        return Spread(None, None, list(by_seed))
    return Spread(math.fsum(known) / len(known), stdev(known) if len(known) > 1 else None, list(by_seed))


def _values(run: RecordedRun, key: str) -> list[float]:
    """The finite values that a run's steps have of a key."""
    return [float(value) for record in run.steps if isinstance(value := record.get(key), int | float)]


def _accuracies(run: RecordedRun) -> list[tuple[int, float]]:
    """Updates done, and the accuracy then, where it was measured."""
    return [
        (int(record["step"] or 0), float(value))
        for record in run.points
        if isinstance(value := record.get("held_out_accuracy"), int | float)
    ]


def _accuracy_start(run: RecordedRun) -> float | None:
    return next((accuracy for updates, accuracy in _accuracies(run) if updates == 0), None)


def _accuracy_end(run: RecordedRun) -> float | None:
    return next((accuracy for _, accuracy in reversed(_accuracies(run))), None)


def _accuracy_best(run: RecordedRun) -> float | None:
    return max((accuracy for _, accuracy in _accuracies(run)), default=None)


def _step_at_goal(run: RecordedRun) -> float | None:
    return next((updates for updates, accuracy in _accuracies(run) if accuracy >= GOAL), None)


def _gap_at_start(run: RecordedRun) -> float | None:
    gap = run.steps[0].get("logprob_gap_max")
    return float(gap) if isinstance(gap, int | float) else None


def _minutes(run: RecordedRun) -> float | None:
    seconds = [second for key in _TIMES for second in _values(run, key)]
    return math.fsum(seconds) / 60 if seconds else None


def _over_steps(key: str, combine: Callable[[Sequence[float]], float]) -> Callable[[RecordedRun], float | None]:
    def figure(run: RecordedRun) -> float | None:
        values = _values(run, key)
        return combine(values) if values else None

    return figure


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return math.fsum(known) / len(known)


FIGURES: Final[Mapping[str, Callable[[RecordedRun], float | None]]] = {
    "accuracy_start": _accuracy_start,
    "accuracy_end": _accuracy_end,
    "accuracy_best": _accuracy_best,
    "step_at_goal": _step_at_goal,
    "logprob_gap_max_step0": _gap_at_start,
    "logprob_gap_max": _over_steps("logprob_gap_max", max),
    "kl_k3_mean": _over_steps("kl_k3", _mean),
    "kl_k3_max": _over_steps("kl_k3", max),
    "drift_tokens_mean": _over_steps("drift_tokens", _mean),
    "drift_episodes_mean": _over_steps("drift_episodes", _mean),
    "ratio_min": _over_steps("ratio_min", min),
    "ratio_max": _over_steps("ratio_max", max),
    "minutes": _minutes,
}
"""By name; None where a run has nothing to tell it from.

Accuracies are of held-out problems, the end being the last that was measured. `step_at_goal` is the number of updates
after which it was first measured to have `GOAL`. Means are over steps. `minutes` are by the clock,
without the start and the last evaluation.
"""
