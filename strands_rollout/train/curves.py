"""Curves of training as a PNG: one run's, or several variants' over their seeds. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from strands_rollout.train.run_folder import StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Runs: TypeAlias = Sequence[Sequence[StepRecord]]
_LOG_FROM_RATIO: Final = 100.0
NOT_DRAWN: Final = "curves are not drawn: matplotlib is not installed; pip install 'strands-rollout[train]'"
# Okabe and Ito's colours without yellow, which is weak on white: distinct for the colour-blind too
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
_MARKS_PER_LINE: Final = 8
_COLUMNS: Final = 3
_FONT: Final = {"font.size": 10, "axes.titlesize": 10, "legend.fontsize": 9}


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture of the page.

    `keys` of a step's record are its lines, with matplotlib's line style. Where it `can_be_log`, its axis is
    logarithmic if the values span more than two orders of magnitude.
    """

    title: str
    keys: Mapping[str, str]
    can_be_log: bool = False
    unit: str = ""
    is_shown_at_zero: bool = True

    def lines(self, runs: Runs) -> list[tuple[str, Curve]]:
        """The dashes and the curve of each key that has a value."""
        curves = [(dashes, curve_of(key, runs)) for key, dashes in self.keys.items()]
        drawn = [(dashes, curve, list(filter(math.isfinite, curve.mean))) for dashes, curve in curves]
        return [(dashes, curve) for dashes, curve, values in drawn if values and (self.is_shown_at_zero or any(values))]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line with its band from the least run to the greatest, over the steps, from 0, that every run measured.

    NaN where a run's value is no finite number.
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


def curve_of(key: str, runs: Runs) -> Curve:
    """One value of all runs by step.

    A mean over the runs that are left would flatter those that ended early, so a step counts that all have.
    """
    by_run = [{int(record["step"] or 0): record[key] for record in steps if key in record} for steps in runs]
    shared = sorted(set.intersection(*map(set, by_run))) if by_run else []
    columns = [[_number(values[step]) for values in by_run] for step in shared]
    whole = [column if all(map(math.isfinite, column)) else [math.nan] for column in columns]
    return Curve(
        shared, [math.fsum(one) / len(one) for one in whole], [min(one) for one in whole], [max(one) for one in whole]
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def wants_log_axis(panel: Panel, curves: Sequence[Curve]) -> bool:
    """Whether the positive values of a panel span so much that a linear axis would hide the small ones."""
    positive = [value for curve in curves for value in (*curve.low, *curve.high) if value > 0]
    return panel.can_be_log and bool(positive) and max(positive) > _LOG_FROM_RATIO * min(positive)


_WIDTH_IN, _ROW_IN, _HEAD_IN, _DPI = 10.0, 2.3, 0.45, 150


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_run(steps: Sequence[StepRecord], path: Path, *, title: str) -> None:
    """Draw one run to a PNG, written in one move, so that a viewer never sees half of it."""
    _draw({"": [steps]}, path, title=title)


def draw_comparison(variants: Mapping[str, Runs], path: Path) -> None:
    """Draw a line per variant: the mean over its seeds, in a band from the least to the greatest seed's.

    A line has the steps that all of its seeds have; the variants' names are the words of the legend.
    """
    most = max(map(len, variants.values()))
    _draw(variants, path, title="mean over seeds; band: least to greatest seed" if most > 1 else "one seed each")


def _draw(variants: Mapping[str, Runs], path: Path, *, title: str) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    by_panel = [(panel, {label: panel.lines(runs) for label, runs in variants.items()}) for panel in PANELS]
    shown = [(panel, lines) for panel, lines in by_panel if any(lines.values())]
    rows = max(1, -(-len(shown) // _COLUMNS))
    has_legend = any(variants)
    with mpl.rc_context(_FONT):
        size = (_WIDTH_IN, rows * _ROW_IN + _HEAD_IN * (1 + has_legend))
        figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
        figure.suptitle(title, fontsize=_FONT["font.size"])
        first = None
        for place, (panel, lines) in enumerate(shown, start=1):
            axes = figure.add_subplot(rows, _COLUMNS, place, sharex=first)
            _draw_panel(axes, panel, lines)
            first = first or axes
        if has_legend:
            handles = [Line2D([], [], label=label, **look) for look, label in zip(_looks(), variants, strict=False)]
            figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False)
        figure.draw_without_rendering()  # the layout knows the width of the numbers at an axis from the second time on
        beside = path.with_name(path.name + ".new")
        figure.savefig(beside, format="png")
    beside.replace(path)


def _draw_panel(axes: Axes, panel: Panel, variants: Mapping[str, Sequence[tuple[str, Curve]]]) -> None:
    for number, (look, lines) in enumerate(zip(_looks(), variants.values(), strict=False)):
        for dashes, curve in lines:
            every = -(-len(curve.steps) // _MARKS_PER_LINE)
            # marks a little beside those of other variants: lines may lie upon each other
            first = int(number / len(variants) * every)
            style = {**look, "linestyle": dashes, "linewidth": 1.4, "markersize": 3.5, "markevery": (first, every)}
            axes.plot(curve.steps, curve.mean, **style)
            if curve.low != curve.high:
                axes.fill_between(curve.steps, curve.low, curve.high, color=look["color"], alpha=0.18, linewidth=0)
    if wants_log_axis(panel, [curve for lines in variants.values() for _, curve in lines]):
        axes.set_yscale("log", nonpositive="mask")
    axes.set(title=f"{panel.title}{f', {panel.unit}' if panel.unit else ''}", xlabel="step")
    axes.locator_params(axis="x", integer=True, nbins=6)
    axes.grid(visible=True, alpha=0.3)


def _looks() -> Iterator[dict[str, Any]]:
    return ({"color": color, "marker": marker} for color, marker in zip(cycle(_COLOURS), cycle(_MARKERS), strict=False))
