"""A comparison of training runs as Markdown, for a terminal and for a README."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from strands_rollout.train.comparison import Comparison, Variant
from strands_rollout.train.run_figures import GOAL, Spread

_NONE: Final = "-"


def comparison_table(comparison: Comparison) -> str:
    """One row a variant, the meaning of ± and the notes below it."""
    rows = [["variant", *_COLUMNS], ["---", *(["---:"] * len(_COLUMNS))]]
    rows += [
        [variant.label.replace("|", "\\|"), *(cell(variant) for cell in _COLUMNS.values())]
        for variant in comparison.variants
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    told = "Mean ± standard deviation over seeds; accuracy is of held-out problems."
    return "\n\n".join([table, told, *(f"- {note}" for note in comparison.notes)])


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
