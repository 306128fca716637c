"""What the loss reads of a sample: tokens, which of them count, the behaviour policy's logprobs, the advantage."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One sample as the loss sees it.

    Attributes:
        tokens: Prompt, then response.
        prompt_length: Tokens of the prompt, at least 1.
        loss_mask: 0 or 1 per response token.
        log_probs: The behaviour policy's, one per response token; None where they are unknown: the trainer then takes
            its own from before the update.
        sampled_log_probs: To compare with alone: the logprob at which each response token was sampled, None where it
            is unknown.
        version: Of the weights that sampled all of its tokens; None where there were several, or it is unknown.
        advantage: Of every trained token.
        rollout: What the siblings of a fan-out have in common, and nobody else.
        denominator: Trained tokens of its rollout, siblings included; at least 1. The loss of a sample is its sum by
            this number, as slime's by default.
    """

    tokens: list[int]
    prompt_length: int
    loss_mask: list[int]
    log_probs: list[float] | None
    sampled_log_probs: Sequence[float | None]
    version: str | None
    advantage: float
    rollout: Hashable
    denominator: int

    @property
    def trained_positions(self) -> list[int]:
        """Places in `tokens` of the trained tokens, ascending."""
        return [self.prompt_length + at for at, is_trained in enumerate(self.loss_mask) if is_trained]

    @property
    def known_pairs(self) -> list[tuple[int, float]]:
        """For each trained token whose sampling logprob is known: which of the trained ones it is, and that logprob."""
        trained = (
            value for value, is_trained in zip(self.sampled_log_probs, self.loss_mask, strict=True) if is_trained
        )
        return [(at, value) for at, value in enumerate(trained) if value is not None]

    @property
    def trained_log_probs(self) -> list[float] | None:
        """The behaviour policy's logprobs of the trained tokens."""
        if self.log_probs is None:
            return None
        return [value for value, is_trained in zip(self.log_probs, self.loss_mask, strict=True) if is_trained]
