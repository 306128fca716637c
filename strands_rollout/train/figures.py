"""The invariant of a training run: the trainer's logprobs of the sampled tokens are the rollout's.

Under the same weights both compute the same function of the same tokens. A difference means that the trainer sees other
tokens than the policy did, at other places, or with other logprobs than it wrote them with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from strands_rollout.errors import TrajectoryError
from strands_rollout.train.sequence import TrainingSequence

_MOST_SHOWN: Final = 10
_CONTEXT_TOKENS: Final = 8
_MOST_RATIO: Final = 50.0


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """How far the trainer's logprobs are from the rollout's, over all tokens where both are known.

    Attributes:
        largest: The largest difference, in nats; 0.0 where no token was compared.
        mean: The mean difference.
        k3: The k3 estimate of KL(rollout || trainer), the mean over tokens.
        tokens: Tokens that were compared.
    """

    largest: float
    mean: float
    k3: float
    tokens: int

    @classmethod
    def of(cls, sequences: Sequence[TrainingSequence], trainer: Sequence[Sequence[float]]) -> LogprobGap:
        """The gap over all trained tokens whose sampling logprob is known.

        Args:
            sequences: The samples.
            trainer: The trainer's logprobs of each one's trained tokens, under the weights that sampled them.
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
    """Refuse to train where the two disagree.

    Args:
        sequences: What is about to be trained on, sampled by the weights that are about to be updated.
        trainer: The trainer's logprobs of each one's trained tokens.
        limit: The largest difference that is taken for rounding, in nats.
        decode: The text of ids.

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
    shown = "\n".join(
        f"  sequence {number}, token {position} of {len(sequences[number].tokens)}: "
        f"{decode([sequences[number].tokens[position]])!r} after "
        f"{decode(sequences[number].tokens[max(0, position - _CONTEXT_TOKENS) : position])!r}: "
        f"rollout {theirs:.4f}, trainer {ours:.4f}"
        for _, number, position, theirs, ours in worst
    )
    beyond = sum(difference > limit for difference, *_ in rows)
    raise TrajectoryError(
        f"under the same weights the trainer's logprobs differ from the rollout's by up to {gap.largest:.3g} (mean "
        f"{gap.mean:.3g}), {beyond} of {len(rows)} trained tokens by more than {limit:g}; expected rounding alone. "
        "Either the tokens, their places or the mask are wrong, or the engine does not compute as the trainer does "
        f"(a lower precision: raise --gap-limit). The largest differences:\n{shown}"
    )
