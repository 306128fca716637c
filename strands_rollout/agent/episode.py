"""Runs one episode: builds a Strands agent, lets it run within its limits, and says why it stopped.

Strands logs every exception of its loop as an error, also an aborted generation, of which a rollout has hundreds at the
end of each step: these log lines are kept back, since each failure of an episode is reported once, by its sample.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final

from strands import Agent
from strands.agent.conversation_manager import ConversationManager, NullConversationManager
from strands.hooks import HookProvider
from strands.types.exceptions import EventLoopException, MaxTokensReachedException

from strands_rollout import errors
from strands_rollout.agent.limits import (
    EpisodeLimits,
    EpisodeWatch,
    ToolLimiter,
    bound_others,
    bound_tools,
    contain_exits,
    join_episode,
    limiter_of,
)
from strands_rollout.agent.loop import TURN_CUT, FlatCycles, History, TurnTools
from strands_rollout.agent.multi_agent import Team, ask_team, own_team, refuse_interrupts
from strands_rollout.agent.stop_reason import EpisodeProgress, StopReason, reason_of_error
from strands_rollout.agent.tool_call import ToolSpan, ToolStats, sandbox_fault
from strands_rollout.aio import ABORT_GRACE_S, EpisodeDeadline, exits_as_errors
from strands_rollout.errors import EngineAbortedError, EngineUnavailableError, RolloutError, TeamLimitError
from strands_rollout.model.sglang_model import SGLangModel

logger = logging.getLogger(__name__)


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
        progress: Where it stands, for another agent to continue from; its `messages` are the main agent's history.
        user_turns: User's messages after the first.
        is_resumable: Whether another agent can; none can where a swarm or graph played.
    """

    stop_reason: StopReason
    error: BaseException | None
    tool_iterations: int
    tool_calls: int
    tools: ToolStats
    duration_s: float
    limits: EpisodeLimits
    progress: EpisodeProgress
    user_turns: int = 0
    is_resumable: bool = True

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
    tool_span: ToolSpan | None = None,
    should_abort: Callable[[], bool] = lambda: False,
    engine_grace_s: float = ABORT_GRACE_S,
    conversation_manager: ConversationManager | None = None,
    progress: EpisodeProgress | None = None,
    team: AbstractAsyncContextManager[Team] | None = None,
    next_message: Callable[[str], Awaitable[str | None]] | None = None,
) -> Episode:
    """Build an agent, run it once on `messages`, or as long as somebody answers it, discard it.

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
        progress: Continue from there instead of from `messages`.
        team: Who plays instead of an agent that is built here; `tools`, `conversation_manager` and, where it has one of
            its own, `system_prompt` are not used then.
        next_message: Given the policy's answer, the user's next message; None ends the episode.

    Raises:
        asyncio.CancelledError: The caller was cancelled. Nothing else: every other failure is in the result.
    """
    started = time.monotonic()
    log_failures_once()
    begun = progress or EpisodeProgress(messages[:-1], 0)
    stats, limiter = _stats_from(begun), limiter_of(limits, begun)
    watch = EpisodeWatch(stats, should_abort)
    error: Exception | None = None
    left_s = None if limits.episode_timeout_s is None else max(0.0, limits.episode_timeout_s - begun.duration_s)
    deadline = EpisodeDeadline(left_s, should_abort, model, engine_grace_s)
    history, is_resumable = begun.messages, True
    main: Agent | None = None
    user_turns = UserTurns(next_message, limits.max_user_turns)
    try:
        with exits_as_errors("the agent, or a hook of it,", RuntimeError):
            # Strands checks limits and hooks in the order of their registration
            # a hook or a conversation manager of the user's may listen to anything, and add middleware
            is_watched = bool(hooks or conversation_manager or team)
            cycles = FlatCycles(None if is_watched else [watch, limiter])
            every_hook = [*hooks, watch, limiter, cycles]
            build = functools.partial(_build_agent, model, history, system_prompt, every_hook, conversation_manager)
            opened = team or own_team(tools, build)
            async with deadline, opened as players:
                if team is not None:
                    join_episode(players, history, system_prompt, every_hook, is_resumed=progress is not None)
                for agent in players.agents:
                    bound_tools(agent, limits.tool_timeout_s, self_timed_tools, stats, tool_span)
                bound_others(players, limits, self_timed_tools, stats, should_abort)
                if is_watched:
                    contain_exits(players)
                main, is_resumable = players.main, players.is_alone
                # a swarm or graph gives its agents new histories, and a hook may put another list in the place of one
                model.conversation.history = (lambda: players.main.messages) if is_resumable else None
                model.conversation.know_tools(players.main.tool_registry.get_all_tool_specs())
                said = None if progress else list(messages[-1]["content"])
                reason = None
                while reason is None:
                    await _ask(players, cycles, said)
                    reason = _reason_of_stop(limiter, stats)
                    if reason is None:
                        said, reason = await user_turns.next(players.main.messages)
    except Exception as e:  # every failure of an episode is data for its caller
        reason, error = _end_of_deadline(deadline, limits, model) if deadline.expired() else _end_by_error(e, model)
    if main is not None:
        history = main.messages
        model.conversation.history = (lambda: history) if is_resumable else None  # the agent can go
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
        user_turns=user_turns.count,
        is_resumable=is_resumable,
    )


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


def _stats_from(begun: EpisodeProgress) -> ToolStats:
    """The tools' times and errors so far."""
    return ToolStats(
        begun.tool_s,
        begun.tool_errors,
        begun.tool_timeouts,
        finished=dict(begun.finished),
        unread=set(begun.finished),
        calls=[dict(call) for call in begun.calls],
    )


def _progress(
    history: Sequence[Mapping[str, Any]],
    model: SGLangModel,
    limiter: ToolLimiter,
    stats: ToolStats,
    duration_s: float,
) -> EpisodeProgress:
    in_tools = _awaits_tools(history)
    iterations, calls = limiter.before_turn if in_tools else (limiter.iterations, limiter.calls)
    return EpisodeProgress(
        messages=history,
        covered=model.conversation.last.covered_messages,
        finished=stats.finished if in_tools else {},
        tool_iterations=iterations,
        tool_calls=calls,
        tool_errors=stats.errors,
        tool_timeouts=stats.timeouts,
        tool_s=stats.seconds,
        duration_s=duration_s,
        calls=stats.calls,
    )


def _awaits_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a history ends with calls that have no results yet."""
    return bool(messages) and any("toolUse" in block for block in messages[-1]["content"])


def _build_agent(
    model: SGLangModel,
    history: Sequence[Mapping[str, Any]],
    system_prompt: str | None,
    hooks: Sequence[HookProvider],
    conversation_manager: ConversationManager | None,
    tools: Sequence[Any],
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


async def _ask(team: Team, cycles: FlatCycles, said: Any) -> None:  # noqa: ANN401 - whatever Strands takes
    if isinstance(team.runner, Agent):
        refuse_interrupts(await cycles.run(team.runner, said))
    else:
        await ask_team(team.runner, said)
        if isinstance(team.main.model, SGLangModel) and not team.main.model.conversation.turn_count:
            raise TeamLimitError(
                f"the {type(team.runner).__name__} ended before {team.main.name!r} spoke, whose tokens are the sample's"
            )


def _reason_of_stop(limiter: ToolLimiter, stats: ToolStats) -> StopReason | None:
    """Why the agent was stopped; None if it has answered."""
    if stats.infrastructure_error is not None:
        return StopReason.SANDBOX_ERROR
    if limiter.tripped is not None:
        return StopReason.MAX_TOOL_ITERATIONS if limiter.tripped == "max_iterations" else StopReason.MAX_TOOL_CALLS
    return None


def _end_by_error(raised: Exception, model: SGLangModel) -> tuple[StopReason, Exception]:
    error = _unwrapped(raised)
    if not isinstance(error, RolloutError):  # Strands wraps what a tool provider raises
        error = sandbox_fault(error) or error
    return reason_of_error(error, cut_by=model.cut_by, has_turns=model.conversation.turn_count > 0), error


def _end_of_deadline(
    deadline: EpisodeDeadline, limits: EpisodeLimits, model: SGLangModel
) -> tuple[StopReason, Exception]:
    if deadline.was_aborted:
        return StopReason.ABORTED, EngineAbortedError("the rollout was aborted")
    words = f"the episode took more than {limits.episode_timeout_s:g} s"
    if model.engine_fault is not None:  # what an outage has cut is no answer of the policy's
        return StopReason.ENGINE_ERROR, EngineUnavailableError(
            f"{words}; the engine is away: {model.engine_fault.words}"
        )
    return StopReason.EPISODE_TIMEOUT, TimeoutError(words)


def _unwrapped(error: Exception) -> Exception:
    """Strands wraps what a tool cycle raises in an EventLoopException."""
    while isinstance(error, EventLoopException) and isinstance(error.original_exception, Exception):
        error = error.original_exception
    # Strands' words are about calling the agent again
    return MaxTokensReachedException(TURN_CUT) if isinstance(error, MaxTokensReachedException) else error


_LOGGER: Final = "strands.event_loop.event_loop"
_OWN_ERRORS: Final = frozenset(
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.RolloutError)
)


class _ReportedElsewhere(logging.Filter):
    """Drops the records of failed cycles whose error is one of this package's."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log it; the first argument of such a record is the error's class."""
        named = record.args[0] if isinstance(record.args, tuple) and record.args else None
        return not (record.levelno == logging.ERROR and named in _OWN_ERRORS)


_FILTER: Final = _ReportedElsewhere()


def log_failures_once() -> None:
    """Install the filter; calling it again changes nothing."""
    logging.getLogger(_LOGGER).addFilter(_FILTER)
