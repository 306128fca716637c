"""Runs one episode: builds a Strands agent, lets it run within its limits, and says why it stopped.

Strands logs every exception of its loop as an error, also an aborted generation, of which a rollout has hundreds at the
end of each step: these log lines are kept back, since each failure of an episode is reported once, by its sample.
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

from strands import Agent
from strands.agent.conversation_manager import ConversationManager, NullConversationManager
from strands.hooks import BeforeToolsEvent, HookProvider, HookRegistry
from strands.multiagent.base import MultiAgentBase
from strands.types.exceptions import EventLoopException, MaxTokensReachedException

from strands_rollout import errors
from strands_rollout.agent.limits import (
    EpisodeLimits,
    EpisodeWatch,
    StopReason,
    ToolLimiter,
    bound_others,
    bound_tools,
    deadline_end,
    limiter_of,
    reason_of_error,
)
from strands_rollout.agent.loop import TURN_CUT, FlatCycles, TurnTools
from strands_rollout.agent.multi_agent import (
    Team,
    Visits,
    ask_team,
    contain_exits,
    join_episode,
    own_team,
    refuse_interrupts,
)
from strands_rollout.agent.tool_call import ToolSpan, ToolStats, sandbox_fault
from strands_rollout.control import Control, Deadline
from strands_rollout.errors import RolloutError, TeamLimitError
from strands_rollout.exits import exits_as_errors
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.record.saved import EpisodeProgress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """The outcome of an episode that a program played.

    Attributes:
        text: What it returned, where that is text: the answer, in place of the policy's last words.
        score: What it returned, where that is a number or a mapping with `score`.
        facts: What the endpoint was asked, and what became of a process.
        dropped_tokens: Those of an earlier attempt that this one did not repeat; None where there is none.
    """

    text: str | None
    score: dict[str, Any] | None
    facts: dict[str, Any]
    dropped_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode; its tokens are in `model.trajectory`.

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
        program: What a program has told, where one played.
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
    program: ProgramOutcome | None = None

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The agent's history, as Strands messages."""
        return self.progress.messages


SEVERAL_SEGMENTS: Final = "it has several segments"
SEVERAL_AGENTS: Final = "it is a swarm's or graph's"


class Journal(Protocol):
    """Keeps what another process needs to continue an episode."""

    async def turn_ended(self, progress: EpisodeProgress) -> None:
        """Note that a turn has ended, whose tools run as soon as this returns."""

    def call_ended(self, progress: EpisodeProgress) -> None:
        """Note that a tool call has ended."""

    def close(self, reason: str) -> None:
        """Note that the episode can't be continued from its further steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSetup:
    """The agent of an episode, and the conditions that it plays under.

    Attributes:
        system_prompt: The agent's.
        tools: Whatever `strands.Agent(tools=...)` takes.
        limits: The episode's limits.
        control: Once the rollout is aborted, the episode ends at once, a generation with what the engine had sampled.
        self_timed_tools: Names of tools that keep to their own time limit, because waiting for a free place must not
            count.
        hooks: Further Strands hooks; they see each event before the limits do.
        tool_span: Entered around each tool call that is run.
        conversation_manager: What may drop or sum up messages; the model must be one that begins a new segment then.
            None keeps all of them.
        progress: Continue from there instead of from the messages.
        team: Runs in place of an agent that is built here; `tools`, `conversation_manager` and, where it has one of
            its own, `system_prompt` are not used then.
        next_message: Given the policy's answer, the user's next message; None ends the episode.
        journal: Told of each step after which an agent elsewhere could continue the episode.
    """

    system_prompt: str | None
    tools: Sequence[Any]
    limits: EpisodeLimits
    control: Control = field(default_factory=Control)
    self_timed_tools: Collection[str] = ()
    hooks: Sequence[HookProvider] = ()
    tool_span: ToolSpan | None = None
    conversation_manager: ConversationManager | None = None
    progress: EpisodeProgress | None = None
    team: AbstractAsyncContextManager[Team] | None = None
    next_message: Callable[[str], Awaitable[str | None]] | None = None
    journal: Journal | None = None


async def run_episode(model: SGLangModel, messages: Sequence[Mapping[str, Any]], setup: EpisodeSetup) -> Episode:
    """Build an agent, run it once on `messages`, or as long as somebody answers it, discard it.

    Args:
        model: A model whose trajectory is new, or was resumed with the same `setup.progress`.
        messages: Strands messages; the last is a user's. Not read where there is `setup.progress`.
        setup: The agent and its conditions.

    Raises:
        asyncio.CancelledError: The caller was cancelled. Nothing else: every other failure is in the result.
    """
    with setup.control.running(0.0 if setup.progress is None else setup.progress.duration_s):
        return await _AgentRun(model, messages, setup).play()


class _AgentRun:
    """One episode on its way."""

    def __init__(self, model: SGLangModel, messages: Sequence[Mapping[str, Any]], setup: EpisodeSetup) -> None:
        self.model = model
        self.setup = setup
        self.begun = begun = setup.progress or EpisodeProgress(messages[:-1], 0)
        self.said: Any = None if setup.progress else list(messages[-1]["content"])
        self.stats = ToolStats(
            setup.control,
            begun.tool_s,
            begun.tool_errors,
            begun.tool_timeouts,
            finished=dict(begun.finished),
            unread=set(begun.finished),
            calls=[dict(call) for call in begun.calls],
        )
        self.limiter = limiter_of(setup.limits, begun)
        # a hook or a conversation manager of the user's may listen to anything, and add middleware
        self.is_watched = bool(setup.hooks or setup.conversation_manager or setup.team)
        self.watch = EpisodeWatch(self.stats, setup.control)
        own: list[HookProvider] = [self.watch, self.limiter]
        if setup.journal is not None:
            own.append(_JournalHook(self, setup.journal))
        self.cycles = FlatCycles(None if self.is_watched else own)
        # Strands checks limits and hooks in the order of their registration
        self.every_hook = [*setup.hooks, *own, self.cycles]
        self.team: Team | None = None
        self.main: Agent | None = None  # the agent that gave the last answer, or may give the first
        self.limiters: dict[Agent, ToolLimiter] = {}
        self.visits = Visits()
        self.user_turns = 0

    async def play(self) -> Episode:
        log_failures_once()
        error: Exception | None = None
        control, limit_s = self.setup.control, self.setup.limits.episode_timeout_s
        deadline = control.deadline(control.left_s(limit_s), model=self.model)
        try:
            with exits_as_errors("the agent, or a hook of it,", RuntimeError):
                async with deadline, self.setup.team or own_team(self.setup.tools, self._build_agent) as team:
                    self._prepare(team)
                    reason = None
                    while reason is None:
                        reason = await self._turn(team)
        except Exception as e:  # every failure of an episode is data for its caller
            reason, error = self._end_of(deadline) if deadline.expired() else self._end_by_error(e)
        is_resumable = self.team is None or self.team.is_alone
        history = self.begun.messages if self.main is None else self.main.messages
        if self.model.conversation.drop_new_branch():
            self.model.conversation.branch.forget_history()
        in_tools = bool(history) and any("toolUse" in block for block in history[-1]["content"])
        progress = self.progress(history, in_tools=in_tools)
        return Episode(
            stop_reason=reason,
            error=self.stats.infrastructure_error or error,
            tool_iterations=self.limiter.iterations,
            tool_calls=self.limiter.calls,
            tools=self.stats,
            duration_s=progress.duration_s,
            limits=self.setup.limits,
            progress=progress,
            user_turns=self.user_turns,
            is_resumable=is_resumable,
        )

    def _build_agent(self, tools: Sequence[Any]) -> Agent:
        return Agent(
            model=self.model,
            messages=[dict(message) for message in self.begun.messages],  # type: ignore[misc] # TypedDicts
            tools=list(tools),
            system_prompt=self.setup.system_prompt,
            callback_handler=None,
            conversation_manager=self.setup.conversation_manager or NullConversationManager(),
            retry_strategy=None,
            hooks=list(self.every_hook),
            tool_executor=TurnTools(),
        )

    def _prepare(self, team: Team) -> None:
        """Let the episode's history, hooks and limits hold for its agents."""
        setup, limits, conversation = self.setup, self.setup.limits, self.model.conversation
        self.team, self.main = team, (main := team.candidates[0])
        self.limiters = {main: self.limiter, **{agent: limiter_of(limits) for agent in team.candidates[1:]}}
        if setup.team is not None:
            hooks = {
                agent: self.every_hook if agent is main else [*setup.hooks, self.watch, limiter, FlatCycles()]
                for agent, limiter in self.limiters.items()
            }
            is_resumed = setup.progress is not None
            join_episode(team, self.begun.messages, self.setup.system_prompt, hooks, is_resumed=is_resumed)
        for agent in team.agents:
            bound_tools(agent, limits.tool_timeout_s, setup.self_timed_tools, self.stats, setup.tool_span)
        bound_others(team, limits, setup.self_timed_tools, self.stats, setup.control)
        if self.is_watched:
            contain_exits(team)
        if setup.journal is not None and not team.is_alone:
            setup.journal.close(SEVERAL_AGENTS)
        conversation.bind(main, getattr(main, "_cancel_signal", None))  # not public in older Strands
        self.model.know_tools(conversation, main.tool_registry.get_all_tool_specs())

    async def _turn(self, team: Team) -> StopReason | None:
        """Let the agents answer what was said last; why the episode ends, or None where something else is said."""
        if isinstance(team.runner, Agent):
            refuse_interrupts(await self.cycles.run(team.runner, self.said))
        else:
            try:
                await ask_team(team.runner, self.said, self.visits)
            finally:
                self._settle_main(team, team.runner)
            if not self.model.conversation.turn_count:
                names = " or ".join(repr(agent.name) for agent in team.candidates)
                raise TeamLimitError(
                    f"the {type(team.runner).__name__} ended before {names} spoke, whose tokens are the sample's"
                )
        if self.stats.infrastructure_error is not None:
            return reason_of_error(self.stats.infrastructure_error, cut_by=None, has_turns=True)
        if tripped := self.limiter.tripped:
            return StopReason.MAX_TOOL_ITERATIONS if tripped == "max_iterations" else StopReason.MAX_TOOL_CALLS
        if self.setup.next_message is None:
            return StopReason.COMPLETED
        blocks = self.main.messages[-1]["content"] if self.main and self.main.messages else []
        answer = "\n".join(block["text"] for block in blocks if "text" in block)  # without reasoning
        said, limit = await self.setup.next_message(answer), self.setup.limits.max_user_turns
        if said is None:
            return StopReason.COMPLETED
        if limit is not None and self.user_turns >= limit:
            return StopReason.MAX_USER_TURNS
        self.user_turns += 1
        self.said = [{"text": said}]
        return None

    def _settle_main(self, team: Team, runner: MultiAgentBase) -> None:
        """Make the agent whose answer is that of the swarm or graph the main one: of those that spoke, the last."""
        record = self.model.record
        spoke = {agent: one for agent in team.candidates if (one := record.last_of(agent)) is not None}
        if not spoke:
            return
        # a user's own structure may tell nothing of its nodes
        by_time = sorted(spoke, key=lambda agent: spoke[agent].last_request_at_s, reverse=True)
        main = next(agent for agent in (*self.visits.last_agents(runner), *by_time) if agent in spoke)
        self.main, self.limiter = main, self.limiters[main]
        record.promote(spoke[main])

    def progress(self, history: Sequence[Mapping[str, Any]], *, in_tools: bool) -> EpisodeProgress:
        """Return where the episode stands; `in_tools` where the history ends with calls that may lack results."""
        limiter, stats = self.limiter, self.stats
        iterations, calls = limiter.before_turn if in_tools else (limiter.iterations, limiter.calls)
        return EpisodeProgress(
            messages=history,
            covered=self.model.conversation.branch.covered,
            finished=stats.finished if in_tools else {},
            tool_iterations=iterations,
            tool_calls=calls,
            tool_errors=stats.errors,
            tool_timeouts=stats.timeouts,
            tool_s=stats.seconds,
            duration_s=self.setup.control.elapsed_s,
            calls=stats.calls,
        )

    def _end_by_error(self, error: Exception) -> tuple[StopReason, Exception]:
        # Strands wraps what a tool cycle raises
        while isinstance(error, EventLoopException) and isinstance(error.original_exception, Exception):
            error = error.original_exception
        if isinstance(error, MaxTokensReachedException):
            error = MaxTokensReachedException(TURN_CUT)  # Strands' words are about calling the agent again
        if not isinstance(error, RolloutError):  # Strands wraps what a tool provider raises
            error = sandbox_fault(error) or error
        has_turns = self.model.conversation.turn_count > 0
        return reason_of_error(error, cut_by=self.model.cut_by, has_turns=has_turns), error

    def _end_of(self, deadline: Deadline) -> tuple[StopReason, Exception]:
        was_aborted, limit_s = deadline.was_aborted, self.setup.limits.episode_timeout_s
        if self.team is None and not was_aborted:  # what the policy has no part in
            words = f"the episode took more than {limit_s:g} s, in which the agent and its tools did not start"
            return StopReason.SETUP_ERROR, RolloutError(words)
        return deadline_end(was_aborted=was_aborted, limit_s=limit_s, fault=self.model.engine_fault)


class _JournalHook(HookProvider):
    """Tells a journal of the main agent's turns, before their tools run, and of each call's end."""

    def __init__(self, run: _AgentRun, journal: Journal) -> None:
        self._run = run
        self._journal = journal
        run.stats.on_end = self._call_ended

    def register_hooks(self, registry: HookRegistry, **kwargs: object) -> None:  # noqa: ARG002 - Strands' signature
        """Called by Strands."""
        registry.add_callback(BeforeToolsEvent, self._before_tools)

    async def _before_tools(self, event: BeforeToolsEvent) -> None:
        if not event.cancel and (progress := self._progress()) is not None:
            await self._journal.turn_ended(progress)

    def _call_ended(self) -> None:
        if (progress := self._progress()) is not None:
            self._journal.call_ended(progress)

    def _progress(self) -> EpisodeProgress | None:
        if len(self._run.model.conversation.branches) > 1:
            self._journal.close(SEVERAL_SEGMENTS)
            return None
        main = cast("Agent", self._run.main)
        return self._run.progress(main.messages, in_tools=True)


_LOGGER: Final = "strands.event_loop.event_loop"
_OWN_ERRORS: Final = frozenset(
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, RolloutError)
)


class _ReportedElsewhere(logging.Filter):
    """Drops the records of failed cycles whose error is one of this package's."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a record that is not to be logged."""
        # the first argument of such a record is the error's class
        named = record.args[0] if isinstance(record.args, tuple) and record.args else None
        return not (record.levelno == logging.ERROR and named in _OWN_ERRORS)


_FILTER: Final = _ReportedElsewhere()


def log_failures_once() -> None:
    """Install the filter; calling it again changes nothing."""
    logging.getLogger(_LOGGER).addFilter(_FILTER)
