"""Compare training runs: group those that differ only in their seed, and tabulate each group's figures."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import stdev
from typing import Any, Final

from strands_rollout.errors import ConfigError
from strands_rollout.files.json_files import read_json
from strands_rollout.train.run_folder import (
    OPTIONS_FILE,
    STEPS_FILE,
    SUMMARY_FILE,
    StepRecord,
    read_steps,
    with_final_evaluation,
)

GOAL: Final = 0.95
_TIMES: Final = ("rollout_s", "train_s", "sync_s", "eval_s")
_EXPECTED: Final = "expected the folder of a training run"
_ALL: Final = "all"
_NONE: Final = "-"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The records of a run, which may still be running.

    Attributes:
        folder: Folder of the run.
        options: Options by name.
        provenance: Commit and versions of packages, by name.
        steps: Records of the finished steps.
        summary: Result of the run; None until it is finished.
    """

    folder: Path
    options: Mapping[str, Any]
    provenance: Mapping[str, Any]
    steps: list[StepRecord]
    summary: Mapping[str, Any] | None

    @property
    def seed(self) -> object:
        """The seed of the run."""
        return self.options.get("seed")

    @property
    def points(self) -> list[StepRecord]:
        """Records of the steps and, if the run is finished, of the last evaluation."""
        return with_final_evaluation(self.steps, self.summary)


def read_run(folder: Path) -> RecordedRun:
    """Read `options.json` (`options`, `versions`, `commit`), `steps.jsonl` and, if it exists, `summary.json`.

    Raises:
        ConfigError: A file is missing or malformed, or no step is finished yet.
    """
    recorded = read_json(folder / OPTIONS_FILE, advice=_EXPECTED)
    options = recorded.get("options")
    if not isinstance(options, dict):
        raise ConfigError(f"{folder / OPTIONS_FILE} has no options; expected the folder of a training run")
    steps = read_steps(folder / STEPS_FILE)
    if not steps:
        raise ConfigError(f"{folder / STEPS_FILE} is empty; expected a run with at least one finished step")
    versions = recorded.get("versions")
    provenance = {"commit": recorded.get("commit"), **(versions if isinstance(versions, dict) else {})}
    summary = folder / SUMMARY_FILE
    return RecordedRun(
        folder, options, provenance, steps, read_json(summary, advice=_EXPECTED) if summary.exists() else None
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure of runs that differ only in their seed.

    Attributes:
        mean: The mean over all runs; None if any run lacks the figure, because a mean over the others would be biased.
        std: The sample standard deviation; None for fewer than two runs.
        by_seed: The figure of each run, None if missing.
    """

    mean: float | None
    std: float | None
    by_seed: list[float | None]


def spread_of(by_seed: Sequence[float | None]) -> Spread:
    """Return the spread of a figure."""
    known = [value for value in by_seed if value is not None]
    if not known or len(known) < len(by_seed):
        return Spread(None, None, list(by_seed))
    return Spread(math.fsum(known) / len(known), stdev(known) if len(known) > 1 else None, list(by_seed))


def _values(run: RecordedRun, key: str) -> list[float]:
    """Return the finite values of a key in a run's steps."""
    return [float(value) for record in run.steps if isinstance(value := record.get(key), int | float)]


def _accuracies(run: RecordedRun) -> list[tuple[int, float]]:
    """Return the number of updates and the accuracy for each measurement."""
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


def _combine_steps(key: str, combine: Callable[[Sequence[float]], float]) -> Callable[[RecordedRun], float | None]:
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
    "logprob_gap_max": _combine_steps("logprob_gap_max", max),
    "kl_k3_mean": _combine_steps("kl_k3", _mean),
    "kl_k3_max": _combine_steps("kl_k3", max),
    "drift_tokens_mean": _combine_steps("drift_tokens", _mean),
    "drift_episodes_mean": _combine_steps("drift_episodes", _mean),
    "ratio_min": _combine_steps("ratio_min", min),
    "ratio_max": _combine_steps("ratio_max", max),
    "minutes": _minutes,
}
"""Functions that compute a figure of a run, by the name of the figure; they return None if the run lacks the data.

Accuracies are of held-out problems; the last measurement is the final accuracy. `step_at_goal` is the number of updates
at the first measurement of at least `GOAL`. Means are over steps. `minutes` are wall-clock time without the start and
the last evaluation.
"""


# options that don't affect a run's result, the seed, and options that are also recorded under another name
_IGNORED_OPTIONS: Final = frozenset(
    {"seed", "out", "json_only", "wandb", "threads", "save_every", "gap_limit", "update.temperature"}
)


@dataclass(frozen=True, slots=True)
class Variant:
    """Runs that differ only in their seeds.

    Attributes:
        label: The options in which the compared runs differ, with this variant's values.
        runs: At least one run; each has another seed.
        figures: For each name in `FIGURES`, the spread of this figure over the runs.
    """

    label: str
    runs: list[RecordedRun]
    figures: dict[str, Spread]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The compared variants, and notes for the reader.

    Attributes:
        variants: In the order in which their first runs were given.
        notes: Sentences about unfinished runs, values that are not finite, and runs made with different code.
    """

    variants: list[Variant]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON."""
        variants = [
            {
                "label": variant.label,
                "runs": [str(run.folder) for run in variant.runs],
                "seeds": [run.seed for run in variant.runs],
                "steps": [len(run.steps) for run in variant.runs],
                **{name: asdict(spread) for name, spread in variant.figures.items()},
            }
            for variant in self.variants
        ]
        return {"variants": variants, "notes": self.notes}


def compare_runs(runs: Sequence[RecordedRun]) -> Comparison:
    """Group runs and summarize each group.

    Raises:
        ConfigError: Two runs have the same options and seed, so that they would count twice.
    """
    options = [_flatten(run.options) for run in runs]
    varied = [name for name in dict.fromkeys(name for own in options for name in own) if _differs(name, options)]
    groups: dict[str, list[RecordedRun]] = {}
    for run, own in zip(runs, options, strict=True):
        label = ", ".join(f"{name}={own.get(name, '-')}" for name in varied) or _ALL
        groups.setdefault(label, []).append(run)
    return Comparison([_variant(label, group) for label, group in groups.items()], list(_notes(runs)))


def _flatten(options: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the options as texts under dotted names, without options that don't distinguish variants."""
    texts: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            texts |= _flatten(value, f"{prefix}{name}.")
        elif prefix + name not in _IGNORED_OPTIONS:
            texts[prefix + name] = value if isinstance(value, str) else json.dumps(value)
    return texts


def _differs(name: str, options: Sequence[Mapping[str, str]]) -> bool:
    return len({own.get(name) for own in options}) > 1


def _variant(label: str, runs: list[RecordedRun]) -> Variant:
    seed, times = Counter(json.dumps(run.seed) for run in runs).most_common(1)[0]
    if times > 1:
        raise ConfigError(f"got {times} runs of {label} with seed {seed}; expected one run per seed")
    figures = {name: spread_of([figure(run) for run in runs]) for name, figure in FIGURES.items()}
    return Variant(label, runs, figures)


def _notes(runs: Sequence[RecordedRun]) -> Iterator[str]:
    for run in runs:
        if run.summary is None:
            yield f"{run.folder} is not finished: {len(run.steps)} steps"
        for name, times in Counter(name for record in run.steps for name in record if record[name] is None).items():
            yield f"{run.folder}: {name} is not a finite number in {times} of {len(run.steps)} steps"
    for name in dict.fromkeys(name for run in runs for name in run.provenance):
        values = list(dict.fromkeys(str(run.provenance.get(name)) for run in runs))
        if len(values) > 1:
            yield f"the runs differ in {name}: {', '.join(values)}"


def comparison_table(comparison: Comparison) -> str:
    """Return a table with a row per variant, followed by the meaning of ± and the notes."""
    rows = [["variant", *_COLUMNS], ["---", *(["---:"] * len(_COLUMNS))]]
    rows += [
        [variant.label.replace("|", "\\|"), *(cell(variant) for cell in _COLUMNS.values())]
        for variant in comparison.variants
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    legend = "Mean ± standard deviation over seeds; accuracy is of held-out problems."
    return "\n\n".join([table, legend, *(f"- {note}" for note in comparison.notes)])


def _share(name: str) -> Callable[[Variant], str]:
    return lambda variant: _mean_and_std(variant.figures[name], lambda value: f"{value:.1%}")


def _number(name: str, form: str) -> Callable[[Variant], str]:
    return lambda variant: _mean_and_std(variant.figures[name], lambda value: format(value, form))


def _mean_and_std(spread: Spread, written: Callable[[float], str]) -> str:
    if spread.mean is None:
        return _NONE
    return written(spread.mean) + ("" if spread.std is None else f" ± {written(spread.std)}")


def _by_seed(variant: Variant) -> str:
    reached = variant.figures["step_at_goal"].by_seed
    return ", ".join("never" if step is None else str(int(step)) for step in reached)


def _extreme(name: str, choose: Callable[[list[float]], float], form: str) -> Callable[[Variant], str]:
    def cell(variant: Variant) -> str:
        values = [value for value in variant.figures[name].by_seed if value is not None]
        return format(choose(values), form) if values else _NONE

    return cell


_COLUMNS: Final[Mapping[str, Callable[[Variant], str]]] = {
    "seeds": lambda variant: str(len(variant.runs)),
    "accuracy, start": _share("accuracy_start"),
    "end": _share("accuracy_end"),
    "best": _share("accuracy_best"),
    f"steps to {GOAL:.0%}, by seed": _by_seed,
    "greatest logprob gap at step 0": _extreme("logprob_gap_max_step0", max, ".2g"),
    "KL (k3)": _number("kl_k3_mean", ".2g"),
    "drifted tokens": _share("drift_tokens_mean"),
    "least ratio": _extreme("ratio_min", min, ".5g"),
    "greatest": _extreme("ratio_max", max, ".5g"),
    "minutes": _number("minutes", ".1f"),
}
