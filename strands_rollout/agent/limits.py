"""Stop reasons, and the limits of an episode: hooks that limit tool calls and notice aborts, and time limits of tools.

`ToolLimiter` works for any Strands agent; `EpisodeWatch` needs an episode.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

from strands import Agent
from strands.hooks import (
    AfterToolCallEvent,
    AfterToolsEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    BeforeToolsEvent,
    HookProvider,
    HookRegistry,
)
from strands.types import exceptions

from strands_rollout import errors
from strands_rollout.agent.multi_agent import Team
from strands_rollout.agent.tool_call import BoundedTool, ToolSpan, ToolStats, callable_names
from strands_rollout.control import Control
from strands_rollout.model.answers import failure_message
from strands_rollout.record.record import UNPARSED
from strands_rollout.record.saved import EpisodeProgress


class StopReason(StrEnum):
    """The reason why an episode ended.

    Limits are checked in this order:

    - Before each model call: abort, then the token budgets.
    - After a turn: its length, abort, tool iterations, tool calls, parallel calls.
    - After an answer: user turns.
    - At any time: abort, and the timeouts of tools and of the episode.

    The first limit reached ends the episode. If a turn has too many parallel calls, or a tool times out, the policy
    reads an error instead, and the episode continues.
    """

    COMPLETED = "completed"
    """The policy answered without a tool call, or the user's hook, tool, program or environment ended the episode."""
    TURN_LENGTH = "turn_length"
    """A turn reached the limit of tokens per turn."""
    RESPONSE_LENGTH = "response_length"
    """The response budget (slime's max_new_tokens) is used up."""
    CONTEXT_LENGTH = "context_length"
    """The context reached its configured maximum length, or the engine's."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The first prompt leaves no token for an answer."""
    MAX_TOOL_ITERATIONS = "max_tool_iterations"
    """The policy asked for tools after `max_tool_iterations` turns with tools."""
    MAX_TOOL_CALLS = "max_tool_calls"
    """The policy asked for more than `max_tool_calls` calls."""
    MAX_USER_TURNS = "max_user_turns"
    """The environment or a program sent another user message after `max_user_turns` user turns."""
    TEAM_LIMIT = "team_limit"
    """A swarm or graph reached its own limit, or ended before an agent on the episode's model answered."""
    ENVIRONMENT_LIMIT = "environment_limit"
    """The environment that played the episode reached a limit of its own, such as its maximum messages."""
    UNSENDABLE_TEXT = "unsendable_text"
    """A turn, a tool result or a later user message contains a placeholder token of an image or another medium."""
    EPISODE_TIMEOUT = "episode_timeout"
    """The episode reached its timeout."""
    ABORTED = "aborted"
    """The rollout was aborted; or, with `on_engine_abort: return`, the engine aborted a turn."""
    ENGINE_ERROR = "engine_error"
    """The engine failed, could not be reached, or aborted each request of a turn."""
    SANDBOX_ERROR = "sandbox_error"
    """The code executor, an MCP server or other infrastructure of tools failed."""
    ENVIRONMENT_ERROR = "environment_error"
    """A resource or the environment failed."""
    WORKER_ERROR = "worker_error"
    """The episode's worker process died, and the episode can't be continued."""
    SETUP_ERROR = "setup_error"
    """The prompt, the template, a setting, a tool, or the user's agent or program can't be used."""
    INTERNAL_ERROR = "internal_error"
    """A bug in this package, a hook or a tool provider, or another error that has no reason of its own."""


def stop_reason_of(error: BaseException, *, cut_by: str | None, has_turns: bool) -> StopReason:
    """Return the stop reason of an episode whose agent loop raised an exception.

    Args:
        error: An exception of the model, a tool or a hook.
        cut_by: The limit that cut the last turn: a key of `LENGTH_REASONS`; None if the turn was not cut.
        has_turns: True if the policy has sampled a turn.
    """
    if isinstance(error, exceptions.MaxTokensReachedException):
        return LENGTH_REASONS[cut_by or "turn"]
    if isinstance(error, errors.BudgetExhaustedError | exceptions.ContextWindowOverflowException):
        budget = getattr(error, "budget", "context")
        return LENGTH_REASONS[budget] if has_turns else StopReason.PROMPT_TOO_LONG
    if isinstance(error, exceptions.StructuredOutputException) and has_turns:
        return StopReason.COMPLETED  # the policy has answered, though not in the requested form
    if isinstance(error, errors.UnsendableTextError):
        return StopReason.UNSENDABLE_TEXT if has_turns or error.is_sampled else StopReason.SETUP_ERROR
    return reason_of_error(error)


def reason_of_error(error: BaseException) -> StopReason:
    """Return the stop reason of an episode that was ended by an error other than a token limit."""
    reasons: dict[type[BaseException], StopReason] = {
        errors.EngineAbortedError: StopReason.ABORTED,
        errors.EngineError: StopReason.ENGINE_ERROR,
        errors.SandboxError: StopReason.SANDBOX_ERROR,
        errors.EnvironmentFaultError: StopReason.ENVIRONMENT_ERROR,
        errors.LostEpisodeError: StopReason.WORKER_ERROR,
        errors.TeamLimitError: StopReason.TEAM_LIMIT,
        errors.RolloutError: StopReason.SETUP_ERROR,
    }
    return next((reason for kind, reason in reasons.items() if isinstance(error, kind)), StopReason.INTERNAL_ERROR)


TURN_CUT_MESSAGE: Final = "the turn was cut at its limit of tokens"
LENGTH_REASONS: Final = {
    "turn": StopReason.TURN_LENGTH,
    "response": StopReason.RESPONSE_LENGTH,
    "context": StopReason.CONTEXT_LENGTH,
}


ToolLimit = Literal["max_iterations", "max_calls"]
TOOL_LIMIT_REASONS: Final[dict[ToolLimit, StopReason]] = {
    "max_iterations": StopReason.MAX_TOOL_ITERATIONS,
    "max_calls": StopReason.MAX_TOOL_CALLS,
}


class ToolLimiter(HookProvider):
    """Hook that limits an agent's tool iterations and calls: `Agent(..., hooks=[ToolLimiter(max_iterations=5)])`.

    An iteration is a model turn that asks for tools. After `max_iterations` iterations the model may still answer; if
    it asks for tools again, they are not run and the invocation ends. Counts add up over invocations until `reset()`.

    Args:
        max_iterations: Maximum turns whose tools are run; None for no limit.
        max_calls: Maximum calls of all turns; None for no limit. If a turn would exceed it, none of the turn's calls is
            run, and the invocation ends.
        max_parallel_calls: Maximum calls of one turn; None for no limit. Further calls of the turn get an error result,
            and the loop continues.

    Attributes:
        iterations: Number of tool iterations that were run.
        calls: Number of tool calls that were run. Calls that could not be parsed don't count.
        tripped: The limit that ended the loop, or None.
        before_turn: `iterations` and `calls` before the last model call.

    Raises:
        ConfigError: A limit is negative.
    """

    def __init__(
        self, max_iterations: int | None = None, *, max_calls: int | None = None, max_parallel_calls: int | None = None
    ) -> None:
        limits = {"max_iterations": max_iterations, "max_calls": max_calls, "max_parallel_calls": max_parallel_calls}
        for name, limit in limits.items():
            if limit is not None and limit < 0:
                raise errors.ConfigError(f"got {name}={limit}; expected at least 0, or None for no limit")
        self._max_iterations = max_iterations
        self._max_calls = max_calls
        self._max_parallel = max_parallel_calls
        self.reset()

    def reset(self) -> None:
        """Set all counts to zero, and `tripped` to None."""
        self.iterations = 0
        self.calls = 0
        self.tripped: ToolLimit | None = None
        self.before_turn = (0, 0)
        self._over_parallel: set[str] = set()

    def register_hooks(self, registry: HookRegistry, **kwargs: object) -> None:  # noqa: ARG002 - Strands' signature
        """Called by Strands."""
        registry.add_callback(BeforeModelCallEvent, self._before_model_call)
        registry.add_callback(BeforeToolsEvent, self._before_tools)
        registry.add_callback(BeforeToolCallEvent, self._before_tool_call)
        registry.add_callback(AfterToolsEvent, self._after_tools)

    def _before_model_call(self, event: BeforeModelCallEvent) -> None:  # noqa: ARG002 - Strands' signature
        self.before_turn = (self.iterations, self.calls)

    def _before_tools(self, event: BeforeToolsEvent) -> None:
        uses = [block["toolUse"] for block in event.message["content"] if "toolUse" in block]
        wanted = [use["toolUseId"] for use in uses if not use["toolUseId"].endswith(UNPARSED)]
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


class EpisodeWatch(HookProvider):
    """Hook that ends an agent's loop after an abort, or after an infrastructure fault of a tool.

    It also answers calls that could not be parsed, counts calls of unknown tools, and drops the results of earlier
    turns from `ToolStats.finished`.

    The hook notices an abort between steps; while the model or a tool runs, the episode's deadline notices it.

    Args:
        stats: Counts of the agent's tools.
        control: Checked before each model call and before a turn's tools.
        outer: Counts of the whole episode, if `stats` are the counts of agents used as tools; an infrastructure fault
            is stored in both. None if `stats` are the counts of the whole episode.
    """

    def __init__(self, stats: ToolStats, control: Control, outer: ToolStats | None = None) -> None:
        self._stats = stats
        self._outer = outer or stats
        self._control = control

    def register_hooks(self, registry: HookRegistry, **kwargs: object) -> None:  # noqa: ARG002 - Strands' signature
        """Called by Strands."""
        registry.add_callback(BeforeModelCallEvent, self._before_model_call)
        registry.add_callback(BeforeToolsEvent, self._before_tools)
        registry.add_callback(BeforeToolCallEvent, self._before_tool_call)
        registry.add_callback(AfterToolCallEvent, self._after_tool_call)
        registry.add_callback(AfterToolsEvent, self._after_tools)

    def _before_model_call(self, event: BeforeModelCallEvent) -> None:  # noqa: ARG002 - Strands' signature
        self._control.check("before a model call")

    def _before_tools(self, event: BeforeToolsEvent) -> None:
        self._control.check("before the turn's tools were run")
        requested = {block["toolUse"]["toolUseId"] for block in event.message["content"] if "toolUse" in block}
        for earlier_call in self._stats.finished.keys() - requested:  # results of earlier turns are in the history
            del self._stats.finished[earlier_call]

    def _before_tool_call(self, event: BeforeToolCallEvent[Any]) -> None:
        if event.tool_use["toolUseId"].endswith(UNPARSED):  # not the tool's name: the policy can write any name
            arguments = event.tool_use["input"]  # a user's hook may have changed it
            reason = arguments.get("reason") if isinstance(arguments, dict) else None
            event.cancel_tool = failure_message(str(reason or "it does not follow the format"))

    def _after_tool_call(self, event: AfterToolCallEvent[Any]) -> None:
        is_answered = event.cancel_message is not None or event.result["status"] != "error"
        if event.selected_tool is None and not is_answered:  # a hook or middleware may answer an unknown tool's call
            self._stats.count_unknown(event.tool_use)

    def _after_tools(self, event: AfterToolsEvent) -> None:
        if self._stats.infrastructure_error is not None:
            self._outer.infrastructure_error = self._outer.infrastructure_error or self._stats.infrastructure_error
            event.end_turn = f"Stopped: {StopReason.SANDBOX_ERROR}."


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode; None for no limit. Token budgets belong to the model: see `TokenLimits`."""

    max_tool_iterations: int | None = 5
    max_tool_calls: int | None = None
    max_parallel_tool_calls: int | None = None
    max_user_turns: int | None = None
    tool_timeout_s: float | None = None
    episode_timeout_s: float | None = None


def make_limiter(limits: EpisodeLimits, progress: EpisodeProgress | None = None) -> ToolLimiter:
    """Return the hook that applies the tool limits; its counts continue from the `progress` of an aborted attempt."""
    limiter = ToolLimiter(
        limits.max_tool_iterations, max_calls=limits.max_tool_calls, max_parallel_calls=limits.max_parallel_tool_calls
    )
    if progress is not None:
        limiter.before_turn = limiter.iterations, limiter.calls = progress.tool_iterations, progress.tool_calls
    return limiter


def wrap_tools(
    agent: Agent, timeout_s: float | None, self_timed: Collection[str], stats: ToolStats, span: ToolSpan | None = None
) -> None:
    """Replace the tools in the agent's registry by `BoundedTool`s, under names that Strands accepts in calls.

    The tools named in `self_timed` get no timeout, since they time their calls themselves. If several episodes use the
    same agent as a tool, its tools have the wrappers of the episode that began last.
    """
    registry = agent.tool_registry.registry
    names, tools = callable_names(registry.keys()), [*registry.items()]
    registry.clear()
    for name, registered in tools:
        tool = registered.inner if isinstance(registered, BoundedTool) else registered
        limit_s = None if name in self_timed else timeout_s
        registry[names[name]] = BoundedTool(tool, timeout_s=limit_s, stats=stats, span=span, name=names[name])


def limit_other_agents(
    team: Team,
    limits: EpisodeLimits,
    self_timed: Collection[str],
    stats: ToolStats,
    control: Control,
) -> None:
    """Apply the episode's limits to agents that can't give the episode's answer.

    Each agent of the policy gets the limits of tool iterations and calls, with its own counts. If an agent is used as a
    tool, its own tools get the time limit of tools, even if the agent is on another model.
    """
    # not `stats`: an agent used as a tool makes calls within another call, and their ids may equal those of other calls
    inner_stats = ToolStats(control)
    for agent in team.tool_agents:
        wrap_tools(agent, limits.tool_timeout_s, self_timed, inner_stats)
    for agent in team.other_policy_agents:
        own_stats = inner_stats if agent in team.tool_agents else stats
        watch = EpisodeWatch(own_stats, control, stats)
        agent.hooks.add_hook(watch)
        agent.hooks.add_hook(make_limiter(limits))
