"""GRPO's loss on flat tensors: PPO's clipped objective, truncated importance sampling, and the KL to a reference.

Each function is the published formula as slime 0.3 computes it (slime/utils/ppo_utils.py and
slime/backends/megatron_utils/loss.py), which the tests hold it against. Knows tensors; nothing of samples or models.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_MOST_KL: Final = 10.0


def clipped_policy_loss(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss of each token, and whether it is clipped (0.0 or 1.0).

    Args:
        log_ratio: Logprob under the policy less that under the behaviour policy, per token.
        advantages: Per token.
        clip_low: The ratio counts from 1 less this.
        clip_high: The ratio counts to 1 and this.
    """
    ratio = log_ratio.exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.maximum(plain, clipped), (clipped > plain).float()


def truncated_weights(trainer: Tensor, rollout: Tensor, upper: float) -> Tensor:
    """Truncated importance sampling: the ratio of the trainer's and the rollout's probability, at most `upper`.

    Args:
        trainer: The trainer's logprobs from before the update.
        rollout: Those at which the tokens were sampled.
        upper: slime's `--tis-clip`.
    """
    return (trainer - rollout).exp().clamp(max=upper)


def k3_divergence(log_probs: Tensor, reference: Tensor) -> Tensor:
    """An unbiased, never negative estimate of KL(policy || reference) for each token, as slime's `low_var_kl`.

    See http://joschu.net/blog/kl-approx.html.

    Args:
        log_probs: Of tokens that the policy sampled, under the policy.
        reference: Of the same tokens, under the reference.
    """
    log_ratio = reference - log_probs
    return (log_ratio.exp() - 1 - log_ratio).clamp(max=_MOST_KL)
