"""Curves of a training run as a PNG. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from strands_rollout.train.run_folder import StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOG_FROM_RATIO: Final = 100.0
NOT_DRAWN: Final = "curves are not drawn: matplotlib is not installed; pip install 'strands-rollout[train]'"
_COLUMNS: Final = 3
_WIDTH_IN, _ROW_IN, _HEAD_IN, _DPI = 10.0, 2.3, 0.45, 150
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

    def has_something(self, values: Iterable[float]) -> bool:
        """Whether there is anything to be seen."""
        drawn = list(filter(math.isfinite, values))
        return bool(drawn) and (self.is_shown_at_zero or any(drawn))


PANELS: Final = (
    Panel("reward; dashed: held-out problems", {"reward": "-", "held_out_reward": "--"}),
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


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_run(steps: Sequence[StepRecord], path: Path, *, title: str) -> None:
    """Draw one run to a PNG."""
    lines = {key: values_of(key, steps) for panel in PANELS for key in panel.keys}

    def draw(axes: Axes, panel: Panel) -> Iterable[float]:
        for key, dashes in panel.keys.items():
            axes.plot(list(lines[key]), list(lines[key].values()), linestyle=dashes, linewidth=1.4)
        return [value for key in panel.keys for value in lines[key].values()]

    shown = [panel for panel in PANELS if panel.has_something(v for key in panel.keys for v in lines[key].values())]
    draw_page(shown, draw, path, title=title)


def values_of(key: str, steps: Sequence[StepRecord]) -> dict[int, float]:
    """A value by the step, from 0, that has it; NaN where it is no finite number."""
    found = {int(record["step"] or 0): record[key] for record in steps if key in record}
    return {step: float(value) if isinstance(value, int | float) else math.nan for step, value in found.items()}


def draw_page(
    panels: Sequence[Panel],
    draw: Callable[[Axes, Panel], Iterable[float]],
    path: Path,
    *,
    title: str,
    legend: Callable[[Figure], object] | None = None,
) -> None:
    """Draw panels to a PNG, written in one move, so that a viewer never sees half of it.

    Args:
        panels: Those that have something to show.
        draw: Puts a panel's lines on its axes, and returns their values.
        path: The PNG.
        title: Of the page.
        legend: Puts one below the panels.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = max(1, -(-len(panels) // _COLUMNS))
    with mpl.rc_context(_FONT):
        size = (_WIDTH_IN, rows * _ROW_IN + _HEAD_IN * (1 + (legend is not None)))
        figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
        figure.suptitle(title, fontsize=_FONT["font.size"])
        first = None
        for place, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(rows, _COLUMNS, place, sharex=first)
            _finish(axes, panel, [value for value in draw(axes, panel) if value > 0])
            first = first or axes
        if legend is not None:
            legend(figure)
        figure.draw_without_rendering()  # the layout knows the width of the numbers at an axis from the second time on
        beside = path.with_name(path.name + ".new")
        figure.savefig(beside, format="png")
    beside.replace(path)


def _finish(axes: Axes, panel: Panel, positive: Sequence[float]) -> None:
    # a linear axis would hide the small ones
    if panel.can_be_log and positive and max(positive) > _LOG_FROM_RATIO * min(positive):
        axes.set_yscale("log", nonpositive="mask")
    axes.set(title=f"{panel.title}{f', {panel.unit}' if panel.unit else ''}", xlabel="step")
    axes.locator_params(axis="x", integer=True, nbins=6)
    axes.grid(visible=True, alpha=0.3)
