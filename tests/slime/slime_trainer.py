"""What slime's trainer does with a rank's data before the first matrix product, done on CPU tensors.

The shapes are those of slime 0.3 (slime/backends/megatron_utils: data.py, loss.py), whose modules need Megatron.
"""

from __future__ import annotations

from typing import Any


def trained_tokens(rank: dict[str, Any]) -> int:
    """Slice logits, tokens, mask and logprobs of each sample as the trainer does; return how many tokens are trained.

    Raises:
        RuntimeError: From torch, where a sample's lengths don't fit.
    """
    import torch
    from torch.nn import functional

    trained = 0
    fields = ("tokens", "response_lengths", "loss_masks", "rollout_log_probs")
    for tokens, response, *columns in zip(*(rank[name] for name in fields), strict=True):
        mask, logprobs = map(torch.as_tensor, columns)  # before 0.3.1 the trainer makes the tensors
        total = len(tokens)
        logits = torch.zeros(total, 4)
        # the logits that predict the response begin one token before it
        assert len(logits.narrow(0, total - response - 1, response)) == response
        assert len(functional.pad(mask, (total - response - 1, 1))) == total
        assert len(tokens[-response:]) == len(mask) == len(logprobs) == response
        assert bool(torch.isfinite(logprobs).all())
        assert set(mask.tolist()) <= {0, 1}
        assert bool((logprobs[mask == 0] == 0).all())
        trained += int(mask.sum())
    return trained
