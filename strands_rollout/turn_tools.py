"""How the tools of one turn are run: its only call in place, several at once as Strands runs them.

Knows Strands' tool executors; nothing of episodes. Strands starts a task, a queue and an event for a single call too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from strands import Agent
from strands.tools.executors import ConcurrentToolExecutor, SequentialToolExecutor
from strands.types.tools import ToolUse


class TurnTools(ConcurrentToolExecutor):
    """A tool executor for `Agent(tool_executor=...)`."""

    def __init__(self) -> None:
        self._in_place = SequentialToolExecutor()

    async def _execute(self, agent: Agent, tool_uses: list[ToolUse], *rest: Any) -> AsyncGenerator[Any, None]:  # noqa: ANN401 - what Strands hands on
        is_alone = len(tool_uses) == 1
        execute = self._in_place._execute if is_alone else super()._execute
        async for event in execute(agent, tool_uses, *rest):
            yield event
