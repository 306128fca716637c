"""One step in numbers, as its line of the log has them. Knows names; computes nothing but means and shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from strands_rollout.episode_facts import episode_facts, fan_out_part
from strands_rollout.retokenisation.meter import EpisodeDrift, totals_of
from strands_rollout.sample_type import Sample
from strands_rollout.train.logprob_gap import LogprobGap
from strands_rollout.train.step_batch import StepBatch


def batch_figures(batch: StepBatch, version: int) -> dict[str, float]:
    """What a step's samples amount to; siblings of a fan-out are one episode, which their main agent's stands for.

    Args:
        batch: The step's.
        version: Of the weights that are about to be updated; older tokens are stale.
    """
    samples = batch.samples
    episodes = [sample for sample in samples if not fan_out_part(sample)]
    graded = [sample.reward for sample in episodes if isinstance(sample.reward, dict)]
    statuses = Counter(sample.status for sample in episodes)
    sampled = sum(drift.sampled_tokens for drift in batch.drifts)
    figures: dict[str, float] = {
        "episodes": len(episodes),
        "samples": len(samples),
        "reward": _mean(float(reward["score"]) for reward in graded),
        "accuracy": _mean(float(reward["acc"]) for reward in graded),
        "response_length": _mean(sample.response_length for sample in samples),
        **{
            name: sum(_fact(sample, name) for sample in samples) / max(len(episodes), 1)
            for name in ("sampled_tokens", "tool_calls", "turns")
        },
        "dropped_groups": batch.dropped_groups,
        **{status.value: statuses[status] for status in Sample.Status if status is not Sample.Status.PENDING},
        **_staleness(samples, version),
    }
    figures |= _text_endpoint(samples)
    if sampled:
        figures["drift_tokens"] = sum(drift.drift_tokens for drift in batch.drifts) / sampled
        figures["drift_episodes"] = _mean(float(drift.drift_tokens > 0) for drift in batch.drifts)
    return figures | _context_figures(batch.measured)


def _context_figures(measured: Sequence[EpisodeDrift]) -> dict[str, float]:
    """Off-policy tokens of the text, as a share of the sampled ones; context tokens that are not the template's."""
    if not measured:
        return {}
    totals = totals_of(measured)
    figures: dict[str, float] = {"off_policy_tokens": totals.off_policy_share}
    if totals.mismatched_tokens is not None:
        figures["mismatch_tokens"] = totals.mismatched_tokens
    return figures


def gap_figures(gap: LogprobGap) -> dict[str, float]:
    """The gap by the names of the log; nothing where no token could be compared."""
    if not gap.tokens:
        return {}
    return {"kl_k3": gap.k3, "logprob_gap_max": gap.largest, "logprob_gap_mean": gap.mean}


def _text_endpoint(samples: Iterable[Sample]) -> dict[str, float]:
    """What the way by text has changed; nothing of samples that did not go it.

    The share of turns that were sampled after another prompt than the one that is trained before them, and of trained
    tokens that were not sampled.
    """
    found = [facts for sample in samples if (facts := episode_facts(sample)).get("text_endpoint")]
    turns = sum(facts["turns"] for facts in found)
    trained = sum(facts["text_endpoint"]["trained_tokens"] for facts in found)
    if not turns or not trained:
        return {}
    reread = sum(facts["text_endpoint"]["reread_turns"] for facts in found)
    unsampled = sum(facts["text_endpoint"]["unmatched_trained"] or 0 for facts in found)
    return {"reread_turns": reread / turns, "unsampled_tokens": unsampled / trained}


def _staleness(samples: Iterable[Sample], version: int) -> dict[str, float]:
    """Shares of sampled tokens that older weights have sampled, by the versions that their spans name."""
    tokens_of_age: Counter[int] = Counter()
    for sample in samples:
        for _, start, end, sampled_by in episode_facts(sample).get("spans") or []:
            age = version - int(sampled_by) if str(sampled_by).isdecimal() else 0
            tokens_of_age[age] += end - start
    total = tokens_of_age.total()
    stale = sum(count for age, count in tokens_of_age.items() if age > 0)
    return {"stale_tokens": stale / total if total else 0.0, "staleness_max": max(tokens_of_age, default=0)}


def _fact(sample: Sample, name: str) -> float:
    facts: Mapping[str, Any] = episode_facts(sample)
    return float(facts.get(name) or 0)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
