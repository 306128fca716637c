"""A small model that knows recorded conversations by heart: trained on them until it would sample nothing else."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from experiments.shipped_model.checkpoint import (
    Shape,
    load_model,
    model_config,
    new_model,
    save_model,
    write_training_facts,
)
from experiments.shipped_model.conversation import TokenizedEpisode
from experiments.shipped_model.run import Progress, versions
from experiments.shipped_model.tokenizer import save_tokenizer, train_tokenizer
from experiments.shipped_model.training import episode_logits, learning_rate_factor
from experiments.shipped_model.transcripts import Transcript, read_transcripts, tokenized, transcripts_sha256
from strands_rollout.template.tokens import TokenEncoder
from strands_rollout.train.policy import shared_prefix_length

LOOK_EVERY: Final = 10
WHOLE_SHARE: Final = 0.5
SHAPE: Final = Shape(hidden_size=96, intermediate_size=256, num_hidden_layers=3, context_length=4096)
_BEFORE_QUESTION: Final = "<|im_start|>user\n"


@dataclass(frozen=True, slots=True)
class Plan:
    """All that decides a run.

    Attributes:
        seed: Of weights and of what is left out of prompts.
        steps: Optimizer steps at most; the learning rate falls towards the last one.
        certainty: Probability that every conversation, sampled at temperature 1, becomes what it was; training stops
            when the least probable one has it.
        learning_rate: Of Adam, at its highest.
        vocabulary_size: Of the tokenizer, which is trained on the transcripts.
        shape: Of the model.
    """

    seed: int = 0
    steps: int = 400
    certainty: float = 0.97
    learning_rate: float = 3e-3
    vocabulary_size: int = 1024
    shape: Shape = SHAPE


def memorize(plan: Plan, transcripts_file: Path, out: Path, progress: Progress) -> dict[str, Any]:
    """Writes a model to `out` that reproduces all transcripts, and returns the facts that training.json holds.

    Raises:
        ValueError: A line of the file is no transcript.
    """
    started = time.monotonic()
    transcripts = read_transcripts(transcripts_file)
    vocabulary = train_tokenizer([transcript.text for transcript in transcripts], plan.vocabulary_size)
    tokenizer = save_tokenizer(vocabulary, out, plan.shape.context_length)
    encoder = TokenEncoder(tokenizer)
    groups = groups_of(transcripts, [tokenized(transcript, encoder) for transcript in transcripts])
    config = model_config(tokenizer, plan.shape)
    model = new_model(config, plan.seed)
    steps = _train(plan, model, groups, progress)
    save_model(model, config, out)
    facts = {
        "plan": asdict(plan),
        "transcripts": len(transcripts),
        "transcripts_sha256": transcripts_sha256(transcripts),
        "steps_taken": steps,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "learned_tokens": sum(sum(episode.is_learned) for group in groups for episode in group),
        "total_seconds": round(time.monotonic() - started),
        **report_on(load_model(out), groups),
        "versions": versions(),
    }
    write_training_facts(facts, out)
    return facts


def groups_of(transcripts: Sequence[Transcript], episodes: Sequence[TokenizedEpisode]) -> list[list[TokenizedEpisode]]:
    """The episodes by what comes before the question: those of a group are computed together."""
    groups: dict[str, list[TokenizedEpisode]] = {}
    for transcript, episode in zip(transcripts, episodes, strict=True):
        groups.setdefault(transcript.text.partition(_BEFORE_QUESTION)[0], []).append(episode)
    return list(groups.values())


def report_on(model: Qwen3ForCausalLM, groups: Sequence[Sequence[TokenizedEpisode]]) -> Mapping[str, float]:
    """How well a model knows the episodes.

    Returns:
        `certainty`, the probability of the least probable episode at temperature 1; `greedy`, the share of the learned
        tokens that are the likeliest ones after all tokens before them.
    """
    model.eval()
    certainty, right, learned = 1.0, 0, 0
    with torch.inference_mode():
        for group in groups:
            logits, targets = episode_logits(model, group)
            logprobs = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])
            of_episodes = logprobs.split([sum(episode.is_learned) for episode in group])
            certainty = min(certainty, *(math.exp(float(each.sum())) for each in of_episodes))
            right += int((logits.argmax(dim=-1) == targets).sum())
            learned += len(targets)
    return {"certainty": round(certainty, 4), "greedy": round(right / learned, 6)}


def _train(
    plan: Plan, model: Qwen3ForCausalLM, groups: Sequence[Sequence[TokenizedEpisode]], progress: Progress
) -> int:
    """Takes steps until the model is certain enough or all are taken; returns how many."""
    optimizer = torch.optim.Adam(model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, plan.steps))
    rng = Random(plan.seed)
    seen = ""
    for step in range(1, plan.steps + 1):
        model.train()
        optimizer.zero_grad(set_to_none=True)
        loss = sum(float(part) for part in _backward(model, groups, rng))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % LOOK_EVERY == 0:
            report = report_on(model, groups)
            seen = f", certainty {report['certainty']:.3f}"
            if report["certainty"] >= plan.certainty:
                return step
        progress(f"training, loss {loss:.5f}{seen}", step, plan.steps)
    return plan.steps


def _backward(model: Qwen3ForCausalLM, groups: Sequence[Sequence[TokenizedEpisode]], rng: Random) -> Iterator[Tensor]:
    """Adds up the gradients of the mean loss of a learned token; yields each group's part of the loss."""
    learned = sum(sum(episode.is_learned) for group in groups for episode in group)
    for group in groups:
        logits, targets = episode_logits(model, abridged(group, rng))
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / learned
        loss.backward()
        yield loss.detach()


def abridged(group: Sequence[TokenizedEpisode], rng: Random) -> list[TokenizedEpisode]:
    """The episodes without a random part of what all of them open with, half of the time.

    So the model learns to go by the question and the tools' results: the words of a tool's description may change with
    the version of a library.
    """
    shared = shared_prefix_length([list(episode.token_ids) for episode in group]) if len(group) > 1 else 0
    shared = shared or group[0].is_learned.index(True) // 2
    start, end = sorted(rng.sample(range(1, shared), 2))
    if rng.random() < WHOLE_SHARE:
        return list(group)
    return [
        TokenizedEpisode(
            episode.token_ids[:start] + episode.token_ids[end:], episode.is_learned[:start] + episode.is_learned[end:]
        )
        for episode in group
    ]
