"""Raw measurements -> medians, and ratios that are taken round by round, then their median.

A round's measurements lie within minutes of each other: a machine that others use as well is then the same for both
sides of a ratio.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from strands_rollout.bench.bench_plan import Step
from strands_rollout.bench.job import Figures


@dataclass(frozen=True, slots=True)
class Measurement:
    """One worker's figures.

    Attributes:
        step: What was measured.
        figures: What was found.
    """

    step: Step
    figures: Figures

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self.step), "figures": self.figures}


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of two CPU times, taken round by round.

    Attributes:
        value: The rounds' median.
        least: The least round's.
        most: The largest round's.
        rounds: How many had both.
    """

    value: float
    least: float
    most: float
    rounds: int


def medians(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    """One row for each thing that was measured, with the median of each number over its rounds."""
    found: dict[Step, list[Figures]] = {}
    for one in measurements:
        found.setdefault(replace(one.step, round=0), []).append(one.figures)
    return [{**_place(step), "rounds": len(rounds), **_medians_of(rounds)} for step, rounds in found.items()]


def _place(step: Step) -> dict[str, Any]:
    return {name: value for name, value in asdict(step).items() if name != "round"}


def _medians_of(rounds: Sequence[Figures]) -> dict[str, float]:
    numbers = [name for name, value in rounds[0].items() if type(value) in (int, float)]
    return {name: median(figures[name] for figures in rounds) for name in numbers}


def cpu_ratio(
    measurements: Iterable[Measurement], variant: str, other: str, turns: int, concurrency: int
) -> Ratio | None:
    """The variant's CPU per trajectory in units of the other's."""
    found = _cpu_by_round(measurements, turns, concurrency).values()
    return _median_ratio([(cpu[variant], cpu[other]) for cpu in found if {variant, other} <= cpu.keys()])


def growth_ratio(
    measurements: Sequence[Measurement], variant: str, turns: tuple[int, int], concurrency: int
) -> Ratio | None:
    """The variant's CPU per trajectory at the second number of turns in units of that at the first one."""
    few, many = (_cpu_by_round(measurements, count, concurrency) for count in turns)
    pairs = [(many[number], few[number]) for number in many if number in few]
    return _median_ratio([(a[variant], b[variant]) for a, b in pairs if variant in a and variant in b])


def _cpu_by_round(measurements: Iterable[Measurement], turns: int, concurrency: int) -> dict[int, dict[str, float]]:
    rounds: dict[int, dict[str, float]] = {}
    for one in measurements:
        if one.step.kind == "cpu" and (one.step.turns, one.step.concurrency) == (turns, concurrency):
            rounds.setdefault(one.step.round, {})[one.step.variant] = one.figures["cpu_ms_per_trajectory"]
    return rounds


def _median_ratio(pairs: Sequence[tuple[float, float]]) -> Ratio | None:
    values = [a / b for a, b in pairs]
    return Ratio(median(values), min(values), max(values), len(values)) if values else None


def all_ratios(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Ours beside each other variant, and how each variant grows from 20 to 80 tool turns."""
    places = sorted({(one.step.turns, one.step.concurrency) for one in measurements if one.step.kind == "cpu"})
    variants = list(dict.fromkeys(one.step.variant for one in measurements))
    found = [
        (f"ours / {other}", turns, concurrency, cpu_ratio(measurements, "ours", other, turns, concurrency))
        for turns, concurrency in places
        for other in variants
        if other != "ours"
    ]
    found += [
        (f"{variant}: 80 turns / 20 turns", 80, concurrency, growth_ratio(measurements, variant, (20, 80), concurrency))
        for concurrency in sorted({concurrency for _, concurrency in places})
        for variant in variants
    ]
    return [
        {"ratio": name, "turns": turns, "concurrency": concurrency, **asdict(ratio)}
        for name, turns, concurrency, ratio in found
        if ratio is not None
    ]
