"""Samples -> figures: which there are, how each is computed, and how the sandbox compares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from sandbox_benchmark.rounds import Samples

Figures = dict[str, float | None]
"""Key -> value; None where the contender has no such thing, or the machine does not show it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result.

    Attributes:
        key: Its name in JSON, with the unit.
        label: Its name in the table.
    """

    key: str
    label: str


def _figures() -> list[Figure]:
    found = []
    for program in ("trivial", "numpy", "sympy"):
        found += [Figure(f"{program}_{p}_ms", f"{program}, one at a time: {p}, ms") for p in ("p50", "p99")]
    for program in ("trivial", "sympy"):
        found.append(Figure(f"{program}_at_once_per_s", f"{program}, many at once: calls per s"))
        found += [Figure(f"{program}_lag_{p}_ms", f"  loop lag: {p}, ms") for p in ("p50", "p99", "max")]
        found.append(Figure(f"{program}_client_cpu_ms", "  CPU of the caller per call, ms"))
        found.append(Figure(f"{program}_total_cpu_ms", "  CPU of all processes per call, ms"))
    for name in ("child", "supervisor", "template"):
        found.append(Figure(f"{name}_uss_mb", f"memory of {'a ' if name == 'child' else 'the '}{name}: private, MiB"))
        found.append(Figure(f"{name}_pss_mb", "  with its share of shared pages, MiB"))
    found += [Figure("start_ms", "start, ms"), Figure("first_call_ms", "first call after it, ms")]
    return [*found, *(Figure(f"session_{p}_ms", f"trivial, in a session: {p}, ms") for p in ("p50", "p99"))]


FIGURES: Final = _figures()


def figures_of(samples: Samples) -> Figures:
    """All figures of one contender.

    A p50 is the median of the rounds' medians, and so is everything else that a round has one of; a p99 and a maximum
    are of all rounds together.
    """
    found: Figures = dict.fromkeys(figure.key for figure in FIGURES)
    for program, rounds in samples.calls_ms.items():
        found[f"{program}_p50_ms"] = median(map(median, rounds))
        found[f"{program}_p99_ms"] = percentile([took_ms for calls in rounds for took_ms in calls], 0.99)
    for program, phases in samples.at_once.items():
        lags = [lag for phase in phases for lag in phase["lags_ms"]]
        found[f"{program}_at_once_per_s"] = median(phase["per_s"] for phase in phases)
        found[f"{program}_lag_p50_ms"] = percentile(lags, 0.5)
        found[f"{program}_lag_p99_ms"] = percentile(lags, 0.99)
        found[f"{program}_lag_max_ms"] = max(lags, default=None)
        for name in ("client_cpu_ms", "total_cpu_ms"):
            values = [phase[name] for phase in phases if phase[name] is not None]
            found[f"{program}_{name}"] = median(values) if values else None
    for name in ("start_ms", "first_call_ms"):
        found[name] = median(start[name] for start in samples.starts) if samples.starts else None
    return found | (samples.memory or {})


def ratios(figures: Figures, others: Figures) -> Figures:
    """Figure -> how many times the other's it is; None where either is missing."""
    found: Figures = {}
    for figure in FIGURES:
        own, other = figures[figure.key], others[figure.key]
        found[figure.key] = None if own is None or not other else own / other
    return found


def percentile(values: Sequence[float], share: float) -> float | None:
    """The least value that is not below that share of all values; None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def rounded(figures: Mapping[str, float | None]) -> Figures:
    """As numbers that can be read: four significant digits."""
    return {key: None if value is None else float(f"{value:.4g}") for key, value in figures.items()}
