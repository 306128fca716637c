"""An environment with a state: a number to guess, a tool, messages of a user, and a score.

`configs/guessing_game.yaml` names the class. Each episode creates a `GuessingGame`, and closes it even after a failure.
"""

from typing import Any, Final, Self

from strands import tool

from strands_rollout import Task

HIGHEST: Final = 100


class GuessingGame:
    """A game whose number is the row's label.

    If the number is guessed, the score is 1.0 minus 0.1 for each guess after the first, but at least 0.1; otherwise 0.
    """

    def __init__(self, task: Task) -> None:
        self.number = int(task.label)
        self.guesses: list[int] = []
        self.tools = [self.guess]

    async def __aenter__(self) -> Self:
        """Open the resources of the game, such as a connection, a browser or a container; this game has none."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the resources, also after a failure or an abort."""

    async def prepare(self) -> str:
        """Return the first user message."""
        return f"I think of a number from 1 to {HIGHEST}. Guess it with your tool."

    @tool
    async def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        self.guesses.append(number)
        return "Right!" if number == self.number else "Higher." if number < self.number else "Lower."

    async def answer(self, reply: str) -> str | None:  # noqa: ARG002 - the reply's text doesn't matter
        """Return the next user message; None when the game is over."""
        return None if self.number in self.guesses else "That was not it yet. Go on."

    async def score(self) -> dict[str, Any]:
        """Return the episode's score."""
        found = self.number in self.guesses
        score = round(max(0.1, 1.1 - 0.1 * len(self.guesses)), 1) if found else 0.0
        return {"score": score, "acc": float(found), "guesses": len(self.guesses)}
