"""How a batch of samples becomes optimizer steps; the words are slime's where it has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

LossMean: TypeAlias = Literal["sample", "token"]
Decay: TypeAlias = Literal["linear", "constant"]


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """Settings of the update.

    Attributes:
        learning_rate: AdamW's, at the first step.
        decay: "linear": the learning rate falls in a straight line, to 0 after the last step; "constant": it stays.
            slime's `--lr-decay-style`.
        updates: Optimizer steps per batch of rollouts, each on a part of it; slime's `--num-steps-per-rollout`.
        clip_low: slime's `--eps-clip`.
        clip_high: slime's `--eps-clip-high`.
        mean: "sample": the mean over rollouts that train a token (slime counts the others too) of each one's mean over
            its trained tokens, slime's default; "token": the
            mean over all trained tokens, slime's `--calculate-per-token-loss`.
        tis_clip: Truncated importance sampling with this upper bound, slime's `--use-tis --tis-clip`: the trainer's own
            logprobs from before the update are the behaviour policy's, and the rollout's correct for it. None: the
            rollout's logprobs are the behaviour policy's, slime's `--use-rollout-logprobs`.
        kl: Weight of the KL divergence to the first weights, slime's `--kl-loss-coef`; 0 for none.
        entropy: Weight of the entropy bonus, slime's `--entropy-coef`.
        temperature: At which the tokens were sampled.
        max_grad_norm: Gradients are scaled down to this norm.
    """

    learning_rate: float = 2e-4
    decay: Decay = "constant"
    updates: int = 4
    clip_low: float = 0.2
    clip_high: float = 0.28
    mean: LossMean = "sample"
    tis_clip: float | None = None
    kl: float = 0.0
    entropy: float = 0.0
    temperature: float = 1.0
    max_grad_norm: float = 1.0
