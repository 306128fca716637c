"""Curves of several variants over their seeds, as a PNG. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from strands_rollout.train.run_folder import PANELS, Panel, StepRecord, draw_page, values_by_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs: TypeAlias = Sequence[Sequence[StepRecord]]
# Okabe and Ito's colours, distinct for the colour-blind, without yellow, which is weak on white
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
_MARKS_PER_LINE: Final = 8


@dataclass(frozen=True, slots=True)
class Curve:
    """A line with a band from the lowest to the highest run; NaN where a run's value is not finite.

    It covers only the steps (numbered from 0) at which every run has a value.
    """

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def curve_of(key: str, runs: Runs) -> Curve:
    """Return the curve of a value by step.

    The curve covers only the steps that all runs have, because a mean over fewer runs would be biased.
    """
    by_run = [values_by_step(key, steps) for steps in runs]
    shared = sorted(set.intersection(*map(set, by_run))) if by_run else []
    columns = [[values[step] for values in by_run] for step in shared]
    whole = [column if all(map(math.isfinite, column)) else [math.nan] for column in columns]
    return Curve(
        shared, [math.fsum(one) / len(one) for one in whole], [min(one) for one in whole], [max(one) for one in whole]
    )


def draw_comparison(variants: Mapping[str, Runs], path: Path) -> None:
    """Draw a line per variant: the mean over its seeds, in a band from the lowest to the highest seed.

    A line covers the steps that all of its seeds have. The legend shows the names of the variants.
    """
    curves = [{key: curve_of(key, runs) for panel in PANELS for key in panel.keys} for runs in variants.values()]

    def draw(axes: Axes, panel: Panel) -> Iterable[float]:
        for number, (look, by_key) in enumerate(zip(_looks(), curves, strict=False)):
            for key, dashes in panel.keys.items():
                # markers are offset from those of other variants, because lines may overlap
                _draw_line(axes, by_key[key], {**look, "linestyle": dashes}, number / len(curves))
        return [value for by_key in curves for key in panel.keys for value in (*by_key[key].low, *by_key[key].high)]

    def legend(figure: Figure) -> None:
        from matplotlib.lines import Line2D

        handles = [Line2D([], [], label=label, **look) for look, label in zip(_looks(), variants, strict=False)]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False)

    means = {panel.title: [v for by_key in curves for key in panel.keys for v in by_key[key].mean] for panel in PANELS}
    most = max(map(len, variants.values()))
    title = "mean over seeds; band: lowest to highest seed" if most > 1 else "one seed each"
    draw_page(
        [panel for panel in PANELS if panel.is_worth_drawing(means[panel.title])],
        draw,
        path,
        title=title,
        legend=legend,
    )


def _draw_line(axes: Axes, curve: Curve, look: Mapping[str, Any], shift: float) -> None:
    every = max(1, -(-len(curve.steps) // _MARKS_PER_LINE))
    style = {**look, "linewidth": 1.4, "markersize": 3.5, "markevery": (int(shift * every), every)}
    axes.plot(curve.steps, curve.mean, **style)
    if curve.low != curve.high:
        axes.fill_between(curve.steps, curve.low, curve.high, color=look["color"], alpha=0.18, linewidth=0)


def _looks() -> Iterator[dict[str, Any]]:
    return ({"color": color, "marker": marker} for color, marker in zip(cycle(_COLOURS), cycle(_MARKERS), strict=False))
