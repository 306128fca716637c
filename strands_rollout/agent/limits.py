"""Limits on an agent's tool use, as a Strands hook for any Agent.

Ends the loop cleanly, without an exception: the turn that asks for too much is not executed and the model is not
called again.
"""

from __future__ import annotations

from typing import Any, Literal

from strands.hooks import (
    AfterToolsEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    BeforeToolsEvent,
    HookProvider,
    HookRegistry,
)

from strands_rollout.errors import ConfigError
from strands_rollout.strands_events import INVALID_TOOL_CALL

ToolLimit = Literal["max_iterations", "max_calls"]


class ToolLimiter(HookProvider):
    """Stops an agent after so many tool iterations or calls: `Agent(..., hooks=[ToolLimiter(max_iterations=5)])`.

    An iteration is a model turn that asks for tools. After `max_iterations` of them the model may still answer; a
    further turn that asks for tools is not executed and ends the invocation. Counts go on over several invocations
    until `reset()`.

    Args:
        max_iterations: Turns whose tools are run; None for no limit.
        max_calls: Calls that are run in all; a turn that would exceed it is not run at all.
        max_parallel_calls: Calls of one turn that are run; the others are answered with an error result, and the loop
            goes on.

    Attributes:
        iterations: Tool iterations that were run.
        calls: Tool calls that were run, those that could not be parsed not counted.
        tripped: The limit that ended the loop, or None.
        before_turn: `iterations` and `calls` when the model was called last.
    """

    def __init__(
        self, max_iterations: int | None = None, *, max_calls: int | None = None, max_parallel_calls: int | None = None
    ) -> None:
        limits = {"max_iterations": max_iterations, "max_calls": max_calls, "max_parallel_calls": max_parallel_calls}
        for name, limit in limits.items():
            if limit is not None and limit < 0:
                raise ConfigError(f"got {name}={limit}; expected a count of at least 0, or None for no limit")
        self._max_iterations = max_iterations
        self._max_calls = max_calls
        self._max_parallel = max_parallel_calls
        self.reset()

    def reset(self) -> None:
        """Count from zero again."""
        self.iterations = 0
        self.calls = 0
        self.tripped: ToolLimit | None = None
        self.before_turn = (0, 0)
        self._over_parallel: set[str] = set()

    def go_on_from(self, iterations: int, calls: int) -> None:
        """Count from what an earlier agent had used up."""
        self.iterations, self.calls = iterations, calls
        self.before_turn = (iterations, calls)

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:  # noqa: ARG002, ANN401 - Strands' signature
        """Called by Strands."""
        registry.add_callback(BeforeModelCallEvent, self._before_model_call)
        registry.add_callback(BeforeToolsEvent, self._before_tools)
        registry.add_callback(BeforeToolCallEvent, self._before_tool_call)
        registry.add_callback(AfterToolsEvent, self._after_tools)

    def _before_model_call(self, event: BeforeModelCallEvent) -> None:  # noqa: ARG002 - Strands' signature
        self.before_turn = (self.iterations, self.calls)

    def _before_tools(self, event: BeforeToolsEvent) -> None:
        uses = [block["toolUse"] for block in event.message["content"] if "toolUse" in block]
        wanted = [use["toolUseId"] for use in uses if use["name"] != INVALID_TOOL_CALL]
        runnable = wanted if self._max_parallel is None else wanted[: self._max_parallel]
        if self._max_iterations is not None and self.iterations >= self._max_iterations:
            self.tripped = "max_iterations"
        elif self._max_calls is not None and self.calls + len(runnable) > self._max_calls:
            self.tripped = "max_calls"
        if self.tripped:
            event.cancel = f"Not run: the limit {self.tripped} of this episode is reached."
            return
        self.iterations += 1
        self.calls += len(runnable)
        self._over_parallel = set(wanted[len(runnable) :])

    def _before_tool_call(self, event: BeforeToolCallEvent[Any]) -> None:
        if event.tool_use["toolUseId"] in self._over_parallel:
            event.cancel_tool = f"Not run: at most {self._max_parallel} tool calls are allowed in one turn."

    def _after_tools(self, event: AfterToolsEvent) -> None:
        if self.tripped:
            event.end_turn = f"Stopped: the limit {self.tripped} of this episode is reached."
