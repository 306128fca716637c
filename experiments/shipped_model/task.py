"""What a model is made for: the words that its agent reads, its problems, its episodes and its tools.

Knows what every task has. Must not know any one task, models or training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from experiments.shipped_model.conversation import AgentPrompt
from experiments.shipped_model.episode import Episode
from experiments.shipped_model.plan import Plan
from experiments.shipped_model.split import Split
from experiments.shipped_model.tool_answers import OpenTools


class Problem(Protocol):
    """What every task's problems have."""

    @property
    def question(self) -> str:
        """The user's text."""
        ...


P = TypeVar("P", bound=Problem)


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
