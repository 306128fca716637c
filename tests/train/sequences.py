"""Training sequences for tests, and what Hugging Face's own forward pass says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strands_rollout.train.batch import TrainingSequence

MODEL = Path(__file__).parents[2] / "strands_rollout/engine/checkpoint"


def sequence(tokens: list[int], mask: list[int], *, advantage: float = 1.0, **values: Any) -> TrainingSequence:
    """One without siblings, unless `rollout` and `denominator` are given."""
    given: dict[str, Any] = {
        "log_probs": None,
        "sampled_log_probs": [None] * len(mask),
        "version": None,
        "rollout": object(),
        "denominator": sum(mask),
    }
    return TrainingSequence(
        tokens=tokens,
        prompt_length=len(tokens) - len(mask),
        loss_mask=mask,
        advantage=advantage,
        **{**given, **values},
    )


def plain_log_probs(model: Any, one: TrainingSequence, temperature: float = 1.0) -> list[float]:
    """Of the trained tokens, by a forward pass over the sequence alone."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([one.tokens])).logits[0] / temperature
    log_probs = torch.log_softmax(logits, dim=-1)
    return [float(log_probs[at - 1, one.tokens[at]]) for at in one.trained_positions]
