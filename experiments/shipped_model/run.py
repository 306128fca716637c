"""One run from a seed to a model folder: problems, rows, tokenizer, training until it is good enough, evaluation."""

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, Final, Protocol

import tokenizers
import torch
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from experiments.shipped_model.checkpoint import load_model, model_config, new_model, save_model, write_training_facts
from experiments.shipped_model.conversation import EpisodeTokenizer, TokenizedEpisode, whole_text
from experiments.shipped_model.episode import Episode
from experiments.shipped_model.evaluation import Report, evaluate
from experiments.shipped_model.guesses import with_guesses
from experiments.shipped_model.spelling import Respeller
from experiments.shipped_model.task import Plan, Task, read_rows, write_rows
from experiments.shipped_model.tokenizer import chat_renderer, copy_tokenizer, save_tokenizer, train_tokenizer
from experiments.shipped_model.training import training_steps

VOCABULARY_SIZE: Final = 1200
VALIDATION_SAMPLES: Final = 2
# the first so many episodes, and with them the tokenizer, are the same for any greater number of problems
EPISODES_AT_ONCE: Final = 8000


class Progress(Protocol):
    """Receiver of a run's progress."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report that `done` of `total` pieces of the stage are finished."""
        ...


def train(task: Task[Any], plan: Plan, out: Path, data: Path, progress: Progress) -> dict[str, Any]:
    """Writes the rows to `data` and the model to `out`, and returns the facts that training.json holds."""
    started = time.monotonic()
    split = task.split(plan.seed, plan.held_out_rows, plan.validation_rows, plan.problems)
    write_rows(task.rows_of(split.training[: plan.training_rows]), data / task.training_file)
    write_rows(task.rows_of(split.held_out), data / task.held_out_file)
    progress("episodes", 0, 1)
    rng = Random(plan.seed)
    episodes = [
        episode
        for start in range(0, len(split.training), EPISODES_AT_ONCE)
        for episode in task.write_episodes(split.training[start : start + EPISODES_AT_ONCE], rng)
    ]
    tokenizer = _tokenizer(task, episodes[:EPISODES_AT_ONCE], out)
    episodes = with_guesses(episodes, plan.guess_share, rng)
    episode_tokenizer = EpisodeTokenizer(tokenizer, task.prompt, Respeller(tokenizer, plan.respelled_share, rng))
    tokenized = [episode_tokenizer.tokenize(episode) for episode in episodes]
    progress("episodes", 1, 1)
    config = {**model_config(tokenizer), "prompts_sha256": task.prompts_sha256}
    model = new_model(config, plan.seed) if task.parent is None else load_model(task.parent)
    training_started = time.monotonic()
    history = _train_until_good(plan, task, model, tokenizer, tokenized, task.rows_of(split.validation), progress)
    training_seconds = time.monotonic() - training_started
    save_model(model, config, out)
    report = report_on(task, out, data, plan, progress)
    facts = {
        "task": task.name,
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


def report_on(task: Task[Any], folder: Path, data: Path, plan: Plan, progress: Progress) -> Report:
    """Evaluate the saved model on the task's held-out rows in the folder `data`."""
    return evaluate(
        task,
        load_model(folder),
        AutoTokenizer.from_pretrained(folder),
        read_rows(data / task.held_out_file),
        samples_per_row=plan.samples_per_row,
        seed=plan.seed,
        on_progress=lambda done, total: progress("held-out episodes", done, total),
    )


def _tokenizer(task: Task[Any], episodes: Sequence[Episode], out: Path) -> PreTrainedTokenizerBase:
    """The parent's, or a new one; its files are in `out`."""
    if task.parent is not None:
        return copy_tokenizer(task.parent, out)
    renderer = chat_renderer()
    texts = [whole_text(renderer, task.prompt, each) for each in episodes]
    return save_tokenizer(train_tokenizer(texts, VOCABULARY_SIZE), out)


def _train_until_good(
    plan: Plan,
    task: Task[Any],
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
        report = evaluate(task, model, tokenizer, validation, samples_per_row=VALIDATION_SAMPLES, seed=plan.seed + step)
        history.append({"step": step, "loss": round(loss, 4), "accuracy": report.accuracy})
        seen = f", accuracy {report.accuracy:.2f}"
        if report.accuracy >= plan.target:
            break
    return history


def versions() -> dict[str, str]:
    """Return the versions of the packages that made a model."""
    return {
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
