"""Logits of the trained tokens of a batch, the prefix that all sequences share being computed once.

Knows torch and Hugging Face's causal models; nothing of samples, losses or optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


def trained_logits(
    model: Any,  # noqa: ANN401 - any of Hugging Face's causal models
    token_ids: Sequence[list[int]],
    positions: Sequence[Sequence[int]],
) -> tuple[Tensor, Tensor]:
    """Logits that predict the chosen tokens, each from all tokens before it, and these tokens' ids.

    The keys and values of the common prefix are shared by the batch, which changes neither values nor gradients.
    Shorter sequences are padded on the right, where earlier tokens can't see.

    Args:
        model: With a `model` that gives hidden states and an `lm_head`.
        token_ids: The sequences, at least one.
        positions: For each, which of its tokens are chosen: ascending, from 1 on; at least one in each.

    Returns:
        [chosen, vocabulary] logits and [chosen] ids, in the order of sequences and positions.
    """
    shared = min(shared_prefix_length(token_ids), *(chosen[0] - 1 for chosen in positions))
    width = max(map(len, token_ids)) - shared
    ids = torch.zeros(len(token_ids), width, dtype=torch.long)
    is_chosen = torch.zeros(len(token_ids), width, dtype=torch.bool)
    for row, (sequence, chosen) in enumerate(zip(token_ids, positions, strict=True)):
        ids[row, : len(sequence) - shared] = torch.tensor(sequence[shared:])
        is_chosen[row, torch.tensor(chosen) - shared] = True
    cache = DynamicCache(config=model.config)
    if shared:
        model.model(input_ids=torch.tensor([token_ids[0][:shared]]), past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(token_ids))
    hidden = model.model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
    targets = is_chosen[:, 1:]
    return model.lm_head(hidden[:, :-1][targets]), ids[:, 1:][targets]


def shared_prefix_length(sequences: Sequence[list[int]]) -> int:
    """How many leading tokens all sequences have in common, one less than the shortest one's length at most."""
    first, last = min(sequences), max(sequences)
    shared = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return min(shared, min(len(sequence) for sequence in sequences) - 1)
