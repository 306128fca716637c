"""Training sequences and options for tests, and the logprobs of Hugging Face's own forward pass."""

from pathlib import Path
from typing import Any

from strands_rollout.play.options import TrainOptions
from strands_rollout.train.rollouts import TrainingSequence

MODEL = Path(__file__).parents[2] / "strands_rollout/engine/checkpoint"


def options(**changed: Any) -> TrainOptions:
    folders = {"out": Path("run"), "model_dir": Path("model"), "data": Path("data"), "held_out": Path("held")}
    return TrainOptions(**{**folders, **changed})


def sequence(tokens: list[int], mask: list[int], *, advantage: float = 1.0, **values: Any) -> TrainingSequence:
    """Return a sequence; without `rollout` and `denominator` it has no siblings."""
    unknown = {"log_probs": None, "sampled_log_probs": [None] * len(mask), "version": None}
    alone = {"rollout": object(), "denominator": sum(mask)}
    given: dict[str, Any] = {**unknown, **alone, **values}
    return TrainingSequence(tokens, len(tokens) - len(mask), mask, advantage=advantage, **given)


def plain_log_probs(model: Any, one: TrainingSequence, temperature: float = 1.0) -> list[float]:
    """Return logprobs of the trained tokens by a forward pass over this sequence alone."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([one.tokens])).logits[0] / temperature
    log_probs = torch.log_softmax(logits, dim=-1)
    return [float(log_probs[at - 1, one.tokens[at]]) for at in one.trained_positions]
