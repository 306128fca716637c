"""An environment with a state: a number to be guessed, with a tool to guess, a user who urges, and a score.

`configs/guessing_game.yaml` names `GuessingGame`. It is made anew for each episode, and left whatever happens.
"""

from typing import Any, Final, Self

from strands import tool

from strands_rollout import Task

HIGHEST: Final = 100


class GuessingGame:
    """The row's label is the number; each guess more than one costs a tenth of the score."""

    def __init__(self, task: Task) -> None:
        self.number = int(task.label)
        self.guesses: list[int] = []
        self.tools = [self.guess]

    async def __aenter__(self) -> Self:
        """Open what the game needs: a connection, a browser, a container. This one needs nothing."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close it; called also where the episode failed or was aborted."""

    async def prepare(self) -> str:
        """The user's first message."""
        return f"I think of a number from 1 to {HIGHEST}. Guess it with your tool."

    @tool
    async def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        self.guesses.append(number)
        return "Right!" if number == self.number else "Higher." if number < self.number else "Lower."

    async def answer(self, reply: str) -> str | None:  # noqa: ARG002 - what the policy said does not count
        """The user's next message; None when the game is over."""
        return None if self.number in self.guesses else "That was not it yet. Go on."

    async def score(self) -> dict[str, Any]:
        """What the episode is worth."""
        found = self.number in self.guesses
        score = round(max(0.1, 1.1 - 0.1 * len(self.guesses)), 1) if found else 0.0
        return {"score": score, "acc": float(found), "guesses": len(self.guesses)}
