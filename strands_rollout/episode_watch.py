"""A Strands hook that ends an agent's loop on abort or a broken sandbox, and tells the policy of unreadable calls.

Knows Strands' events and our model; nothing of limits or samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strands.hooks import (
    AfterToolsEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    BeforeToolsEvent,
    HookProvider,
    HookRegistry,
)

from strands_rollout.bounded_tool import ToolStats
from strands_rollout.errors import EngineAbortedError
from strands_rollout.sglang_model import SGLangModel
from strands_rollout.stop_reason import StopReason
from strands_rollout.strands_events import INVALID_TOOL_CALL


class EpisodeWatch(HookProvider):
    """Watches one agent of an episode; an abort while tools run is the deadline's.

    Args:
        model: The agent's.
        stats: Of the episode's tools.
        should_abort: Asked before each model call, and before the tools of a turn.
        outer: Stats of the whole episode, where `stats` are not; they are told of a broken sandbox.
    """

    def __init__(
        self, model: SGLangModel, stats: ToolStats, should_abort: Callable[[], bool], outer: ToolStats | None = None
    ) -> None:
        self._model = model
        self._stats = stats
        self._outer = outer or stats
        self._should_abort = should_abort

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:  # noqa: ARG002, ANN401 - Strands' signature
        """Called by Strands."""
        registry.add_callback(BeforeModelCallEvent, self._before_model_call)
        registry.add_callback(BeforeToolsEvent, self._before_tools)
        registry.add_callback(BeforeToolCallEvent, self._before_tool_call)
        registry.add_callback(AfterToolsEvent, self._after_tools)

    def _before_model_call(self, event: BeforeModelCallEvent) -> None:  # noqa: ARG002 - Strands' signature
        if self._should_abort():
            raise EngineAbortedError("the rollout was aborted before a model call")

    def _before_tools(self, event: BeforeToolsEvent) -> None:
        if self._should_abort():
            raise EngineAbortedError("the rollout was aborted before the turn's tools were run")
        wanted = {block["toolUse"]["toolUseId"] for block in event.message["content"] if "toolUse" in block}
        for finished_before in self._stats.finished.keys() - wanted:
            del self._stats.finished[finished_before]

    def _before_tool_call(self, event: BeforeToolCallEvent[Any]) -> None:
        if event.tool_use["name"] == INVALID_TOOL_CALL:
            event.cancel_tool = self._model.conversation.failure_text(event.tool_use["toolUseId"])

    def _after_tools(self, event: AfterToolsEvent) -> None:
        if self._stats.infrastructure_error is not None:
            self._outer.infrastructure_error = self._outer.infrastructure_error or self._stats.infrastructure_error
            event.end_turn = f"Stopped: {StopReason.SANDBOX_ERROR}."
