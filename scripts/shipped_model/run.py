"""One run from a seed to a model folder: problems, rows, tokenizer, training until it is good enough, evaluation.

Knows every part of this package and the order of the work. Must not know the command line.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final, Protocol

import tokenizers
import torch
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from shipped_model.checkpoint import load_model, model_config, new_model, save_model, write_training_facts
from shipped_model.conversation import EpisodeTokenizer, TokenizedEpisode, whole_text
from shipped_model.episodes import Episode, write_episodes
from shipped_model.evaluation import Report, evaluate
from shipped_model.problems import Split, split_problems
from shipped_model.rows import read_rows, rows_of, write_rows
from shipped_model.tokenizer import chat_renderer, save_tokenizer, train_tokenizer
from shipped_model.training import training_steps

VOCABULARY_SIZE: Final = 1200
VALIDATION_SAMPLES: Final = 2
TRAINING_FILE: Final = "train.jsonl"
HELD_OUT_FILE: Final = "demo.jsonl"


class Progress(Protocol):
    """Where a run says how far it is."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take the news: `done` of `total` pieces of the stage are finished."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """All that decides a run.

    Attributes:
        seed: Of problems, episodes, weights, the order of training and sampling.
        steps: Optimizer steps if the target is not reached before; the learning rate falls towards the last one.
        target: Validation accuracy at which training stops.
        samples_per_row: Episodes per held-out row in the final report.
        batch_size: Episodes per step.
        learning_rate: Of AdamW, at its highest.
        problems: Different problems to train on.
        training_rows: How many of them are written as rows.
        held_out_rows: Further problems, written as rows and used for the final report alone.
        validation_rows: Further problems, which decide when to stop.
        evaluate_from: First step at which validation is looked at.
        evaluate_every: Steps between looks.
    """

    seed: int = 0
    steps: int = 500
    target: float = 0.6
    samples_per_row: int = 4
    batch_size: int = 32
    learning_rate: float = 3e-3
    problems: int = 8000
    training_rows: int = 4000
    held_out_rows: int = 256
    validation_rows: int = 128
    evaluate_from: int = 360
    evaluate_every: int = 20


def tiny(plan: Plan) -> Plan:
    """The same plan on so little data that every stage runs in seconds; the model learns nothing."""
    return replace(
        plan, samples_per_row=1, batch_size=4, problems=96, training_rows=24, held_out_rows=4, validation_rows=2
    )


def train(plan: Plan, out: Path, data: Path, progress: Progress) -> dict[str, Any]:
    """Writes the rows to `data` and the model to `out`, and returns the facts that training.json holds."""
    started = time.monotonic()
    split = split_problems(plan.seed, plan.held_out_rows, plan.validation_rows, plan.problems)
    write_data(plan, split, data)
    progress("episodes", 0, 1)
    episodes = write_episodes(split.training, Random(plan.seed))  # noqa: S311 - a reproducible data set, not a secret
    tokenizer = _make_tokenizer(episodes, out)
    episode_tokenizer = EpisodeTokenizer(tokenizer)
    tokenized = [episode_tokenizer.tokenize(episode) for episode in episodes]
    progress("episodes", 1, 1)
    config = model_config(tokenizer)
    model = new_model(config, plan.seed)
    training_started = time.monotonic()
    history = _train_until_good(plan, model, tokenizer, tokenized, rows_of(split.validation), progress)
    training_seconds = time.monotonic() - training_started
    save_model(model, config, out)
    report = report_on(out, data / HELD_OUT_FILE, plan.samples_per_row, plan.seed, progress)
    facts = {
        "plan": asdict(plan),
        "steps_taken": history[-1]["step"],
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "training_episodes": len(tokenized),
        "training_seconds": round(training_seconds),
        "total_seconds": round(time.monotonic() - started),
        "validation": history,
        "held_out": asdict(report),
        "versions": versions(),
    }
    write_training_facts(facts, out)
    return facts


def write_data(plan: Plan, split: Split, data: Path) -> None:
    """Writes the training and held-out rows."""
    write_rows(rows_of(split.training[: plan.training_rows]), data / TRAINING_FILE)
    write_rows(rows_of(split.held_out), data / HELD_OUT_FILE)


def report_on(folder: Path, held_out: Path, samples_per_row: int, seed: int, progress: Progress) -> Report:
    """How the saved model does on the rows of a file."""
    return evaluate(
        load_model(folder),
        AutoTokenizer.from_pretrained(folder),
        read_rows(held_out),
        samples_per_row=samples_per_row,
        seed=seed,
        on_progress=lambda done, total: progress("held-out episodes", done, total),
    )


def _make_tokenizer(episodes: Sequence[Episode], out: Path) -> PreTrainedTokenizerBase:
    renderer = chat_renderer()
    return save_tokenizer(train_tokenizer([whole_text(renderer, each) for each in episodes], VOCABULARY_SIZE), out)


def _train_until_good(
    plan: Plan,
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    episodes: Sequence[TokenizedEpisode],
    validation: Sequence[dict[str, Any]],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Takes steps until validation reaches the target or all are taken; returns what was seen on the way."""
    losses = training_steps(
        model,
        episodes,
        steps=plan.steps,
        batch_size=plan.batch_size,
        learning_rate=plan.learning_rate,
        seed=plan.seed,
    )
    history: list[dict[str, Any]] = []
    seen = ""
    for step, loss in enumerate(losses, start=1):
        progress(f"training, loss {loss:.3f}{seen}", step, plan.steps)
        is_look = step >= plan.evaluate_from and (step - plan.evaluate_from) % plan.evaluate_every == 0
        if not is_look and step < plan.steps:
            continue
        report = evaluate(model, tokenizer, validation, samples_per_row=VALIDATION_SAMPLES, seed=plan.seed + step)
        history.append({"step": step, "loss": round(loss, 4), "accuracy": report.accuracy})
        seen = f", accuracy {report.accuracy:.2f}"
        if report.accuracy >= plan.target:
            break
    return history


def versions() -> dict[str, str]:
    """What made a model."""
    return {
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
