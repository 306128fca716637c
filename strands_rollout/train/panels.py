"""What the curves of training show: one panel each, and how seeds make one line. Pure.

Knows the names in a step's record; must not know how anything is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strands_rollout.train.step_log import StepRecord

_LOG_FROM_RATIO: Final = 100.0


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture of the page.

    Attributes:
        title: Above it.
        keys: Of a step's record, each a line, and how it is dashed, in matplotlib's words.
        can_be_log: Whether its axis is logarithmic where the values span more than two orders of magnitude.
        unit: Of its values.
        is_shown_at_zero: Whether it is shown where all values are 0.
    """

    title: str
    keys: Mapping[str, str]
    can_be_log: bool = False
    unit: str = ""
    is_shown_at_zero: bool = True

    def lines(self, runs: Sequence[Sequence[StepRecord]]) -> list[tuple[str, Curve]]:
        """The dashes and the curve of each key that has a value."""
        curves = [(dashes, curve_of(key, runs)) for key, dashes in self.keys.items()]
        return [(dashes, curve) for dashes, curve in curves if self._shows(curve)]

    def _shows(self, curve: Curve) -> bool:
        drawn = [value for value in curve.mean if math.isfinite(value)]
        return bool(drawn) and (self.is_shown_at_zero or any(drawn))


@dataclass(frozen=True, slots=True)
class Curve:
    """One line with its band, over the steps that every run measured; NaN where a run's value is no finite number.

    Attributes:
        steps: From 0.
        mean: Over the runs.
        low: The least run's.
        high: The greatest run's.
    """

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


PANELS: Final = (
    Panel("reward", {"reward": "-"}),
    Panel("accuracy, held-out problems", {"held_out_accuracy": "-"}),
    Panel("response length", {"response_length": "-"}, unit="tokens"),
    Panel("tool calls of an episode", {"tool_calls": "-"}),
    Panel("KL, trainer from rollout (k3)", {"kl_k3": "-"}, can_be_log=True),
    Panel("clipped tokens", {"clip_fraction": "-"}, unit="share"),
    Panel(
        "importance ratio; dashed: greatest, least",
        {"ratio_mean": "-", "ratio_max": "--", "ratio_min": "--"},
        can_be_log=True,
    ),
    Panel("entropy", {"entropy": "-"}, unit="nats"),
    Panel("drifted tokens", {"drift_tokens": "-"}, unit="share"),
    Panel("stale tokens", {"stale_tokens": "-"}, unit="share", is_shown_at_zero=False),
)


def curve_of(key: str, runs: Sequence[Sequence[StepRecord]]) -> Curve:
    """One value of all runs by step.

    A mean over the runs that are left would flatter those that ended early, so a step counts that all have.

    Args:
        key: Of a step's record.
        runs: The steps of each.
    """
    by_run = [dict(_values(key, steps)) for steps in runs]
    shared = sorted(set.intersection(*map(set, by_run))) if by_run else []
    columns = [[values[step] for values in by_run] for step in shared]
    whole = [column if all(map(math.isfinite, column)) else [math.nan] for column in columns]
    return Curve(
        shared, [math.fsum(one) / len(one) for one in whole], [min(one) for one in whole], [max(one) for one in whole]
    )


def wants_log_axis(panel: Panel, curves: Sequence[Curve]) -> bool:
    """Whether the positive values of a panel span so much that a linear axis would hide the small ones."""
    positive = [value for curve in curves for value in (*curve.low, *curve.high) if value > 0]
    return panel.can_be_log and bool(positive) and max(positive) > _LOG_FROM_RATIO * min(positive)


def _values(key: str, steps: Sequence[StepRecord]) -> Iterator[tuple[int, float]]:
    for record in steps:
        if key in record:
            value = record[key]
            yield int(record["step"] or 0), float(value) if isinstance(value, int | float) else math.nan
