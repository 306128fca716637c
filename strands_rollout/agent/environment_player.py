"""Episodes that an environment plays with its own agent, for example an environment of another library.

`EnvironmentRun` calls the environment's `play` within the episode's limits. It passes hooks for the environment's agent
to `play`. These hooks bind the agent to the record, limit and count the agent's tool calls, and notice aborts and
failed model calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from strands import Agent
from strands.hooks import AfterInvocationEvent, AfterModelCallEvent, BeforeInvocationEvent, HookProvider, HookRegistry
from strands.tools.executors import ConcurrentToolExecutor

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
from strands_rollout.agent.episode import hide_reported_failures
from strands_rollout.agent.limits import (
    TOOL_LIMIT_REASONS,
    EpisodeLimits,
    EpisodeWatch,
    StopReason,
    make_limiter,
    stop_reason_of,
    wrap_tools,
)
from strands_rollout.agent.loop import HAS_MIDDLEWARE, CallNext
from strands_rollout.agent.multi_agent import Team, contain_exits
from strands_rollout.agent.run import (
    Ending,
    Episode,
    EpisodeRun,
    PlayedEpisode,
    ending_at_timeout,
    ending_by_abort,
    original_error,
)
from strands_rollout.agent.tool_call import ToolSpan, TurnToolExecutor
from strands_rollout.client.retry import Fault
from strands_rollout.control import Deadline
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.record.saved import EpisodeProgress

logger = logging.getLogger(__name__)
_CANCEL_TIMEOUT_S: Final = 1.0


class EnvironmentRun(EpisodeRun):
    """An episode that the environment in `context` plays with its own agent.

    Args:
        model: The episode's model.
        context: The context, whose environment has the method `play`.
        limits: Limits that apply in addition to the environment's own limits.
        hooks: The user's Strands hooks for the environment's agent.
        tool_span: Returns a context manager to enter around each tool call; None for no context manager.
        progress: State of the aborted attempt, which `model` continues. The environment repeats the attempt, then
            continues it. None for a new episode.
        may_replay: True if a new environment may repeat and continue this episode after an abort.
    """

    player_name = "the environment"

    def __init__(
        self,
        model: SGLangModel,
        context: EpisodeContext,
        limits: EpisodeLimits,
        *,
        hooks: Sequence[HookProvider] = (),
        tool_span: ToolSpan | None = None,
        progress: EpisodeProgress | None = None,
        may_replay: bool = False,
    ) -> None:
        start = EpisodeProgress((), 0)
        if progress is not None:  # the environment repeats the attempt's calls, so their counts start from 0
            model.replay(progress.messages)
            start = EpisodeProgress(progress.messages, 0, duration_s=progress.duration_s)
        super().__init__(model, context.control, limits, start)
        self.context, self.tool_span, self.is_resumable = context, tool_span, may_replay
        self.limiter = make_limiter(limits)
        self.agent_hook = _AgentHook(self)
        self.hooks = [*hooks, EpisodeWatch(self.stats, self.control), self.limiter, self.agent_hook]
        self.played: PlayedEpisode | None = None

    async def _play(self) -> Ending:
        hide_reported_failures()
        self.played = await self._call_play()
        if self.played.scoring_error is not None:
            raise self.played.scoring_error
        return self._end_of_turns()

    async def _call_play(self) -> PlayedEpisode:
        """Call `play`; after a cancellation or a timeout, it has up to `CLOSE_TIMEOUT_S` for its cleanup."""
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
                playing.cancel()  # the cleanup after the first cancellation hangs, so cancel it too
                await asyncio.wait([playing], timeout=_CANCEL_TIMEOUT_S)
        if not isinstance(played, PlayedEpisode):
            raise errors.EnvironmentFaultError(
                f"environment.play returned a {type(played).__name__}; expected a PlayedEpisode"
            )
        if played.score is not None:
            played = replace(played, score=checked_score(played.score, "the environment"))
        return played

    async def _wait_for_phase_change(self, playing: asyncio.Future[PlayedEpisode]) -> None:
        """Wait until the agent begins or ends its turns, or the environment ends.

        Raises:
            EnvironmentFaultError: The environment takes too long before or after the agent's turns; or, in older
                versions of Strands, the turns reach the episode's timeout.
        """
        limit_s = self._phase_limit_s()
        self.agent_hook.changed.clear()
        changed: asyncio.Future[Any] = asyncio.ensure_future(self.agent_hook.changed.wait())
        done, _ = await asyncio.wait([playing, changed], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        if not done and self.agent_hook.is_playing:
            raise errors.EnvironmentFaultError(
                f"the episode took more than {self.limits.episode_timeout_s:g} s, and was ended without a score: with "
                "this version of Strands, the agent's turns can't be ended without ending the environment. Raise "
                "episode_timeout_s, or install strands-agents 1.62 or newer"
            )
        if not done:
            raise errors.EnvironmentFaultError(
                f"the environment took more than {limit_s:g} s {self.agent_hook.phase}; raise environment_timeout_s or "
                "episode_timeout_s"
            )

    def _phase_limit_s(self) -> float | None:
        """Return the current phase's limit; `_AgentHook` applies `episode_timeout_s` to the agent's turns."""
        if self.agent_hook.is_playing:  # `_AgentHook` can't cut the turns in older versions of Strands
            return None if HAS_MIDDLEWARE else self.control.left_s(self.limits.episode_timeout_s)
        limits = [self.context.timeout_s, self.limits.episode_timeout_s if self.agent_hook.agent is None else None]
        return min((limit for limit in limits if limit is not None), default=None)

    def _deadline(self) -> Deadline:
        return self.control.deadline(model=self.model)  # without a time limit; see `_phase_limit_s`

    def _ending(self, deadline: Deadline, outcome: Ending | Exception) -> Ending:
        # a result that the environment's `play` returns after an abort does not count
        return ending_by_abort() if deadline.was_aborted else super()._ending(deadline, outcome)

    def _root_cause(self) -> Ending | None:
        """Return the ending if an abort or a fault ended the agent's turns; None for other causes, such as a limit."""
        reason, error = self._end_of_turns()
        is_fault = reason is StopReason.ABORTED or (reason.endswith("_error") and error is not None)
        return (reason, error) if is_fault else None

    def _ending_by_error(self, error: Exception) -> Ending:
        if not isinstance(error, errors.RolloutError) or isinstance(error, errors.ToolError):
            error = errors.EnvironmentFaultError(describe_failure("the environment", error, self.context.task))
        return stop_reason_of(error, cut_by=None, has_turns=True), error

    def _end_of_turns(self) -> Ending:
        """Return the stop reason and error of the agent's turns.

        The error is None if the turns ended with an answer, or at a limit of tool calls, of tool iterations or of the
        environment. It is also None if only the environment failed: the environment's exception then ends the episode.
        """
        played, agent_hook = self.played, self.agent_hook
        is_completed = played is not None and played.stop_reason is StopReason.COMPLETED
        fault = self.stats.infrastructure_error or (None if is_completed else agent_hook.error)
        if fault is not None:
            reason, _ = ending = self._ending_of(fault)
            if reason is not StopReason.INTERNAL_ERROR:
                return ending
            if played is None or played.error is not None:
                if not user_code_location(fault):
                    return ending
                message = describe_failure("a hook of the environment's agent", fault, self.context.task)
                return StopReason.ENVIRONMENT_ERROR, errors.EnvironmentFaultError(message)
        if not is_completed and self.control.should_abort():
            return ending_by_abort()
        if agent_hook.is_out_of_time:
            return ending_at_timeout(self.limits.episode_timeout_s, agent_hook.engine_fault)
        if self.limiter.tripped:
            return TOOL_LIMIT_REASONS[self.limiter.tripped], None
        if played is None:
            return StopReason.ENVIRONMENT_ERROR, None
        if not self.model.conversation.turn_count:
            message = "the environment has ended without asking the policy, so there is no token to train"
            return StopReason.ENVIRONMENT_ERROR, errors.EnvironmentFaultError(message)
        return played.stop_reason, played.error

    def _finish(self, ending: Ending) -> Episode:
        episode = super()._finish(ending)
        episode.played = self.played
        self.agent_hook.release()
        return episode

    def _history(self) -> Sequence[Mapping[str, Any]]:
        if self.model.is_replaying:  # aborted while the environment repeated the earlier attempt
            return self.start.messages
        return () if self.agent_hook.agent is None else self.agent_hook.agent.messages

    def _counts(self) -> tuple[int, int]:
        return self.limiter.iterations, self.limiter.calls


class _AgentHook(HookProvider):
    """Hook that makes the environment's agent part of the episode.

    Attributes:
        agent: The first invoked agent on the episode's model; None before its invocation and after the episode.
        error: The exception of the last model call, or of a hook before it; None if the call succeeded, or before the
            first call.
        engine_fault: The engine's fault when the turns were cut at `episode_timeout_s`; None if they were not cut, or
            the engine was not failing then.
    """

    def __init__(self, run: EnvironmentRun) -> None:
        self._run: EnvironmentRun | None = run  # None once the episode has ended, though its agent may go on
        self.agent: Agent | None = None
        self.error: Exception | None = None
        self.is_playing = False
        self.changed = asyncio.Event()
        self.is_out_of_time = False
        self.engine_fault: Fault | None = None

    @property
    def phase(self) -> str:
        return "before its agent was asked" if self.agent is None else "after its agent's answer"

    def release(self) -> None:
        """Drop the ended run and its agent: reference cycles would keep them in memory until a garbage collection."""
        self._run = self.agent = None

    def register_hooks(self, registry: HookRegistry, **kwargs: object) -> None:  # noqa: ARG002 - Strands' signature
        registry.add_callback(BeforeInvocationEvent, self._before_invocation)
        registry.add_callback(AfterModelCallEvent, self._after_model_call)
        registry.add_callback(AfterInvocationEvent, self._after_invocation)

    def _before_invocation(self, event: BeforeInvocationEvent) -> None:
        agent, run = event.agent, self._run
        if self.agent is None and run is not None and agent.model is run.model:
            self.agent = agent
            self._join(agent, run)
        self._set_playing(agent, is_playing=True)

    def _after_invocation(self, event: AfterInvocationEvent) -> None:
        self._set_playing(event.agent, is_playing=False)

    def _set_playing(self, agent: Agent, *, is_playing: bool) -> None:
        if agent is self.agent:
            self.is_playing = is_playing
            self.changed.set()

    def _join(self, agent: Agent, run: EnvironmentRun) -> None:
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
        if event.agent is self.agent:
            self.error = None if event.exception is None else original_error(event.exception)

    async def _cut_at_timeout(self, context: Any, call_next: CallNext) -> AsyncGenerator[Any, None]:  # noqa: ANN401
        """End the agent's turns at `episode_timeout_s`, as middleware; the environment still scores these turns."""
        run = self._run
        deadline = asyncio.timeout(None if run is None else run.control.left_s(run.limits.episode_timeout_s))
        try:
            async with deadline:
                async for event in call_next(context):
                    yield event
        except TimeoutError:
            if run is not None and deadline.expired():
                self.is_out_of_time, self.engine_fault = True, run.model.engine_fault
            raise
