"""What holds for every agent of an episode: its limits, the time of its tools, and the hooks that watch it.

Knows Strands' agents; nothing of how an episode is run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strands import Agent
from strands.hooks import HookProvider

from strands_rollout.agent_team import Team
from strands_rollout.bounded_tool import BoundedTool, ToolSpan, ToolStats, no_tool_span
from strands_rollout.episode_progress import EpisodeProgress
from strands_rollout.episode_watch import EpisodeWatch
from strands_rollout.flat_cycles import History
from strands_rollout.tool_limiter import ToolLimiter


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode; None means none. Token budgets are the model's (`TokenLimits`)."""

    max_tool_iterations: int | None = 5
    max_tool_calls: int | None = None
    max_parallel_tool_calls: int | None = None
    max_user_turns: int | None = None
    tool_timeout_s: float | None = None
    episode_timeout_s: float | None = None


def limiter_of(limits: EpisodeLimits, begun: EpisodeProgress | None = None) -> ToolLimiter:
    """The limits on tools, with what of them is used up."""
    limiter = ToolLimiter(
        limits.max_tool_iterations, max_calls=limits.max_tool_calls, max_parallel_calls=limits.max_parallel_tool_calls
    )
    if begun is not None:
        limiter.go_on_from(begun.tool_iterations, begun.tool_calls)
    return limiter


def bound_tools(
    agent: Agent, timeout_s: float | None, self_timed: Collection[str], stats: ToolStats, span: ToolSpan = no_tool_span
) -> None:
    """Bound each of the agent's tools in time.

    Args:
        agent: Its registry is changed.
        timeout_s: Seconds that a call may take; None for no limit.
        self_timed: Names of tools that keep to their own time limit.
        stats: Where calls are counted.
        span: Entered around each call.
    """
    registry = agent.tool_registry.registry
    for name, tool in list(registry.items()):
        registry[name] = BoundedTool(tool, timeout_s=None if name in self_timed else timeout_s, stats=stats, span=span)


def bound_others(
    team: Team,
    limits: EpisodeLimits,
    self_timed: Collection[str],
    stats: ToolStats,
    should_abort: Callable[[], bool],
) -> None:
    """Let the episode's limits hold for the agents beside the main one, each counted alone."""
    # calls of an agent that is a tool are part of that tool's call, and may have the ids of others
    inner_stats = ToolStats()
    for agent in team.tool_agents:
        bound_tools(agent, limits.tool_timeout_s, self_timed, inner_stats)
    for agent, model in team.others:
        own_stats = inner_stats if agent in team.tool_agents else stats
        watch = EpisodeWatch(model, own_stats, should_abort, stats)
        _watch(agent, [watch, limiter_of(limits)])


def join_episode(
    team: Team,
    history: Sequence[Mapping[str, Any]],
    system_prompt: str | None,
    hooks: Sequence[HookProvider],
    *,
    is_resumed: bool,
) -> None:
    """Put the episode's history and hooks on a main agent that somebody else has built."""
    main = team.main
    _watch(main, hooks)
    if team.is_alone:
        shown = [] if is_resumed else main.messages  # the history of a resumed episode begins with them
        main.messages = History([*shown, *(dict(message) for message in history)])  # type: ignore[list-item] # they are TypedDicts
        if main.system_prompt is None:
            main.system_prompt = system_prompt


def _watch(agent: Agent, hooks: Sequence[HookProvider]) -> None:
    for hook in hooks:
        agent.hooks.add_hook(hook)
