"""Training runs side by side: grouped by everything but their seeds, each group with its figures.

Knows recorded runs; must not know how anything is shown.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from strands_rollout.errors import ConfigError
from strands_rollout.train.recorded_run import RecordedRun
from strands_rollout.train.run_figures import FIGURES, Spread, spread_of

_ALL: Final = "all"
# what a run's result does not depend on, the seed, and what is told by another name
_NEVER_TOLD_APART_BY: Final = frozenset(
    {"seed", "out", "json_only", "wandb", "threads", "save_every", "gap_limit", "update.temperature"}
)


@dataclass(frozen=True, slots=True)
class Variant:
    """Runs that differ in their seeds alone.

    Attributes:
        label: The options in which the compared runs differ, with this variant's values.
        runs: At least one, each of another seed.
        figures: Those of `FIGURES`, by name.
    """

    label: str
    runs: list[RecordedRun]
    figures: dict[str, Spread]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared, and what a reader must know about it.

    Attributes:
        variants: In the order in which their first runs were given.
        notes: Sentences: runs that are not finished, values that are not finite, code that differs.
    """

    variants: list[Variant]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
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
    """Group runs and sum them up.

    Raises:
        ConfigError: Two runs are alike in their seed too, so that they would count twice.
    """
    options = [_flat(run.options) for run in runs]
    varied = [name for name in dict.fromkeys(name for one in options for name in one) if _differs(name, options)]
    groups: dict[str, list[RecordedRun]] = {}
    for run, own in zip(runs, options, strict=True):
        label = ", ".join(f"{name}={own.get(name, '-')}" for name in varied) or _ALL
        groups.setdefault(label, []).append(run)
    return Comparison([_variant(label, group) for label, group in groups.items()], list(_notes(runs)))


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Options as texts under dotted names, without those that tell no variants apart."""
    texts: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            texts |= _flat(value, f"{prefix}{name}.")
        elif prefix + name not in _NEVER_TOLD_APART_BY:
            texts[prefix + name] = value if isinstance(value, str) else json.dumps(value)
    return texts


def _differs(name: str, options: Sequence[Mapping[str, str]]) -> bool:
    return len({own.get(name) for own in options}) > 1


def _variant(label: str, runs: list[RecordedRun]) -> Variant:
    seed, times = Counter(json.dumps(run.seed) for run in runs).most_common(1)[0]
    if times > 1:
        raise ConfigError(
            f"got {times} runs of {label} with seed {seed}; expected one of each seed; leave the rest out"
        )
    figures = {name: spread_of([figure(run) for run in runs]) for name, figure in FIGURES.items()}
    return Variant(label, runs, figures)


def _notes(runs: Sequence[RecordedRun]) -> Iterator[str]:
    for run in runs:
        if run.summary is None:
            yield f"{run.folder} is not finished: {len(run.steps)} steps"
        for name, times in Counter(name for record in run.steps for name in record if record[name] is None).items():
            yield f"{run.folder}: {name} is no finite number in {times} of {len(run.steps)} steps"
    for name in dict.fromkeys(name for run in runs for name in run.made_by):
        values = list(dict.fromkeys(str(run.made_by.get(name)) for run in runs))
        if len(values) > 1:
            yield f"the runs differ in {name}: {', '.join(values)}"
