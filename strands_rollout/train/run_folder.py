"""The folder of a training run (log, checkpoints, weights), and the run's reports: progress, wandb, curves.

A folder with a checkpoint belongs to one run. The folder refuses a run that differs in `TrainOptions.identity`: steps
of different runs must not be mixed. A checkpoint is written atomically, and then earlier checkpoints are removed. The
user configures wandb by environment variables only (WANDB_MODE, WANDB_PROJECT ...).
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from rich.console import Console

from strands_rollout.dump.terminal import progress_bar
from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.files.json_files import describe_differences, read_json, write_json
from strands_rollout.files.json_log import JsonLog, complete_lines
from strands_rollout.files.safe_files import atomic_replacement, open_exclusive
from strands_rollout.integrations.table import check_wandb, start_run
from strands_rollout.play.options import TrainOptions
from strands_rollout.play.rows import json_line
from strands_rollout.samples import PART_PREFIX, Sample
from strands_rollout.train.rollouts import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

StepRecord: TypeAlias = dict[str, float | int | str | None]
"""The metrics of one step. None stands for an unknown or non-finite value. Unmeasured metrics are left out."""

STEPS_FILE: Final = "steps.jsonl"
OPTIONS_FILE: Final = "options.json"
SUMMARY_FILE: Final = "summary.json"
POLICY_FILE: Final = "policy.pt"
HELD_OUT_PARTS: Final = f"held_out_{PART_PREFIX}"
"""The prefix of the keys in a step's record for the parts of the reward on held-out problems."""
_CHECKPOINT: Final = re.compile(r"step-\d{6}")


class StepLog:
    """A run's steps in a file, one JSON object per line, appended as they end. A context manager.

    Write a step's record before its checkpoint. If a run is killed in between, the resumed run repeats the step.

    Args:
        path: The file.
        first_step: The next step; existing records from this step on are dropped.

    Attributes:
        records: All records in the file.

    Raises:
        ConfigError: The file can't be read, is not a log of steps, or ends before `first_step`.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        existing = read_steps(path) if path.exists() else []
        self.records = existing[:first_step]
        if len(self.records) != first_step:
            raise ConfigError(
                f"{path} ends before step {len(self.records)}; expected all steps before {first_step}, where the "
                "run resumes from its checkpoint; restore the log, or choose another --out"
            )
        self._log = JsonLog(path, remedy="free disk space and resume the run")
        self._log.keep_first(first_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._log.close()

    def append(self, record: Mapping[str, float | int | str | None]) -> StepRecord:
        """Write a step, with null for numbers that are not finite, and return the record as written.

        Raises:
            RolloutError: The step is not the next one, or can't be written.
        """
        written = nulls_for_nonfinite(record)
        if written.get("step") != len(self.records):
            raise RolloutError(f"got step {written.get('step')}; expected the next step, {len(self.records)}")
        self._log.append(json.dumps(written, allow_nan=False).encode() + b"\n")
        self.records.append(written)
        return written


def read_steps(path: Path) -> list[StepRecord]:
    """Return the records of a log; an incomplete last line, which a run may be writing, is left out.

    Raises:
        ConfigError: The file can't be read, or a line is not the next step's record.
    """
    try:
        lines = [*complete_lines(path)]
    except OSError as e:
        raise ConfigError(f"can't read {path}: {e.strerror}; expected the log of a training run") from e
    records = []
    for step, line in enumerate(lines):
        try:
            record = json.loads(line)
        except ValueError as e:
            raise ConfigError(
                f"{path}:{step + 1} is not JSON ({e}); expected the record of step {step}; restore the log, or choose "
                "another --out"
            ) from e
        if not isinstance(record, dict) or record.get("step") != step:
            raise ConfigError(
                f"{path}:{step + 1} is not the record of step {step}: got {record!r:.80}; restore the log, or choose "
                "another --out"
            )
        if not all(value is None or isinstance(value, int | float | str) for value in record.values()):
            raise ConfigError(
                f"{path}:{step + 1} has values other than numbers, texts and null; restore the log, or choose "
                "another --out"
            )
        records.append(record)
    return records


def nulls_for_nonfinite(record: Mapping[str, float | int | str | None]) -> StepRecord:
    """Return the record with None for NaN and infinities: JSON has no such numbers."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }


def with_final_evaluation(steps: Sequence[StepRecord], summary: Mapping[str, Any] | None) -> list[StepRecord]:
    """Return the records of a run; if its summary has held-out results of the last weights, add a record with them.

    A step's own record has the results of the weights before its update. `summary` is None for an unfinished run.
    """
    facts = summary or {}
    parts = facts.get("held_out_parts_end") or {}
    values = {
        "held_out_accuracy": facts.get("accuracy_end"),
        "held_out_reward": facts.get("held_out_reward_end"),
        **{f"{HELD_OUT_PARTS}{name}": value for name, value in parts.items()},
    }
    measured = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return [*steps, {"step": len(steps), **measured}] if measured else list(steps)


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run in a checkpoint.

    Attributes:
        step: The next step.
        next_position: The position of the first prompt without a group.
        waiting: The groups interrupted by an abort, and finished groups that were not needed. The next step uses all
            of them.
        facts: Values for the summary, by name; see `Trainer.facts`.
    """

    step: int
    next_position: int
    waiting: Sequence[Group] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the state as a line of JSON; values that Python's `json` can't write become text."""
        waiting = [
            {
                "position": group.position,
                "episodes": {
                    index: [sample.to_dict() for sample in samples] for index, samples in group.episodes.items()
                },
            }
            for group in self.waiting
        ]
        value = {"step": self.step, "next_position": self.next_position, "facts": self.facts, "waiting": waiting}
        return json_line(json.loads(json.dumps(value, default=str)))

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Read the state from a checkpoint.

        Raises:
            ConfigError: The file can't be read or is not the state of a run.
        """
        path = checkpoint / "progress.json"
        try:
            value = json.loads(path.read_bytes())
            waiting = [
                Group(
                    group["position"],
                    {int(index): list(map(Sample.from_dict, samples)) for index, samples in group["episodes"].items()},
                )
                for group in value["waiting"]
            ]
            return cls(value["step"], value["next_position"], waiting, value["facts"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ConfigError(f"can't resume from {path}: {e!r}; start again in another folder with --out") from e


class TrainFolder:
    """The folder of a run: `locked` creates it, `claim` reserves it for one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights = path.absolute() / "weights"
        self.steps = path / STEPS_FILE
        self.summary = path / SUMMARY_FILE
        self.curves = path / "curves.png"
        self.samples = path / "samples"
        self._checkpoints = path / "checkpoints"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder if necessary; within the block, lock the folder against other processes.

        Raises:
            ConfigError: Another process holds the lock, or the folder can't be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"can't create {self.path}: {e.strerror}; choose another folder with --out") from e
        lock = open_exclusive(self.path / "lock")
        try:
            yield
        finally:
            os.close(lock)

    def claim(self, options: TrainOptions, provenance: Mapping[str, Any]) -> None:
        """Reserve the folder for a run: write its options and `provenance`, and delete an earlier process's summary.

        A folder without a checkpoint is free for any run.

        Raises:
            ConfigError: The folder belongs to another run; the message lists the differences.
        """
        options_file = self.path / OPTIONS_FILE
        if self.newest_checkpoint() is not None:
            recorded = read_json(options_file).get("options") or {}
            recorded_identity = {name: value for name, value in recorded.items() if name in options.identity()}
            if differing := describe_differences(recorded_identity, options.identity()):
                raise ConfigError(
                    f"{self.path} holds another run: {differing}. Use the options of that run, or choose another --out"
                )
        write_json(options_file, {"options": options.to_json(), **provenance})
        self.summary.unlink(missing_ok=True)

    def newest_checkpoint(self) -> Path | None:
        """Return the folder of the newest checkpoint, or None."""
        checkpoints = [path for path in self._checkpoints.glob("step-*") if _CHECKPOINT.fullmatch(path.name)]
        return max(checkpoints, default=None)

    def save_checkpoint(self, state: RunState, save_policy: Callable[[Path], None]) -> None:
        """Write a checkpoint, then remove older checkpoints; `save_policy` writes the policy to a path."""
        final = self._checkpoints / f"step-{state.step:06d}"
        part = final.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        save_policy(part / POLICY_FILE)
        (part / "progress.json").write_bytes(state.to_json())
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        for path in self._checkpoints.glob("step-*"):
            if path != final:
                shutil.rmtree(path)


_STEP_FORMATS: Final[Mapping[str, Callable[[float], str]]] = {
    "reward": lambda value: f"reward {value:.2f}",
    "accuracy": lambda value: f"accuracy {value:.0%}",
    "held_out_accuracy": lambda value: f"held out {value:.0%}",
    "held_out_reward": lambda value: f"held-out reward {value:.2f}",
}


def _part_format(key: str) -> Callable[[float], str]:
    return lambda value: f"{key.removeprefix(PART_PREFIX)} {value:.2f}"


_DURATIONS: Final = ("rollout_s", "train_s", "sync_s", "eval_s")
_WARN_AFTER_STEPS: Final = (1, 3, 10, 30, 100)  # consecutive steps whose groups have equal rewards
_PROJECT: Final = "strands-rollout-train"
_LOG_FROM_RATIO: Final = 100.0
NO_MATPLOTLIB_NOTE: Final = "can't draw curves without matplotlib; run: pip install 'strands-rollout[train]'"
_COLUMNS: Final = 3
_MAX_MARKED_POINTS: Final = 40
_WIDTH_IN, _ROW_IN, _HEAD_IN, _DPI = 10.0, 2.3, 0.45, 150
_FONT: Final = {"font.size": 10, "axes.titlesize": 10, "legend.fontsize": 9}


class TrainingProgress:
    """Display of a run's progress on a terminal or in a file, as a context manager.

    Args:
        console: The terminal or file.
        total: The number of steps of the whole run.
        done: The number of steps that earlier processes finished.
        groups: The number of groups per step; None disables the warning about equal rewards.
    """

    def __init__(self, console: Console, *, total: int, done: int = 0, groups: int | None = None) -> None:
        self._console, self._total, self._groups = console, total, groups
        self._done_at_start = self._done = done
        self._steps_without_spread = 0
        self._step_text = self._phase = ""
        # draw only twice a second, because the drawing thread shares its core with the training
        self._bar = progress_bar(console, refresh_per_second=2)
        self._task = self._bar.add_task("steps", total=total, completed=done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def show_phase(self, name: str) -> None:
        """Show the name of the phase that begins, such as "rollout".

        If the console is not a terminal, print the name only until the end of this process's first step, and after the
        last step. In between, the lines of `show_step` are enough.
        """
        self._phase = name
        if not self._console.is_interactive and (self._done == self._done_at_start or self._done == self._total):
            where = f"step {self._done + 1}/{self._total}" if self._done < self._total else f"after step {self._total}"
            self._console.print(f"{where}: {name} ...", highlight=False, markup=False, soft_wrap=True)
        self._refresh()

    def show_step(self, record: Mapping[str, float | int | str | None]) -> None:
        """Show a finished step's reward with its parts, its accuracy, and its held-out results, if any."""
        self._done += 1
        formats = {**_STEP_FORMATS, **{key: _part_format(key) for key in record if key.startswith(PART_PREFIX)}}
        texts = [
            format_value(value)
            for key, format_value in formats.items()
            if isinstance(value := record.get(key), int | float)
        ]
        self._step_text = "  ".join(texts)
        if not self._console.is_interactive:
            seconds = sum(value for key in _DURATIONS if isinstance(value := record.get(key), int | float))
            line = f"step {self._done}/{self._total}  {self._step_text}  {seconds:.1f} s"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._warn_without_spread(record)
        self._refresh()

    def _warn_without_spread(self, record: Mapping[str, float | int | str | None]) -> None:
        """Warn if all rewards within each group are equal: then only the loss's KL and entropy terms can train."""
        has_no_spread = self._groups is not None and record.get("dropped_groups") == self._groups
        self._steps_without_spread = self._steps_without_spread + 1 if has_no_spread else 0
        if self._steps_without_spread in _WARN_AFTER_STEPS:
            steps = self._steps_without_spread
            where = f"step {self._done}" if steps == 1 else f"{steps} steps in a row up to step {self._done}"
            warning = (
                f"rewards gave no learning signal in {where}: within each group, all rewards were equal. Use easier or "
                "harder rows, a reward with more values than right and wrong, more --samples-per-prompt, or a model "
                "that can do the task; `strands-rollout try` shows an episode"
            )
            self._console.print(warning, highlight=False, markup=False, soft_wrap=True)

    def _refresh(self) -> None:
        description = "  ".join(filter(None, (self._step_text, self._phase)))
        self._bar.update(self._task, completed=self._done, description=description)


class WandbLog:
    """A run in wandb, which resumes if the folder was logged before. A context manager.

    Only the options, the steps' records and the summary are logged; see `start_run`. The options must hold no secret.
    wandb writes its own files to the run's folder `out`, unless WANDB_DIR is set.

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
        # wandb's own step counter would refuse the steps that a resumed run repeats
        self._run.define_metric("*", step_metric="step")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._run.finish(exit_code=0 if kind is None else 1)

    def append(self, record: Mapping[str, float | int | str | None]) -> None:
        """Log a step's record, without numbers that are not finite."""
        self._run.log({name: value for name, value in nulls_for_nonfinite(record).items() if value is not None})

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Set the run's summary in wandb."""
        self._run.summary.update(dict(summary))


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart of the page.

    Attributes:
        title: The title above the chart.
        keys: The keys of a step's record that are drawn, each with matplotlib's line style.
        unit: The label of the y axis.
        can_be_log: Use a logarithmic y axis if the values span more than two orders of magnitude.
        is_shown_at_zero: Draw the chart even if all values are 0.
    """

    title: str
    keys: Mapping[str, str]
    unit: str
    can_be_log: bool = False
    is_shown_at_zero: bool = True

    def is_worth_drawing(self, values: Iterable[float]) -> bool:
        """Return whether the chart would show anything."""
        finite_values = list(filter(math.isfinite, values))
        return bool(finite_values) and (self.is_shown_at_zero or any(finite_values))


PANELS: Final = (
    Panel("reward; dashed: held-out problems", {"reward": "-", "held_out_reward": "--"}, "mean reward"),
    Panel("accuracy, held-out problems", {"held_out_accuracy": "-"}, "share of right answers"),
    Panel("response length", {"response_length": "-"}, "tokens"),
    Panel("tool calls", {"tool_calls": "-"}, "calls of an episode"),
    Panel("KL, trainer from rollout (k3)", {"kl_k3": "-"}, "nats", can_be_log=True),
    Panel("clipped tokens", {"clip_fraction": "-"}, "share of tokens"),
    Panel(
        "importance ratio; dashed: greatest, least",
        {"ratio_mean": "-", "ratio_max": "--", "ratio_min": "--"},
        "new / old probability",
        can_be_log=True,
    ),
    Panel("entropy", {"entropy": "-"}, "nats"),
    Panel("drifted tokens", {"drift_tokens": "-"}, "share of tokens"),
    Panel("stale tokens", {"stale_tokens": "-"}, "share of tokens", is_shown_at_zero=False),
)


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_run(steps: Sequence[StepRecord], path: Path, *, title: str) -> None:
    """Draw one run to a PNG, with a chart for the parts of its reward if there are any."""
    parts = sorted({key for record in steps for key in record if key.startswith(PART_PREFIX)})
    held_out = {part: f"held_out_{part}" for part in parts}
    styles = {key: style for part in parts for key, style in ((part, "-"), (held_out[part], "--"))}
    parts_panel = Panel("parts of the reward; dashed: held out", styles, "mean")
    panels = (PANELS[0], *([parts_panel] if parts else []), *PANELS[1:])
    lines = {key: values_by_step(key, steps) for panel in panels for key in panel.keys}

    def draw(axes: Axes, panel: Panel) -> Iterable[float]:
        for key, line_style in panel.keys.items():
            values = lines[key]
            if not values:
                continue
            # without markers, a single point or a point between gaps would be invisible
            marker = "o" if len(values) <= _MAX_MARKED_POINTS else ""
            color = axes.get_lines()[-1].get_color() if key in held_out.values() else None
            label = key.removeprefix(PART_PREFIX) if key in held_out else None
            style: dict[str, Any] = {"linestyle": line_style, "marker": marker, "color": color, "label": label}
            axes.plot(list(values), list(values.values()), markersize=3, linewidth=1.4, **style)
        if panel is parts_panel:
            axes.legend()
        return [value for key in panel.keys for value in lines[key].values()]

    shown = [panel for panel in panels if panel.is_worth_drawing(v for key in panel.keys for v in lines[key].values())]
    draw_page(shown, draw, path, title=title)


def values_by_step(key: str, steps: Sequence[StepRecord]) -> dict[int, float]:
    """Return the values of a key by step, from 0; NaN for values that are not finite."""
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
    """Draw panels to a PNG, which is replaced atomically.

    Args:
        panels: The charts, all worth drawing.
        draw: Draws a panel's lines on its axes, and returns their values.
        path: The PNG.
        title: The title of the page.
        legend: Adds a legend below the panels.
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
            _format_axes(axes, panel, [value for value in draw(axes, panel) if value > 0])
            first = first or axes
        if legend is not None:
            legend(figure)
        figure.draw_without_rendering()  # the layout needs a first drawing to know the width of axis labels
        with atomic_replacement(path) as temporary:
            figure.savefig(temporary, format="png")


def _format_axes(axes: Axes, panel: Panel, positive: Sequence[float]) -> None:
    # a linear axis would hide small values
    if panel.can_be_log and positive and max(positive) > _LOG_FROM_RATIO * min(positive):
        axes.set_yscale("log", nonpositive="mask")
    axes.set(title=panel.title, xlabel="step", ylabel=panel.unit)
    axes.locator_params(axis="x", integer=True, nbins=6)
    axes.grid(visible=True, alpha=0.3)
