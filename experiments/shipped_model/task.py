"""The task that a model is trained for: its agent's prompt, problems, episodes, tools and training plan."""

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
        """Text of the user's message."""
        ...


P = TypeVar("P", bound=Problem)


@dataclass(frozen=True, slots=True)
class Split(Generic[P]):
    """Three sets of problems, in which no two problems have the same key.

    Attributes:
        held_out: Problems that evaluate the finished model.
        validation: Problems that decide when training stops.
        training: Problems to train on.
    """

    held_out: tuple[P, ...]
    validation: tuple[P, ...]
    training: tuple[P, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that determines a run besides its task.

    Attributes:
        seed: Seed of problems, episodes, weights, training order and sampling.
        steps: Maximum optimizer steps; the learning rate decays towards the last step.
        target: Validation accuracy at which training stops.
        samples_per_row: Episodes per held-out row in the final report.
        batch_size: Episodes per step.
        learning_rate: Peak learning rate of AdamW.
        problems: Number of problems to train on.
        guess_share: Share of the episodes that become guesses without a tool.
        respelled_share: Probability that a token of a turn is replaced by two tokens with the same text, if there are
            such tokens.
        training_rows: Number of training problems that are written as rows.
        held_out_rows: Number of held-out problems, in addition to `problems`. They are written as rows, and used only
            for the final report.
        validation_rows: Number of validation problems, in addition to all others. They decide when training stops.
        evaluate_from: First step after which validation runs.
        evaluate_every: Steps between validations.
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
    """Return the plan with so little data that every stage runs in seconds; the model learns nothing."""
    return replace(
        plan, samples_per_row=1, batch_size=4, problems=96, training_rows=24, held_out_rows=4, validation_rows=2
    )


@dataclass(frozen=True, slots=True)
class Task(Generic[P]):
    """An agent's task, with its own kind of problem.

    Attributes:
        name: Name on the command line.
        prompt: System prompt and tools of the agent.
        prompts_sha256: Hash of the prompt, stored in the checkpoint that was trained on it.
        open_tools: Function that returns a context manager with the agent's tools.
        split: Function of a seed and the numbers of held-out, validation and training problems.
        write_episodes: Function that writes an episode for each problem, with real results of the tools.
        answers_of: Function that returns the right answer to each problem.
        out: Folder of the shipped model.
        training_file: File name of the rows to train on.
        held_out_file: File name of the held-out rows.
        plan: Plan that makes the shipped model.
        parent: Folder of the model and tokenizer that training starts from; None for a new model.
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
        """Return a row for each problem, as slime reads dapo-math-17k: a chat prompt and a label."""
        return [
            {"prompt": [{"role": "user", "content": problem.question}], "label": str(answer)}
            for problem, answer in zip(problems, self.answers_of(problems), strict=True)
        ]


def write_rows(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Write a JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a file that `write_rows` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
