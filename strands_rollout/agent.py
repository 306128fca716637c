"""Runs one episode: builds a Strands agent, lets it run once within its limits, names why it stopped, and discards it.

Knows Strands and the model; nothing of slime or samples.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strands import Agent
from strands.agent.conversation_manager import ConversationManager, NullConversationManager
from strands.hooks import (
    AfterToolsEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    BeforeToolsEvent,
    HookProvider,
    HookRegistry,
)
from strands.types.exceptions import EventLoopException, MaxTokensReachedException

from strands_rollout.agent_lifetime import agent_with
from strands_rollout.bounded_tool import BoundedTool, ToolSpan, ToolStats, no_tool_span
from strands_rollout.episode_deadline import ABORT_GRACE_S, EpisodeDeadline
from strands_rollout.episode_progress import EpisodeProgress, awaits_tools
from strands_rollout.errors import EngineAbortedError
from strands_rollout.flat_cycles import FlatCycles, History
from strands_rollout.sglang_model import SGLangModel
from strands_rollout.stop_reason import StopReason, reason_of_error
from strands_rollout.strands_events import INVALID_TOOL_CALL
from strands_rollout.strands_log import log_failures_once
from strands_rollout.tool_limiter import ToolLimiter
from strands_rollout.turn_tools import TurnTools
from strands_rollout.unwatched_cycles import TURN_CUT

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode; None means none. Token budgets are the model's (`TokenLimits`)."""

    max_tool_iterations: int | None = 5
    max_tool_calls: int | None = None
    max_parallel_tool_calls: int | None = None
    tool_timeout_s: float | None = None
    episode_timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """What became of an episode; its tokens are in `model.trajectory`.

    Attributes:
        stop_reason: Why it ended.
        error: What was raised, where something was.
        tool_iterations: Turns whose tools were run.
        tool_calls: Calls that were run.
        tools: Times and errors of the tools.
        duration_s: Wall-clock seconds in all, those before it was resumed included.
        limits: Those that it ran under.
        progress: Where it stands, for another agent to go on from; its `messages` are the agent's history.
    """

    stop_reason: StopReason
    error: BaseException | None
    tool_iterations: int
    tool_calls: int
    tools: ToolStats
    duration_s: float
    limits: EpisodeLimits
    progress: EpisodeProgress

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The agent's history, as Strands messages."""
        return self.progress.messages


async def run_episode(
    model: SGLangModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    system_prompt: str | None,
    tools: Sequence[Any],
    limits: EpisodeLimits,
    self_timed_tools: Collection[str] = (),
    hooks: Sequence[HookProvider] = (),
    tool_span: ToolSpan = no_tool_span,
    should_abort: Callable[[], bool] = lambda: False,
    engine_grace_s: float = ABORT_GRACE_S,
    conversation_manager: ConversationManager | None = None,
    progress: EpisodeProgress | None = None,
) -> Episode:
    """Build an agent, run it once on `messages`, discard it.

    Args:
        model: A model whose trajectory is new, or was resumed with the same `progress`.
        messages: Strands messages; the last is a user's. Not read where there is `progress`.
        system_prompt: The agent's system prompt.
        tools: Whatever `strands.Agent(tools=...)` takes.
        limits: The episode's limits.
        self_timed_tools: Names of tools that keep to their own time limit, because waiting for a free place must not
            count.
        hooks: Further Strands hooks; they see each event before the limits do.
        tool_span: Entered around each tool call that is run.
        should_abort: Asked before each request, before the tools of a turn, and every 0.05 s meanwhile; once it holds,
            the episode ends at once, a generation with what the engine had sampled.
        engine_grace_s: How long a generation is waited for then.
        conversation_manager: What may drop or sum up messages; the model must be one that begins a new segment then.
            None keeps all of them.
        progress: Go on from there instead of from `messages`.

    Raises:
        asyncio.CancelledError: The caller was cancelled. Nothing else: every other failure is in the result.
    """
    log_failures_once()
    started = time.monotonic()
    begun = progress or EpisodeProgress(messages[:-1], 0)
    stats, limiter = _stats_from(begun), _limiter_from(begun, limits)
    watch = _EpisodeWatch(model, stats, should_abort)
    error: Exception | None = None
    left_s = None if limits.episode_timeout_s is None else max(0.0, limits.episode_timeout_s - begun.duration_s)
    deadline = EpisodeDeadline(left_s, should_abort, model, engine_grace_s)
    history = begun.messages
    try:
        # Strands checks limits and hooks in the order of their registration
        # a hook or a conversation manager of the user's may listen to anything, and add middleware
        cycles = FlatCycles(None if hooks or conversation_manager else [watch, limiter])
        every_hook = [*hooks, watch, limiter, cycles]
        async with (
            deadline,
            agent_with(
                tools,
                lambda given: _build_agent(model, history, system_prompt, given, every_hook, conversation_manager),
            ) as agent,
        ):
            _bound_tools(agent, limits.tool_timeout_s, self_timed_tools, stats, tool_span)
            history = agent.messages
            model.conversation.history = history
            model.conversation.know_tools(agent.tool_registry.get_all_tool_specs())
            await cycles.run(agent, None if progress else list(messages[-1]["content"]))
        reason = _reason_of_end(limiter, watch)
    except Exception as e:  # every failure of an episode is data for whoever asked for it
        error = _unwrapped(e)
        if deadline.expired():
            reason, error = _end_of_deadline(deadline, limits)
        else:
            reason = reason_of_error(error, cut_by=model.cut_by, has_turns=model.conversation.turn_count > 0)
    model.conversation.drop_empty_segment()
    duration_s = begun.duration_s + time.monotonic() - started
    return Episode(
        stop_reason=reason,
        error=stats.infrastructure_error or error,
        tool_iterations=limiter.iterations,
        tool_calls=limiter.calls,
        tools=stats,
        duration_s=duration_s,
        limits=limits,
        progress=_progress(history, model, limiter, stats, duration_s),
    )


def _stats_from(begun: EpisodeProgress) -> ToolStats:
    """The tools' times and errors so far."""
    return ToolStats(
        begun.tool_s,
        begun.tool_errors,
        begun.tool_timeouts,
        finished=dict(begun.finished),
        unread=set(begun.finished),
    )


def _limiter_from(begun: EpisodeProgress, limits: EpisodeLimits) -> ToolLimiter:
    """The limits on tools, with what of them is used up."""
    limiter = ToolLimiter(
        limits.max_tool_iterations, max_calls=limits.max_tool_calls, max_parallel_calls=limits.max_parallel_tool_calls
    )
    limiter.go_on_from(begun.tool_iterations, begun.tool_calls)
    return limiter


def _progress(
    history: Sequence[Mapping[str, Any]],
    model: SGLangModel,
    limiter: ToolLimiter,
    stats: ToolStats,
    duration_s: float,
) -> EpisodeProgress:
    in_tools = awaits_tools(history)
    iterations, calls = limiter.before_turn if in_tools else (limiter.iterations, limiter.calls)
    return EpisodeProgress(
        messages=history,
        covered=model.conversation.covered_messages,
        finished=stats.finished if in_tools else {},
        tool_iterations=iterations,
        tool_calls=calls,
        tool_errors=stats.errors,
        tool_timeouts=stats.timeouts,
        tool_s=stats.seconds,
        duration_s=duration_s,
    )


def _build_agent(
    model: SGLangModel,
    history: Sequence[Mapping[str, Any]],
    system_prompt: str | None,
    tools: Sequence[Any],
    hooks: Sequence[HookProvider],
    conversation_manager: ConversationManager | None,
) -> Agent:
    return Agent(
        model=model,
        messages=History(dict(message) for message in history),  # type: ignore[misc] # they are TypedDicts
        tools=list(tools),
        system_prompt=system_prompt,
        callback_handler=None,
        conversation_manager=conversation_manager or NullConversationManager(),
        retry_strategy=None,
        hooks=list(hooks),
        tool_executor=TurnTools(),
    )


def _bound_tools(
    agent: Agent, timeout_s: float | None, self_timed: Collection[str], stats: ToolStats, span: ToolSpan
) -> None:
    registry = agent.tool_registry.registry
    for name, tool in list(registry.items()):
        registry[name] = BoundedTool(tool, timeout_s=None if name in self_timed else timeout_s, stats=stats, span=span)


class _EpisodeWatch(HookProvider):
    """Ends the loop on abort or a broken sandbox, and tells the policy of calls that could not be parsed.

    An abort while tools run is the deadline's.
    """

    def __init__(self, model: SGLangModel, stats: ToolStats, should_abort: Callable[[], bool]) -> None:
        self._model = model
        self._stats = stats
        self._should_abort = should_abort
        self.stopped_by: StopReason | None = None

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:  # noqa: ARG002, ANN401 - Strands' signature
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
            self.stopped_by = StopReason.SANDBOX_ERROR
            event.end_turn = f"Stopped: {self.stopped_by}."


def _reason_of_end(limiter: ToolLimiter, watch: _EpisodeWatch) -> StopReason:
    if watch.stopped_by is not None:
        return watch.stopped_by
    if limiter.tripped is not None:
        return StopReason.MAX_TOOL_ITERATIONS if limiter.tripped == "max_iterations" else StopReason.MAX_TOOL_CALLS
    return StopReason.COMPLETED


def _end_of_deadline(deadline: EpisodeDeadline, limits: EpisodeLimits) -> tuple[StopReason, Exception]:
    if deadline.was_aborted:
        return StopReason.ABORTED, EngineAbortedError("the rollout was aborted")
    return StopReason.EPISODE_TIMEOUT, TimeoutError(f"the episode took more than {limits.episode_timeout_s:g} s")


def _unwrapped(error: Exception) -> Exception:
    """Strands wraps what a tool cycle raises in an EventLoopException."""
    while isinstance(error, EventLoopException) and isinstance(error.original_exception, Exception):
        error = error.original_exception
    # Strands' words are about calling the agent again
    return MaxTokensReachedException(TURN_CUT) if isinstance(error, MaxTokensReachedException) else error
