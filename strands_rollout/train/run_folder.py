"""The folder of a training run, and what is shown of the run: log, checkpoints, weights; progress, wandb, curves.

A folder belongs to one run: with other options it is refused, so that steps are never mixed. A checkpoint is there
whole or not at all; the one before is removed when the next is there. wandb is set up by the environment alone
(WANDB_MODE, WANDB_PROJECT ...).
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
from strands_rollout.files.json_files import differences, read_json, write_json
from strands_rollout.files.json_log import JsonLog, whole_lines
from strands_rollout.files.safe_files import open_alone, replaced
from strands_rollout.integrations.table import check_wandb, start_run
from strands_rollout.play.options import TrainOptions
from strands_rollout.play.rows import json_line
from strands_rollout.samples import PART_PREFIX, Sample
from strands_rollout.train.rollouts import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

StepRecord: TypeAlias = dict[str, float | int | str | None]
"""The figures of one step. None: it was measured and is no finite number; a missing key was not measured."""

FILE_NAME: Final = "steps.jsonl"
OPTIONS_FILE: Final = "options.json"
SUMMARY_FILE: Final = "summary.json"
POLICY_FILE: Final = "policy.pt"
HELD_OUT_PARTS: Final = f"held_out_{PART_PREFIX}"
"""Begins a part of the reward in a step's record, as it was on held-out problems."""
_CHECKPOINT: Final = re.compile(r"step-\d{6}")


class StepLog:
    """A run's steps, one JSON object a line, appended as they end; a context manager.

    Write a step's record before its checkpoint: a run that was killed between the two then repeats the step. Records
    from `first_step` on, the first that will be written, are dropped; `records` are all that the file holds.

    Raises:
        ConfigError: The file can't be used, is no log of steps, or does not reach to `first_step`.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        there = read_steps(path) if path.exists() else []
        self.records = there[:first_step]
        if len(self.records) != first_step:
            raise ConfigError(
                f"{path} ends before step {len(self.records)}; expected all steps before {first_step}, where the "
                "checkpoint resumes; put the log back, or choose another --out"
            )
        self._log = JsonLog(path, remedy="make room and resume the run")
        self._log.keep(first_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._log.close()

    def append(self, record: Mapping[str, float | int | str | None]) -> StepRecord:
        """Write a step; what is no finite number is written as null. Returns the record as written.

        Raises:
            RolloutError: It is not the next step, or can't be written.
        """
        written = finite(record)
        if written.get("step") != len(self.records):
            raise RolloutError(f"got step {written.get('step')}; expected {len(self.records)}, the next one")
        self._log.append(json.dumps(written, allow_nan=False).encode() + b"\n")
        self.records.append(written)
        return written


def read_steps(path: Path) -> list[StepRecord]:
    """The records of a log, which may be growing: a last line without its end is left out.

    Raises:
        ConfigError: The file can't be read, or a line of it is not the next step's record.
    """
    try:
        lines = [*whole_lines(path)]
    except OSError as e:
        raise ConfigError(f"can't read {path}: {e.strerror}; expected the log of a training run") from e
    records = []
    for step, line in enumerate(lines):
        try:
            record = json.loads(line)
        except ValueError as e:
            raise ConfigError(f"{path}:{step + 1} is no JSON ({e}); expected the record of step {step}") from e
        if not isinstance(record, dict) or record.get("step") != step:
            raise ConfigError(f"{path}:{step + 1} is not the record of step {step}; remove the file")
        if not all(value is None or isinstance(value, int | float | str) for value in record.values()):
            raise ConfigError(f"{path}:{step + 1} holds more than numbers and texts; expected the record of a step")
        records.append(record)
    return records


def finite(record: Mapping[str, float | int | str | None]) -> StepRecord:
    """The record with None for what is no finite number, as JSON has no form for those."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }


def with_end(steps: Sequence[StepRecord], summary: Mapping[str, Any] | None) -> list[StepRecord]:
    """The records of a run, and after the last one what the last weights do on held-out problems.

    A record has that of its first weights. `summary` is None for a run that is not finished.
    """
    given = summary or {}
    parts = given.get("held_out_parts_end") or {}
    measured = {
        "held_out_accuracy": given.get("accuracy_end"),
        "held_out_reward": given.get("held_out_reward_end"),
        **{f"{HELD_OUT_PARTS}{name}": value for name, value in parts.items()},
    }
    end = {name: value for name, value in measured.items() if isinstance(value, int | float)}
    return [*steps, {"step": len(steps), **end}] if end else list(steps)


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run is: the next step, the first prompt without a group, and the groups that an abort interrupted.

    `facts` are what the summary will report of the steps before, by name.
    """

    step: int
    next_position: int
    waiting: Sequence[Group] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """As a line of JSON; what metadata holds beyond JSON becomes text."""
        waiting = [
            {
                "position": group.position,
                "episodes": {at: [sample.to_dict() for sample in own] for at, own in group.episodes.items()},
            }
            for group in self.waiting
        ]
        value = {"step": self.step, "next_position": self.next_position, "facts": self.facts, "waiting": waiting}
        return json_line(json.loads(json.dumps(value, default=str)))

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """The run's part of a checkpoint.

        Raises:
            ConfigError: It can't be read.
        """
        path = checkpoint / "progress.json"
        try:
            value = json.loads(path.read_bytes())
            waiting = [
                Group(
                    group["position"],
                    {int(at): list(map(Sample.from_dict, own)) for at, own in group["episodes"].items()},
                )
                for group in value["waiting"]
            ]
            return cls(value["step"], value["next_position"], waiting, value["facts"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ConfigError(f"can't resume from {path}: {e!r}; start afresh in another folder with --out") from e


class TrainFolder:
    """A run's folder; `held` makes it, `claim` makes it the run's own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights = path.absolute() / "weights"
        self.steps = path / FILE_NAME
        self.summary = path / SUMMARY_FILE
        self.curves = path / "curves.png"
        self.samples = path / "samples"
        self._checkpoints = path / "checkpoints"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder if it is not there, and keep other processes out of it until the block ends.

        Raises:
            ConfigError: Another process holds it, or it can't be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"can't make {self.path}: {e.strerror}; choose another folder with --out") from e
        lock = open_alone(self.path / "lock")
        try:
            yield
        finally:
            os.close(lock)

    def claim(self, options: TrainOptions, made_by: Mapping[str, Any]) -> None:
        """Record what is asked of the run; without a checkpoint it starts afresh.

        Raises:
            ConfigError: The folder is another run's; the message names what differs.
        """
        asked = self.path / OPTIONS_FILE
        if self.newest_checkpoint() is not None:
            recorded = read_json(asked).get("options") or {}
            there = {name: value for name, value in recorded.items() if name in options.identity()}
            if differing := differences(there, options.identity()):
                raise ConfigError(
                    f"{self.path} holds another run: {differing}. Run it with what it was begun with, or choose "
                    "another --out"
                )
        write_json(asked, {"options": options.to_json(), **made_by})
        self.summary.unlink(missing_ok=True)

    def newest_checkpoint(self) -> Path | None:
        """The folder of the newest checkpoint; None where there is none."""
        found = [path for path in self._checkpoints.glob("step-*") if _CHECKPOINT.fullmatch(path.name)]
        return max(found, default=None)

    def save_checkpoint(self, state: RunState, save_policy: Callable[[Path], None]) -> None:
        """Write a checkpoint, and then remove the older ones; `save_policy` writes the file it is given."""
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


_WORDS: Final[Mapping[str, Callable[[float], str]]] = {
    "reward": lambda value: f"reward {value:.2f}",
    "accuracy": lambda value: f"accuracy {value:.0%}",
    "held_out_accuracy": lambda value: f"held out {value:.0%}",
    "held_out_reward": lambda value: f"held-out reward {value:.2f}",
}


def _part_words(key: str) -> Callable[[float], str]:
    return lambda value: f"{key.removeprefix(PART_PREFIX)} {value:.2f}"


_TIMES: Final = ("rollout_s", "train_s", "sync_s", "eval_s")
_TOLD_AFTER: Final = (1, 3, 10, 30, 100)  # steps in a row without a spread
_PROJECT: Final = "strands-rollout-train"
_LOG_FROM_RATIO: Final = 100.0
NOT_DRAWN: Final = "curves are not drawn: matplotlib is not installed; pip install 'strands-rollout[train]'"
_COLUMNS: Final = 3
_MOST_MARKED: Final = 40
_WIDTH_IN, _ROW_IN, _HEAD_IN, _DPI = 10.0, 2.3, 0.45, 150
_FONT: Final = {"font.size": 10, "axes.titlesize": 10, "legend.fontsize": 9}


class TrainingProgress:
    """Shows the progress of a run; a context manager.

    `total` counts the steps of the whole run, `done` those before this process, `groups` a step's.
    """

    def __init__(self, console: Console, *, total: int, done: int = 0, groups: int | None = None) -> None:
        self._console, self._total, self._groups = console, total, groups
        self._begun = self._done = done
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
        """Show the phase that begins, as in "rollout".

        Without a terminal only before this process's first step and after the last one: the steps between have lines.
        """
        self._phase = words
        if not self._console.is_interactive and (self._done == self._begun or self._done == self._total):
            where = f"step {self._done + 1}/{self._total}" if self._done < self._total else f"after step {self._total}"
            self._console.print(f"{where}: {words} ...", highlight=False, markup=False, soft_wrap=True)
        self._show()

    def step_done(self, record: Mapping[str, float | int | str | None]) -> None:
        """Show a step's reward with its parts, and accuracies."""
        self._done += 1
        forms = {**_WORDS, **{key: _part_words(key) for key in record if key.startswith(PART_PREFIX)}}
        shown = [form(value) for key, form in forms.items() if isinstance(value := record.get(key), int | float)]
        self._words = "  ".join(shown)
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

    `keys` of a step's record are its lines, with matplotlib's line style. `unit` is at its axis. Where it `can_be_log`,
    that axis is logarithmic if the values span more than two orders of magnitude.
    """

    title: str
    keys: Mapping[str, str]
    unit: str
    can_be_log: bool = False
    is_shown_at_zero: bool = True

    def has_something(self, values: Iterable[float]) -> bool:
        """Whether there is anything to be seen."""
        drawn = list(filter(math.isfinite, values))
        return bool(drawn) and (self.is_shown_at_zero or any(drawn))


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
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_run(steps: Sequence[StepRecord], path: Path, *, title: str) -> None:
    """Draw one run to a PNG, with the parts of its reward where it has any."""
    parts = sorted({key for record in steps for key in record if key.startswith(PART_PREFIX)})
    held_out = {part: f"held_out_{part}" for part in parts}
    styles = {key: style for part in parts for key, style in ((part, "-"), (held_out[part], "--"))}
    of_parts = Panel("parts of the reward; dashed: held out", styles, "mean")
    panels = (PANELS[0], *([of_parts] if parts else []), *PANELS[1:])
    lines = {key: values_of(key, steps) for panel in panels for key in panel.keys}

    def draw(axes: Axes, panel: Panel) -> Iterable[float]:
        for key, dashes in panel.keys.items():
            values = lines[key]
            if not values:
                continue
            # one point is no line, and a few may have gaps between them
            marker = "o" if len(values) <= _MOST_MARKED else ""
            color = axes.get_lines()[-1].get_color() if key in held_out.values() else None
            label = key.removeprefix(PART_PREFIX) if key in held_out else None
            style: dict[str, Any] = {"linestyle": dashes, "marker": marker, "color": color, "label": label}
            axes.plot(list(values), list(values.values()), markersize=3, linewidth=1.4, **style)
        if panel is of_parts:
            axes.legend()
        return [value for key in panel.keys for value in lines[key].values()]

    shown = [panel for panel in panels if panel.has_something(v for key in panel.keys for v in lines[key].values())]
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
        with replaced(path) as beside:
            figure.savefig(beside, format="png")


def _finish(axes: Axes, panel: Panel, positive: Sequence[float]) -> None:
    # a linear axis would hide the small ones
    if panel.can_be_log and positive and max(positive) > _LOG_FROM_RATIO * min(positive):
        axes.set_yscale("log", nonpositive="mask")
    axes.set(title=panel.title, xlabel="step", ylabel=panel.unit)
    axes.locator_params(axis="x", integer=True, nbins=6)
    axes.grid(visible=True, alpha=0.3)
