"""An environment: tools with a state, and a score. Each episode creates its own `Shop`."""

from typing import Any

import agent
import reward
from strands import tool

from strands_rollout import Task


class Shop:
    """A shop that counts the uses of the calculator; each use after the first lowers the score by 0.1."""

    def __init__(self, task: Task) -> None:
        self.label = str(task.label)  # the right amount
        self.uses = 0
        self.reply = ""
        self.tools = [agent.look_up_price, self.execute_python_code]

    @tool
    def execute_python_code(self, code: str) -> int:
        """Run Python code and return what it prints.

        Args:
            code: The Python code to run.
        """
        self.uses += 1
        return agent.execute_python_code(code=code)

    def answer(self, reply: str) -> None:
        """Receive an answer of the policy; return the user's next message, or None to end the episode."""
        self.reply = reply

    def score(self) -> dict[str, Any]:
        """Return the episode's score."""
        scored = reward.score(self.reply, self.label)
        return scored | {"score": scored["score"] - 0.1 * max(0, self.uses - 1), "uses": self.uses}
