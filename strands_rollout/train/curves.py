"""Curves of training as a PNG: one run's, or several variants' over their seeds. Needs matplotlib.

Knows matplotlib; what a panel shows is `panels.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any, Final, TypeAlias

from strands_rollout.train.panels import PANELS, Curve, Panel, wants_log_axis
from strands_rollout.train.step_log import StepRecord

Runs: TypeAlias = Sequence[Sequence[StepRecord]]
_Lines: TypeAlias = Mapping[str, Sequence[tuple[str, Curve]]]

NOT_DRAWN: Final = "curves are not drawn: matplotlib is not installed; pip install 'strands-rollout[train]'"
# Okabe and Ito's colours without yellow, which is weak on white: told apart whatever one's colour vision
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
_MARKS_PER_LINE: Final = 8
_COLUMNS: Final = 3
_WIDTH_IN, _ROW_IN, _HEAD_IN, _DPI = 10.0, 2.3, 0.45, 150
_FONT: Final = {"font.size": 10, "axes.titlesize": 10, "legend.fontsize": 9}


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_run(steps: Sequence[StepRecord], path: Path, *, title: str) -> None:
    """Draw one run.

    Args:
        steps: Its records.
        path: The PNG, written in one move, so that a viewer never sees half of it.
        title: Above all panels.
    """
    _draw({"": [steps]}, path, title=title)


def draw_comparison(variants: Mapping[str, Runs], path: Path) -> None:
    """Draw a line per variant: the mean over its seeds, in a band from the least to the greatest seed's.

    A line has the steps that all of its seeds have.

    Args:
        variants: The runs of each, under the words of the legend.
        path: The PNG.
    """
    most = max(map(len, variants.values()))
    _draw(variants, path, title="mean over seeds; band: least to greatest seed" if most > 1 else "one seed each")


def _draw(variants: Mapping[str, Runs], path: Path, *, title: str) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    shown = [(panel, lines) for panel in PANELS if any((lines := _lines_of(panel, variants)).values())]
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
            _put_legend(figure, list(variants))
        figure.draw_without_rendering()  # the layout knows the width of the numbers at an axis from the second time on
        beside = path.with_name(path.name + ".new")
        figure.savefig(beside, format="png")
    beside.replace(path)


def _lines_of(panel: Panel, variants: Mapping[str, Runs]) -> _Lines:
    return {label: panel.lines(runs) for label, runs in variants.items()}


def _draw_panel(axes: Any, panel: Panel, variants: _Lines) -> None:  # noqa: ANN401 - matplotlib's Axes
    for number, (look, lines) in enumerate(zip(_looks(), variants.values(), strict=False)):
        for dashes, curve in lines:
            _draw_curve(axes, curve, {**look, "linestyle": dashes}, place=number / len(variants))
    if wants_log_axis(panel, [curve for lines in variants.values() for _, curve in lines]):
        axes.set_yscale("log", nonpositive="mask")
    axes.set(title=f"{panel.title}{f', {panel.unit}' if panel.unit else ''}", xlabel="step")
    axes.locator_params(axis="x", integer=True, nbins=6)
    axes.grid(visible=True, alpha=0.3)


def _draw_curve(axes: Any, curve: Curve, look: Mapping[str, Any], place: float) -> None:  # noqa: ANN401
    """Draw it, with its marks a little beside those of other variants: lines may lie upon each other."""
    every = -(-len(curve.steps) // _MARKS_PER_LINE)
    axes.plot(curve.steps, curve.mean, linewidth=1.4, markersize=3.5, markevery=(int(place * every), every), **look)
    if curve.low != curve.high:
        axes.fill_between(curve.steps, curve.low, curve.high, color=look["color"], alpha=0.18, linewidth=0)


def _put_legend(figure: Any, labels: Sequence[str]) -> None:  # noqa: ANN401
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label, **look) for look, label in zip(_looks(), labels, strict=False)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)


def _looks() -> Any:  # noqa: ANN401 - an endless iterator of keyword arguments
    return ({"color": color, "marker": marker} for color, marker in zip(cycle(_COLOURS), cycle(_MARKERS), strict=False))
