"""Episodes that an environment plays with its own agent, for example an environment of another library.

`play_environment` calls the environment's `play` within the episode's limits. It passes hooks that make the agent part
of the episode: they bind the agent to the record, limit and count its tools, and notice aborts and failed model calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from strands import Agent
from strands.hooks import AfterInvocationEvent, AfterModelCallEvent, BeforeInvocationEvent, HookProvider, HookRegistry
from strands.tools.executors import ConcurrentToolExecutor
from strands.types.exceptions import EventLoopException

from strands_rollout import errors
from strands_rollout.agent import loop
from strands_rollout.agent.environment import (
    CLOSE_TIMEOUT_S,
    EpisodeContext,
    call_user_code,
    checked_score,
    describe_failure,
    user_code_location,
)
from strands_rollout.agent.episode import Episode, hide_reported_failures
from strands_rollout.agent.limits import (
    EpisodeLimits,
    EpisodeWatch,
    StopReason,
    end_at_deadline,
    make_limiter,
    stop_reason_of,
    wrap_tools,
)
from strands_rollout.agent.loop import HAS_MIDDLEWARE, CallNext
from strands_rollout.agent.multi_agent import Team, contain_exits
from strands_rollout.agent.tool_call import ToolSpan, ToolStats, TurnToolExecutor
from strands_rollout.client.retry import Fault
from strands_rollout.exits import exits_as_errors
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.record.saved import EpisodeProgress

logger = logging.getLogger(__name__)
_CANCEL_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """The end of an episode that an environment has played.

    Attributes:
        stop_reason: The reason why the episode ended, as the environment sees it.
        error: The fault that ended the agent's turns; None for an ordinary end.
        scoring_error: The fault that prevented a score; None if scoring succeeded or the environment does not score.
        score: The environment's score, a mapping with `score`; None if it does not score, so that the settings' reward
            grades the answer.
        facts: Facts of the environment, as plain JSON.
    """

    stop_reason: StopReason
    error: Exception | None = None
    scoring_error: Exception | None = None
    score: dict[str, Any] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


async def play_environment(
    model: SGLangModel,
    context: EpisodeContext,
    *,
    limits: EpisodeLimits,
    hooks: Sequence[HookProvider] = (),
    tool_span: ToolSpan | None = None,
    progress: EpisodeProgress | None = None,
    may_replay: bool = False,
) -> Episode:
    """Let the environment of an open context play the episode.

    Args:
        model: The episode's model.
        context: The context, whose environment has the method `play`.
        limits: Limits that apply in addition to the environment's own limits.
        hooks: Further Strands hooks for the environment's agent.
        tool_span: Context manager entered around each tool call.
        progress: State of an aborted attempt, which the environment repeats and continues; the model was resumed from
            it.
        may_replay: True if a new environment may repeat and continue this episode after an abort.

    Raises:
        asyncio.CancelledError: The caller was cancelled. All other failures are returned in `Episode.error`.
    """
    if progress is not None:
        model.replay(progress.messages)
    with context.control.running(0.0 if progress is None else progress.duration_s):
        return await _EnvironmentRun(model, context, limits, hooks, tool_span, progress, may_replay=may_replay).play()


class _EnvironmentRun:
    """The state of one running episode."""

    def __init__(
        self,
        model: SGLangModel,
        context: EpisodeContext,
        limits: EpisodeLimits,
        hooks: Sequence[HookProvider],
        tool_span: ToolSpan | None,
        earlier_progress: EpisodeProgress | None,
        *,
        may_replay: bool,
    ) -> None:
        self.earlier_progress, self.may_replay = earlier_progress, may_replay
        self.model, self.context, self.limits, self.tool_span = model, context, limits, tool_span
        self.control = context.control
        self.stats = ToolStats(self.control)
        self.limiter = make_limiter(limits)
        self.agent_hook = _AgentHook(self)
        self.hooks = [*hooks, EpisodeWatch(self.stats, self.control), self.limiter, self.agent_hook]

    async def play(self) -> Episode:
        hide_reported_failures()
        deadline = self.control.deadline(model=self.model)  # notices only aborts; see `_time_left_s`
        played: PlayedEpisode | None = None
        raised: Exception | None = None
        try:
            with exits_as_errors("the environment", RuntimeError):
                async with deadline:
                    played = await self._play()
        except Exception as e:  # a user's environment may raise anything
            raised = e
        reason, error = self._ending(played, raised)
        if deadline.was_aborted:
            reason, error = end_at_deadline(was_aborted=True, limit_s=None, fault=None)
        if self.model.conversation.drop_new_branch():
            self.model.conversation.branch.forget_history()
        history: Sequence[Mapping[str, Any]] = () if self.agent_hook.agent is None else self.agent_hook.agent.messages
        if self.earlier_progress is not None and self.model.is_replaying:  # aborted while repeating
            history = self.earlier_progress.messages
        progress = EpisodeProgress(
            messages=history,
            covered=self.model.conversation.branch.covered,
            tool_iterations=self.limiter.iterations,
            tool_calls=self.limiter.calls,
            tool_errors=self.stats.errors,
            tool_timeouts=self.stats.timeouts,
            tool_s=self.stats.seconds,
            duration_s=self.control.elapsed_s,
            calls=self.stats.calls,
        )
        return Episode(
            stop_reason=reason,
            error=error,
            tool_iterations=self.limiter.iterations,
            tool_calls=self.limiter.calls,
            tools=self.stats,
            duration_s=progress.duration_s,
            limits=self.limits,
            progress=progress,
            is_resumable=self.may_replay,
            played=played,
        )

    async def _play(self) -> PlayedEpisode:
        """Call the environment's `play`, and check its result.

        After a cancellation, wait up to `CLOSE_TIMEOUT_S` for the environment's cleanup.
        """
        environment, task = self.context.task.environment, self.context.task
        playing = asyncio.ensure_future(
            call_user_code(environment.play, self.model, self.hooks, loop=self.context.loop)
        )
        try:
            while not playing.done():
                await self._wait_for_phase_change(playing)
            played = playing.result()
        finally:
            if not playing.done():
                playing.cancel()
                await asyncio.wait([playing], timeout=CLOSE_TIMEOUT_S)
            if not playing.done():
                logger.warning(
                    "event=not_closed: the environment did not end within %g s after it was cancelled, for the sample "
                    "of index %s",
                    CLOSE_TIMEOUT_S,
                    task.index,
                )
                playing.cancel()  # the environment's cleanup after the first cancellation hangs
                await asyncio.wait([playing], timeout=_CANCEL_TIMEOUT_S)
        if not isinstance(played, PlayedEpisode):
            raise errors.EnvironmentFaultError(
                f"environment.play returned a {type(played).__name__}; expected a PlayedEpisode"
            )
        if played.score is not None:
            played = replace(played, score=checked_score(played.score, "the environment"))
        return played

    async def _wait_for_phase_change(self, playing: asyncio.Future[PlayedEpisode]) -> None:
        """Wait until the agent begins or ends its turns, or the environment has ended.

        Raises:
            EnvironmentFaultError: The environment takes too long before or after the agent's turns, so the policy is
                not at fault.
        """
        limit_s = self._time_left_s()
        self.agent_hook.changed.clear()
        changed: asyncio.Future[Any] = asyncio.ensure_future(self.agent_hook.changed.wait())
        done, _ = await asyncio.wait([playing, changed], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        if not done:
            raise errors.EnvironmentFaultError(
                f"the environment took more than {limit_s:g} s {self.agent_hook.phase}; raise environment_timeout_s or "
                "episode_timeout_s"
            )

    def _time_left_s(self) -> float | None:
        """Return the time limit of the environment's next step, in seconds; None for no limit.

        `environment_timeout_s` limits the environment's work before and after the agent's turns. `episode_timeout_s`
        limits the agent's turns, in `_AgentHook`, and the time before them.
        """
        if self.agent_hook.is_playing:  # `_AgentHook` can't cut the turns in older versions of Strands
            return None if HAS_MIDDLEWARE else self.control.left_s(self.limits.episode_timeout_s)
        limits = [self.context.timeout_s, self.limits.episode_timeout_s if self.agent_hook.agent is None else None]
        return min((limit for limit in limits if limit is not None), default=None)

    def _ending(self, played: PlayedEpisode | None, raised: Exception | None) -> tuple[StopReason, Exception | None]:
        """Return the episode's stop reason and error.

        A fault of the environment counts unless the agent's turns ended in an abort or an error.
        """
        fault = raised if played is None else played.scoring_error
        if fault is not None and (not isinstance(fault, errors.RolloutError) or isinstance(fault, errors.ToolError)):
            fault = errors.EnvironmentFaultError(describe_failure("the environment", fault, self.context.task))
        reason, error = self._ending_of_agent(played)
        if fault is None or reason is StopReason.ABORTED or (reason.endswith("_error") and error is not None):
            return reason, error
        return stop_reason_of(fault, cut_by=None, has_turns=True), fault

    def _ending_of_agent(self, played: PlayedEpisode | None) -> tuple[StopReason, Exception | None]:
        """Return the stop reason and error of the agent's turns; no error if only the environment failed."""
        model, agent_hook = self.model, self.agent_hook
        has_turns, cut_by = model.conversation.turn_count > 0, model.cut_by
        is_completed = played is not None and played.stop_reason is StopReason.COMPLETED
        fault = self.stats.infrastructure_error or (None if is_completed else agent_hook.error)
        if fault is not None:
            reason = stop_reason_of(fault, cut_by=cut_by, has_turns=has_turns)
            if reason is not StopReason.INTERNAL_ERROR:
                return reason, fault
            if played is None or played.error is not None:
                if not user_code_location(fault):
                    return reason, fault
                message = describe_failure("a hook of the environment's agent", fault, self.context.task)
                return StopReason.ENVIRONMENT_ERROR, errors.EnvironmentFaultError(message)
        if not is_completed and self.control.should_abort():
            return StopReason.ABORTED, errors.EngineAbortedError("the rollout was aborted")
        if agent_hook.is_out_of_time:
            limit_s, failing = self.limits.episode_timeout_s, agent_hook.engine_fault
            return end_at_deadline(was_aborted=False, limit_s=limit_s, fault=failing)
        if self.limiter.tripped:
            is_iterations = self.limiter.tripped == "max_iterations"
            return (StopReason.MAX_TOOL_ITERATIONS if is_iterations else StopReason.MAX_TOOL_CALLS), None
        if played is None:
            return StopReason.ENVIRONMENT_ERROR, None
        if not has_turns:
            message = "the environment has ended without asking the policy, so that there is no token to train"
            return StopReason.ENVIRONMENT_ERROR, errors.EnvironmentFaultError(message)
        return played.stop_reason, played.error


class _AgentHook(HookProvider):
    """Hook that makes the environment's agent part of the episode, and notes the last failure of its model calls.

    Attributes:
        agent: The first agent on the episode's model; None before it is invoked.
        error: The exception of the last model call, or of a hook before it; None if it succeeded.
        is_playing: True during the agent's invocation, when the policy uses the time.
        changed: Set when `is_playing` changes.
        is_out_of_time: True if the agent's turns were cut at `episode_timeout_s`.
        engine_fault: The engine's fault when the turns were cut; None if the engine was not failing.
    """

    def __init__(self, run: _EnvironmentRun) -> None:
        self._run = run
        self.agent: Agent | None = None
        self.error: Exception | None = None
        self.is_playing = False
        self.changed = asyncio.Event()
        self.is_out_of_time = False
        self.engine_fault: Fault | None = None

    @property
    def phase(self) -> str:
        """The environment's work while the agent does not play, for messages."""
        return "before its agent was asked" if self.agent is None else "after its agent's answer"

    def register_hooks(self, registry: HookRegistry, **kwargs: object) -> None:  # noqa: ARG002 - Strands' signature
        """Called by Strands."""
        registry.add_callback(BeforeInvocationEvent, self._before_invocation)
        registry.add_callback(AfterModelCallEvent, self._after_model_call)
        registry.add_callback(AfterInvocationEvent, self._after_invocation)

    def _before_invocation(self, event: BeforeInvocationEvent) -> None:
        agent, run = event.agent, self._run
        if self.agent is None and agent.model is run.model:
            self.agent = agent
            self._join(agent)
        self._set_playing(agent, is_playing=True)

    def _after_invocation(self, event: AfterInvocationEvent) -> None:
        self._set_playing(event.agent, is_playing=False)

    def _set_playing(self, agent: Agent, *, is_playing: bool) -> None:
        if agent is self.agent:
            self.is_playing = is_playing
            self.changed.set()

    def _join(self, agent: Agent) -> None:
        """Give the agent the episode's time limits and tool counts, and bind it to the main conversation."""
        run = self._run
        if HAS_MIDDLEWARE:
            agent.add_middleware(vars(loop)["AgentStreamStage"], self._cut_at_timeout)
        contain_exits(Team(agent, [agent], [agent]))
        wrap_tools(agent, run.limits.tool_timeout_s, (), run.stats, run.tool_span)
        if type(agent.tool_executor) is ConcurrentToolExecutor:
            agent.tool_executor = TurnToolExecutor()
        conversation = run.model.conversation
        conversation.bind(agent, getattr(agent, "_cancel_signal", None))  # private in older Strands
        run.model.bind_tools(conversation, agent.tool_registry.get_all_tool_specs())

    def _after_model_call(self, event: AfterModelCallEvent) -> None:
        error = event.exception
        while isinstance(error, EventLoopException) and isinstance(error.original_exception, Exception):
            error = error.original_exception
        if event.agent is self.agent:
            self.error = error

    async def _cut_at_timeout(self, context: Any, call_next: CallNext) -> AsyncGenerator[Any, None]:  # noqa: ANN401
        """Middleware that ends the agent's turns at `episode_timeout_s`; the environment still scores these turns.

        Raises:
            TimeoutError: The time is up.
        """
        run = self._run
        deadline = asyncio.timeout(run.control.left_s(run.limits.episode_timeout_s))
        try:
            async with deadline:
                async for event in call_next(context):
                    yield event
        except TimeoutError:
            if deadline.expired():
                self.is_out_of_time, self.engine_fault = True, run.model.engine_fault
            raise
