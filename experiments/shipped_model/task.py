"""The task of a model: its agent's prompt, problems, episodes, tools and training plan."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from experiments.shipped_model.conversation import AgentPrompt
from experiments.shipped_model.episode import Episode
from experiments.shipped_model.tool_answers import OpenTools


class Problem(Protocol):
    """Interface of every task's problems."""

    @property
    def question(self) -> str:
        """The user's text."""
        ...


P = TypeVar("P", bound=Problem)


@dataclass(frozen=True, slots=True)
class Split(Generic[P]):
    """Problems with no key in common.

    Attributes:
        held_out: Asked of the finished model alone.
        validation: Asked on the way, to decide when the model is good enough.
        training: What it learns from.
    """

    held_out: tuple[P, ...]
    validation: tuple[P, ...]
    training: tuple[P, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """All that decides a run besides its task.

    Attributes:
        seed: Of problems, episodes, weights, the order of training and sampling.
        steps: Optimizer steps if the target is not reached before; the learning rate falls towards the last one.
        target: Validation accuracy at which training stops.
        samples_per_row: Episodes per held-out row in the final report.
        batch_size: Episodes per step.
        learning_rate: Of AdamW, at its highest.
        problems: Different problems to train on.
        guess_share: Share of the episodes that become guesses without a tool.
        respelled_share: Share of the tokens said, of those that two others can spell, that are so spelled.
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
    guess_share: float = 0.0
    respelled_share: float = 0.0
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


@dataclass(frozen=True, slots=True)
class Task(Generic[P]):
    """One kind of work for an agent, over its own kind of problem.

    Attributes:
        name: On the command line.
        prompt: What the agent reads before a question.
        prompts_sha256: Of these words; ties a checkpoint to them.
        open_tools: Gives the agent's tools, for as long as its block lasts.
        split: From a seed and the numbers of held-out, validation and training problems.
        write_episodes: One episode for each problem, with what the tools really answer.
        answers_of: The right answer to each problem.
        out: Folder of the model that the package ships.
        training_file: Name of the rows to train on.
        held_out_file: Name of the rows that are asked of the finished model alone.
        plan: What makes the model that the package ships.
        parent: Folder of the model and tokenizer that training begins with; None to begin from nothing.
    """

    name: str
    prompt: AgentPrompt
    prompts_sha256: str
    open_tools: OpenTools
    split: Callable[[int, int, int, int], Split[P]]
    write_episodes: Callable[[Sequence[P], Random], list[Episode]]
    answers_of: Callable[[Sequence[P]], list[int]]
    out: Path
    training_file: str
    held_out_file: str
    plan: Plan
    parent: Path | None = None

    def rows_of(self, problems: Sequence[P]) -> list[dict[str, Any]]:
        """One row for each problem, in the format of dapo-math-17k as slime reads it: a chat prompt and a label."""
        return [
            {"prompt": [{"role": "user", "content": problem.question}], "label": str(answer)}
            for problem, answer in zip(problems, self.answers_of(problems), strict=True)
        ]


def write_rows(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Writes one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads what `write_rows` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
