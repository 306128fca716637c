"""Train a small Qwen3 on tokenized episodes, one optimizer step at a time."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from experiments.shipped_model.conversation import TokenizedEpisode
from strands_rollout.train.policy import trained_logits

WARMUP_STEPS: Final = 40
DECAY_FROM: Final = 0.5
LAST_FACTOR: Final = 0.05


def training_steps(
    model: Qwen3ForCausalLM,
    episodes: Sequence[TokenizedEpisode],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> Iterator[float]:
    """Yield the loss of each of `steps` optimizer steps; episodes are reshuffled after each pass."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=(0.9, 0.95),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    batches = _batches(episodes, batch_size, torch.Generator().manual_seed(seed))
    for batch in itertools.islice(batches, steps):
        model.train()
        loss = episode_loss(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield float(loss.detach())


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the learning rate's factor: linear warm-up to 1, then constant, then linear decay to `LAST_FACTOR`.

    The decay begins after the share `DECAY_FROM` of the steps.
    """
    left = (steps - step) / (steps * (1 - DECAY_FROM))
    return min((step + 1) / WARMUP_STEPS, max(LAST_FACTOR, min(1.0, left)))


def episode_loss(model: Qwen3ForCausalLM, batch: Sequence[TokenizedEpisode]) -> Tensor:
    """Return the mean cross entropy of the learned tokens, each predicted from all tokens before it."""
    return torch.nn.functional.cross_entropy(*episode_logits(model, batch))


def episode_logits(model: Qwen3ForCausalLM, batch: Sequence[TokenizedEpisode]) -> tuple[Tensor, Tensor]:
    """Return the logits for the learned tokens of a batch, a row per token, and these tokens' ids.

    All prompts begin with the same system text, which is computed once.
    """
    positions = [[at for at, learned in enumerate(episode.is_learned) if learned] for episode in batch]
    return trained_logits(model, [list(episode.token_ids) for episode in batch], positions)


def _batches(
    episodes: Sequence[TokenizedEpisode], batch_size: int, generator: torch.Generator
) -> Iterator[list[TokenizedEpisode]]:
    while True:
        order = torch.randperm(len(episodes), generator=generator).tolist()
        for start in range(0, len(order), batch_size):
            yield [episodes[index] for index in order[start : start + batch_size]]
