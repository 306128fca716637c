"""A training step in numbers, and a run's invariant: the trainer's logprobs of sampled tokens are the rollout's.

Under the same weights both compute the same function of the same tokens. A difference means that the trainer sees other
tokens than the policy did, at other places, or with other logprobs than it wrote them with.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from strands_rollout.errors import TrajectoryError
from strands_rollout.samples import Sample, episode_facts, fan_out_part
from strands_rollout.slime_plugin.retokenisation import totals_of
from strands_rollout.train.batch import StepBatch, TrainingSequence

_MOST_SHOWN: Final = 10
_CONTEXT_TOKENS: Final = 8
_MOST_RATIO: Final = 50.0


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """How far the trainer's logprobs are from the rollout's, in nats, over all tokens where both are known.

    `k3` estimates KL(rollout || trainer), the mean over tokens. All is 0 where no token was compared.
    """

    largest: float
    mean: float
    k3: float
    tokens: int

    @classmethod
    def of(cls, sequences: Sequence[TrainingSequence], trainer: Sequence[Sequence[float]]) -> LogprobGap:
        """The gap over all trained tokens whose sampling logprob is known.

        `trainer` has the trainer's logprobs of each one's trained tokens, under the weights that sampled them.
        """
        log_ratios = [
            own[at] - sampled
            for sequence, own in zip(sequences, trainer, strict=True)
            for at, sampled in sequence.known_pairs
        ]
        if not log_ratios:
            return cls(0.0, 0.0, 0.0, 0)
        k3 = [math.expm1(min(ratio, _MOST_RATIO)) - ratio for ratio in log_ratios]
        return cls(
            largest=max((abs(ratio) for ratio in log_ratios), key=lambda gap: math.inf if math.isnan(gap) else gap),
            mean=math.fsum(map(abs, log_ratios)) / len(log_ratios),
            k3=math.fsum(k3) / len(log_ratios),
            tokens=len(log_ratios),
        )


def check_gap(
    sequences: Sequence[TrainingSequence],
    trainer: Sequence[Sequence[float]],
    limit: float,
    decode: Callable[[Sequence[int]], str],
) -> None:
    """Refuse to train where the two disagree by more than `limit`, in nats, which is taken for rounding.

    The sequences were sampled by the weights that are about to be updated.

    Raises:
        TrajectoryError: The gap is larger; the message shows the tokens with the largest differences. Or there is no
            token to compare.
    """
    gap = LogprobGap.of(sequences, trainer)
    if not gap.tokens:
        raise TrajectoryError(
            "got no token whose logprob under these weights is known; expected the rollout's logprobs, and spans with "
            "the weight version of the engine: it can't be checked that trainer and engine agree (--unchecked goes on)"
        )
    if gap.largest <= limit:
        return
    rows = [
        (abs(theirs - ours), number, position, theirs, ours)
        for number, (sequence, own) in enumerate(zip(sequences, trainer, strict=True))
        for at, theirs in sequence.known_pairs
        for position, ours in [(sequence.trained_positions[at], own[at])]
    ]
    worst = sorted(rows, reverse=True)[:_MOST_SHOWN]
    shown = "".join(
        f"\n  sequence {number}, {_place(sequences[number].tokens, position, decode)}: rollout {theirs:.4f}, trainer "
        f"{ours:.4f}"
        for _, number, position, theirs, ours in worst
    )
    raise TrajectoryError(
        f"under the same weights the trainer's logprobs differ from the rollout's by up to {gap.largest:.3g} (mean "
        f"{gap.mean:.3g}), {sum(row[0] > limit for row in rows)} of {len(rows)} trained tokens by more than {limit:g}; "
        "expected rounding alone. Either the tokens, their places or the mask are wrong, or the engine does not "
        f"compute as the trainer does (a lower precision: raise --gap-limit). The largest differences:{shown}"
    )


def _place(tokens: Sequence[int], position: int, decode: Callable[[Sequence[int]], str]) -> str:
    before = tokens[max(0, position - _CONTEXT_TOKENS) : position]
    return f"token {position} of {len(tokens)}: {decode([tokens[position]])!r} after {decode(before)!r}"


def batch_figures(batch: StepBatch, version: int) -> dict[str, float]:
    """What a step's samples amount to; siblings of a fan-out are one episode, which their main agent's stands for.

    `version` is of the weights that are about to be updated; older tokens are stale.
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
            name: sum(float(episode_facts(sample).get(name) or 0) for sample in samples) / max(len(episodes), 1)
            for name in ("sampled_tokens", "tool_calls", "turns")
        },
        "dropped_groups": batch.dropped_groups,
        **{status.value: statuses[status] for status in Sample.Status if status is not Sample.Status.PENDING},
        **_staleness(samples, version),
    }
    figures |= batch.extra_figures
    if sampled:
        figures["drift_tokens"] = sum(drift.drift_tokens for drift in batch.drifts) / sampled
        figures["drift_episodes"] = _mean(float(drift.drift_tokens > 0) for drift in batch.drifts)
    if batch.measured:
        totals = totals_of(batch.measured)
        figures["off_policy_tokens"] = totals.off_policy_share
        if totals.mismatched_tokens is not None:
            figures["mismatch_tokens"] = totals.mismatched_tokens
    return figures


def gap_figures(gap: LogprobGap) -> dict[str, float]:
    """The gap by the names of the log; nothing where no token could be compared."""
    if not gap.tokens:
        return {}
    return {"kl_k3": gap.k3, "logprob_gap_max": gap.largest, "logprob_gap_mean": gap.mean}


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


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
