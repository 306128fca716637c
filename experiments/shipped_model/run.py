"""Make a model folder from a seed: problems, rows, tokenizer, training to a target accuracy, evaluation."""

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
# only the first batch trains the tokenizer, which therefore does not depend on the number of problems in later batches
EPISODES_PER_BATCH: Final = 8000


class Progress(Protocol):
    """Function that receives a run's progress."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report that `done` of `total` steps of the stage are finished."""
        ...


def train(task: Task[Any], plan: Plan, out: Path, data: Path, progress: Progress) -> dict[str, Any]:
    """Write the rows to `data` and the model to `out`, and return the content of training.json."""
    started = time.monotonic()
    split = task.split(plan.seed, plan.held_out_rows, plan.validation_rows, plan.problems)
    write_rows(task.rows_of(split.training[: plan.training_rows]), data / task.training_file)
    write_rows(task.rows_of(split.held_out), data / task.held_out_file)
    progress("episodes", 0, 1)
    rng = Random(plan.seed)
    episodes = [
        episode
        for start in range(0, len(split.training), EPISODES_PER_BATCH)
        for episode in task.write_episodes(split.training[start : start + EPISODES_PER_BATCH], rng)
    ]
    tokenizer = _tokenizer(task, episodes[:EPISODES_PER_BATCH], out)
    episodes = with_guesses(episodes, plan.guess_share, rng)
    episode_tokenizer = EpisodeTokenizer(tokenizer, task.prompt, Respeller(tokenizer, plan.respelled_share, rng))
    tokenized = [episode_tokenizer.tokenize(episode) for episode in episodes]
    progress("episodes", 1, 1)
    config = {**model_config(tokenizer), "prompts_sha256": task.prompts_sha256}
    model = new_model(config, plan.seed) if task.parent is None else load_model(task.parent)
    training_started = time.monotonic()
    history = _train_to_target(plan, task, model, tokenizer, tokenized, task.rows_of(split.validation), progress)
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
    """Return the tokenizer in `out`: copied there from the parent, or newly trained on the episodes."""
    if task.parent is not None:
        return copy_tokenizer(task.parent, out)
    renderer = chat_renderer()
    texts = [whole_text(renderer, task.prompt, episode) for episode in episodes]
    return save_tokenizer(train_tokenizer(texts, VOCABULARY_SIZE), out)


def _train_to_target(
    plan: Plan,
    task: Task[Any],
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    episodes: Sequence[TokenizedEpisode],
    validation: Sequence[dict[str, Any]],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Train until validation reaches the target or the steps are used up; return the validation results."""
    losses = training_steps(
        model,
        episodes,
        steps=plan.steps,
        batch_size=plan.batch_size,
        learning_rate=plan.learning_rate,
        seed=plan.seed,
    )
    history: list[dict[str, Any]] = []
    latest = ""
    for step, loss in enumerate(losses, start=1):
        progress(f"training, loss {loss:.3f}{latest}", step, plan.steps)
        is_due = step >= plan.evaluate_from and (step - plan.evaluate_from) % plan.evaluate_every == 0
        if not is_due and step < plan.steps:
            continue
        report = evaluate(task, model, tokenizer, validation, samples_per_row=VALIDATION_SAMPLES, seed=plan.seed + step)
        history.append({"step": step, "loss": round(loss, 4), "accuracy": report.accuracy})
        latest = f", accuracy {report.accuracy:.2f}"
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
