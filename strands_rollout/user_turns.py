"""What is said to the policy after it has answered: by a simulated user, or an environment.

Knows Strands' messages; nothing of who speaks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from strands_rollout.stop_reason import StopReason


class UserTurns:
    """The user's messages of one episode after its first.

    Args:
        next_message: Given the policy's answer, the next message; None ends the episode. None where nobody speaks.
        limit: How many there may be; None for no limit.

    Attributes:
        count: How many there were.
    """

    def __init__(self, next_message: Callable[[str], Awaitable[str | None]] | None, limit: int | None) -> None:
        self._next_message = next_message
        self._limit = limit
        self.count = 0

    async def next(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]] | None, StopReason | None]:
        """What is said now as Strands content, or why the episode ends.

        Args:
            messages: The agent's history; the last is the policy's answer.
        """
        said = None if self._next_message is None else await self._next_message(_text(messages))
        if said is None:
            return None, StopReason.COMPLETED
        if self._limit is not None and self.count >= self._limit:
            return None, StopReason.MAX_USER_TURNS
        self.count += 1
        return [{"text": said}], None


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    """What the last message says, without reasoning."""
    blocks = messages[-1]["content"] if messages else []
    return "\n".join(block["text"] for block in blocks if "text" in block)
