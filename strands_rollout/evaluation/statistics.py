"""What right and wrong samples of problems amount to: accuracy with its uncertainty, and pass@k. Pure.

Knows numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

CONFIDENCE: Final = 0.95
_LARGEST_T: Final = 1e4


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The share of right samples, and how well it is known.

    Attributes:
        mean: Right samples / samples; None without samples.
        standard_error: None with less than two problems; 0 where all have the same accuracy, which says nothing.
        interval: Bounds of the 95% confidence interval, within 0 and 1; None where the standard error is None or 0.
    """

    mean: float | None
    standard_error: float | None
    interval: tuple[float, float] | None


def accuracy_of(counts: Sequence[tuple[int, int]]) -> Accuracy:
    """The accuracy over all samples, taking problems, not samples, as independent draws.

    Samples of one problem are alike, so the standard error is clustered by problem: with accuracy p, and c right of n
    samples of each of m problems, sqrt(m / (m - 1) * sum((c - p * n)^2)) / sum(n), which for equal n is the standard
    error of the problems' means. The interval is p -+ t * standard error, t being Student's with m - 1 degrees of
    freedom. Where all problems have the same accuracy (all solved, none solved) there is none.

    Args:
        counts: Right samples and samples of each problem; problems without samples are left out.
    """
    sampled = [(right, total) for right, total in counts if total]
    samples, problems = sum(total for _, total in sampled), len(sampled)
    if not samples:
        return Accuracy(None, None, None)
    all_right = sum(right for right, _ in sampled)
    mean = all_right / samples
    if problems == 1:
        return Accuracy(mean, None, None)
    if all(right * samples == all_right * total for right, total in sampled):
        return Accuracy(mean, 0.0, None)
    spread = math.fsum((right - mean * total) ** 2 for right, total in sampled)
    error = math.sqrt(problems / (problems - 1) * spread) / samples
    reach = t_quantile(problems - 1) * error
    return Accuracy(mean, error, (max(0.0, mean - reach), min(1.0, mean + reach)))


def pass_at_k(right: int, total: int, k: int) -> float:
    """The chance that k of these samples, drawn without replacement, hold a right one: 1 - C(n - c, k) / C(n, k).

    Raises:
        ValueError: There are fewer than k samples.
    """
    if not 1 <= k <= total:
        raise ValueError(f"got k={k} with {total} samples; expected 1 to {total}")
    return 1.0 - math.comb(total - right, k) / math.comb(total, k)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float | None:
    """The mean of pass@k over the problems that have k samples; None if none has.

    Args:
        counts: Right samples and samples of each problem.
        k: Samples drawn.
    """
    passed = [pass_at_k(right, total, k) for right, total in counts if total >= k]
    return math.fsum(passed) / len(passed) if passed else None


def t_quantile(degrees: int) -> float:
    """The t that Student's distribution exceeds in neither direction with a chance of `CONFIDENCE`."""
    low, high = 0.0, _LARGEST_T
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < CONFIDENCE else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """The chance that |T| <= t, by the finite series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3-4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term = cosine if is_odd else 1.0
    series = 0.0
    for step in range(1 + is_odd, degrees, 2):
        series += term
        term *= cosine**2 * step / (step + 1)
    return 2 / math.pi * (angle + sine * series) if is_odd else sine * series
