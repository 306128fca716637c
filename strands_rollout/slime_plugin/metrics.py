"""A step's finished samples -> numbers: what the agents did, how it ended, and where the time went.

Knows finished samples; nothing of wandb, slime or tokenizers. A fact that no sample has makes no metric; a share is of
the samples that have the fact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from strands_rollout.finished_sample import FinishedSample
from strands_rollout.retokenisation.meter import DriftTotals, EpisodeDrift, totals_of
from strands_rollout.stop_reason import StopReason

Metrics = dict[str, float]
Samples = Sequence[FinishedSample]

PER_SAMPLE: Final = (
    "turns",
    "tool_iterations",
    "tool_calls",
    "parse_failures",
    "tool_errors",
    "tool_timeouts",
    "tool_s",
    "generate_s",
    "duration_s",
    "sampled_tokens",
    "stale_tokens",
    "aborts",
    "resumes",
    "engine_aborts",
)
"""Facts that are one number a sample; a metric's name is the fact's."""
STATUSES: Final = ("completed", "truncated", "failed", "aborted")
TRUNCATING: Final = tuple(
    str(reason)
    for reason in StopReason
    if reason not in {StopReason.COMPLETED, StopReason.ABORTED} and not reason.endswith("_error")
)
"""Stop reasons of TRUNCATED samples."""


def distribution(name: str, values: Iterable[float | None]) -> Metrics:
    """Mean, 50th, 90th and 99th percentile (interpolated) and maximum of the values that are there; empty for none."""
    present = [value for value in values if value is not None]
    if not present:
        return {}
    p50, p90, p99 = np.quantile(present, [0.5, 0.9, 0.99]).tolist()
    statistics = {"mean": float(np.mean(present)), "p50": p50, "p90": p90, "p99": p99, "max": float(max(present))}
    return {f"{name}/{statistic}": value for statistic, value in statistics.items()}


def shares(name: str, values: Iterable[str | None], known: Iterable[str] = ()) -> Metrics:
    """The share of each value among those that are there; 0.0 for a known value that is not, empty without any."""
    counts = Counter(value for value in values if value is not None)
    total = counts.total()
    return {f"{name}/{value}": counts[value] / total for value in dict.fromkeys([*known, *counts])} if total else {}


def per_sample_metrics(samples: Samples) -> Metrics:
    """The facts that are one number, each as a distribution."""
    metrics: Metrics = {"samples": float(len(samples))} if samples else {}
    for name in PER_SAMPLE:
        metrics |= distribution(name, [sample.number(name) for sample in samples])
    return metrics


def ending_metrics(samples: Samples) -> Metrics:
    """Shares of stop reasons, of statuses, of what truncated those that were, and of samples kept out of training."""
    reasons = [(sample.text("stop_reason"), sample.status) for sample in samples]
    removals = [sample.is_removed for sample in samples if sample.status is not None]
    removed = [float(is_removed) for is_removed in removals if is_removed is not None]
    return {
        **shares("stop_reason", (reason for reason, _ in reasons), map(str, StopReason)),
        **shares("truncation", (reason for reason, status in reasons if status == "truncated"), TRUNCATING),
        **shares("status", (status for _, status in reasons), STATUSES),
        **({"removed": sum(removed) / len(removed)} if removed else {}),
    }


def budget_metrics(samples: Samples) -> Metrics:
    """How much of each budget was used, 0 to 1; of the samples that have a limit."""
    metrics: Metrics = {}
    for name in _keys_of(samples, "budgets"):
        metrics |= distribution(f"budget/{name}", [sample.number("budgets", name) for sample in samples])
    return metrics


def code_metrics(samples: Samples) -> Metrics:
    """The code executor: seconds as distributions over the samples, everything else as totals by outcome."""
    metrics: Metrics = {}
    for name in _keys_of(samples, "code"):
        values = [value for sample in samples if (value := sample.number("code", name)) is not None]
        if name.endswith("_s"):
            metrics |= distribution(f"code/{name}", values)
        elif values:
            metrics[f"code/{name}"] = sum(values)
    if {"code/calls", "code/timeouts", "code/killed"} <= metrics.keys():
        metrics["code/finished"] = metrics["code/calls"] - metrics["code/timeouts"] - metrics["code/killed"]
    return metrics


def weight_metrics(samples: Samples) -> Metrics:
    """Distinct weight versions of each sample, and how far its newest is from its oldest where they are integers."""
    return {
        **distribution("weight_versions", [len(sample.weight_versions) or None for sample in samples]),
        **distribution("weight_version_spread", [sample.weight_version_spread for sample in samples]),
    }


def score_metrics(samples: Samples) -> Metrics:
    """Seconds in the reward function."""
    return distribution("score_s", [sample.score_s for sample in samples])


def slowest_metrics(samples: Samples) -> Metrics:
    """Where the time of the slowest sample went, its episode and its reward, in seconds.

    Only samples that say how long their episode took are looked at; of a fan-out that is the main agent's.
    Tools that ran at once count each: then the rest is at least 0, and the parts may sum to more than the total.
    """
    durations = [(sample.number("duration_s"), sample) for sample in samples]
    timed = [(seconds + (sample.score_s or 0.0), sample) for seconds, sample in durations if seconds is not None]
    if not timed:
        return {}
    total_s, slowest = max(timed, key=lambda entry: entry[0])
    parts = {
        "generate_s": slowest.number("generate_s") or 0.0,
        "tool_s": slowest.number("tool_s") or 0.0,
        "score_s": slowest.score_s or 0.0,
    }
    other_s = max(0.0, total_s - sum(parts.values()))
    return {f"slowest/{name}": value for name, value in {"total_s": total_s, **parts, "other_s": other_s}.items()}


def drift_metrics(drifts: Sequence[EpisodeDrift]) -> Metrics:
    """What text would have cost each measured sample, of what kind, and context that is not the template's."""
    if not drifts:
        return {}
    totals = totals_of(drifts)
    return {
        **distribution("drift_tokens", [drift.turn_drift for drift in drifts]),
        **distribution("drift_share", [drift.turn_drift / drift.sampled_tokens for drift in drifts]),
        **distribution("text_drift_tokens", [drift.text_drift for drift in drifts]),
        **distribution("off_policy_tokens", [drift.off_policy for drift in drifts]),
        "drift_samples": float(totals.drifted_episodes),
        "drift_samples_share": totals.drifted_share,
        "drift_measured": float(totals.episodes),
        **{f"drift_kind/{name.replace(' ', '_')}": float(count) for name, count in totals.classes.items()},
        **_mismatch_metrics(drifts, totals),
    }


def _mismatch_metrics(drifts: Sequence[EpisodeDrift], totals: DriftTotals) -> Metrics:
    checked = [drift for drift in drifts if drift.mismatches is not None]
    if not checked or totals.mismatched_episodes is None:
        return {}
    return {
        **distribution("mismatch_tokens", [drift.mismatched_tokens for drift in checked]),
        "mismatch_samples": float(totals.mismatched_episodes),
        "mismatch_samples_share": totals.mismatched_episodes / len(checked),
        "mismatch_measured": float(len(checked)),
    }


GROUPS: Final[Mapping[str, Callable[[Samples], Metrics]]] = {
    "per_sample": per_sample_metrics,
    "ending": ending_metrics,
    "budget": budget_metrics,
    "code": code_metrics,
    "weights": weight_metrics,
    "score": score_metrics,
    "slowest": slowest_metrics,
}
"""Metrics that need nothing but the samples; each is computed apart, so that one that fails costs no other."""


def _keys_of(samples: Samples, fact: str) -> list[str]:
    """Keys of a fact that is a mapping, in order of first appearance."""
    mappings = (sample.facts.get(fact) for sample in samples)
    return list(dict.fromkeys(str(key) for mapping in mappings if isinstance(mapping, Mapping) for key in mapping))
