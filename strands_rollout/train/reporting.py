"""What a training run shows of its steps: a bar on a terminal, else a line each; wandb; curves as a PNG.

wandb is set up by the environment alone (WANDB_MODE, WANDB_PROJECT ...); no key is read or written here. Curves need
matplotlib.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from rich.console import Console

from strands_rollout.dump.terminal import progress_bar
from strands_rollout.integrations.wandb import check_wandb, start_run
from strands_rollout.train.run_folder import StepRecord, finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WORDS: Final[Mapping[str, Callable[[float], str]]] = {
    "reward": lambda value: f"reward {value:.2f}",
    "accuracy": lambda value: f"accuracy {value:.0%}",
    "held_out_accuracy": lambda value: f"held out {value:.0%}",
}
_TIMES: Final = ("rollout_s", "train_s", "sync_s", "eval_s")
_TOLD_AFTER: Final = (1, 3, 10, 30, 100)  # steps in a row without a spread
_PROJECT: Final = "strands-rollout-train"
_LOG_FROM_RATIO: Final = 100.0
NOT_DRAWN: Final = "curves are not drawn: matplotlib is not installed; pip install 'strands-rollout[train]'"
_COLUMNS: Final = 3
_WIDTH_IN, _ROW_IN, _HEAD_IN, _DPI = 10.0, 2.3, 0.45, 150
_FONT: Final = {"font.size": 10, "axes.titlesize": 10, "legend.fontsize": 9}


class TrainingProgress:
    """Shows the progress of a run; a context manager.

    `total` counts the steps of the whole run, `done` those before this process, `groups` a step's.
    """

    def __init__(self, console: Console, *, total: int, done: int = 0, groups: int | None = None) -> None:
        self._console, self._total, self._done, self._groups = console, total, done, groups
        self._steps_without_spread = 0
        self._words = self._phase = ""
        # two draws a second: the thread that draws shares its core with the training
        self._bar = progress_bar(console, refresh_per_second=2)
        self._task = self._bar.add_task("steps", total=total, completed=done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def phase(self, words: str) -> None:
        """Show the phase that begins, as in "rollout"; nothing without a terminal."""
        self._phase = words
        self._show()

    def step_done(self, record: Mapping[str, float | int | str | None]) -> None:
        """Show a step's reward and accuracies."""
        self._done += 1
        parts = [form(value) for key, form in _WORDS.items() if isinstance(value := record.get(key), int | float)]
        self._words = "  ".join(parts)
        if not self._console.is_interactive:
            seconds = sum(value for key in _TIMES if isinstance(value := record.get(key), int | float))
            line = f"step {self._done}/{self._total}  {self._words}  {seconds:.1f} s"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._watch_spread(record)
        self._show()

    def _watch_spread(self, record: Mapping[str, float | int | str | None]) -> None:
        """Say where no group's episodes have different rewards, so that nothing is learned."""
        has_none = self._groups is not None and record.get("dropped_groups") == self._groups
        self._steps_without_spread = self._steps_without_spread + 1 if has_none else 0
        if self._steps_without_spread in _TOLD_AFTER:
            steps = self._steps_without_spread
            where = f"step {self._done}" if steps == 1 else f"{steps} steps in a row up to step {self._done}"
            words = (
                f"nothing learned in {where}: all rewards of each group are alike. Take easier or harder rows, a "
                "reward with more values than right and wrong, more --samples-per-prompt, or a model that can do the "
                "task; `strands-rollout try` shows an episode"
            )
            self._console.print(words, highlight=False, markup=False, soft_wrap=True)

    def _show(self) -> None:
        description = "  ".join(filter(None, (self._words, self._phase)))
        self._bar.update(self._task, completed=self._done, description=description)


class WandbLog:
    """A run in wandb, resumed where the same folder was logged before; a context manager.

    Only what is given here is logged; see `start_run`. wandb's own files lie in the run's folder `out` unless WANDB_DIR
    is set; nothing secret may be among the options.

    Raises:
        ConfigError: wandb can't start a run.
    """

    def __init__(self, out: Path, options: Mapping[str, Any]) -> None:
        check_wandb()
        id_file = out / "wandb_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4) + "\n")
        self._run = start_run(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=os.environ.get("WANDB_NAME", out.name),
            id=id_file.read_text().strip(),
            resume="allow",
            dir=os.environ.get("WANDB_DIR", str(out)),
            config=dict(options),
        )
        # a resumed run does some steps again, which wandb's own step, a counter, would refuse
        self._run.define_metric("*", step_metric="step")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._run.finish(exit_code=0 if kind is None else 1)

    def append(self, record: Mapping[str, float | int | str | None]) -> None:
        """Log a step; what is no finite number is left out."""
        self._run.log({name: value for name, value in finite(record).items() if value is not None})

    def sum_up(self, summary: Mapping[str, Any]) -> None:
        """Log the run's result."""
        self._run.summary.update(dict(summary))


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
