"""Runs one episode: builds a Strands agent, lets it run within its limits, and says why it stopped.

Strands logs every exception of its loop as an error, also an aborted generation, of which a rollout has hundreds at the
end of each step: these log lines are kept back, since each failure of an episode is reported once, by its sample.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, cast

from strands import Agent
from strands.agent.conversation_manager import ConversationManager, NullConversationManager
from strands.hooks import BeforeToolsEvent, HookProvider, HookRegistry
from strands.multiagent.base import MultiAgentBase
from strands.types.exceptions import EventLoopException, MaxTokensReachedException

from strands_rollout import errors
from strands_rollout.agent.limits import (
    EpisodeLimits,
    EpisodeProgress,
    EpisodeWatch,
    StopReason,
    ToolLimiter,
    bound_others,
    bound_tools,
    contain_exits,
    deadline_end,
    join_episode,
    limiter_of,
    reason_of_error,
)
from strands_rollout.agent.loop import TURN_CUT, FlatCycles, TurnTools
from strands_rollout.agent.multi_agent import Team, Visits, ask_team, own_team, refuse_interrupts
from strands_rollout.agent.tool_call import ToolSpan, ToolStats, sandbox_fault
from strands_rollout.aio import ABORT_GRACE_S, EngineGrace, EpisodeDeadline, exits_as_errors
from strands_rollout.errors import RolloutError, TeamLimitError
from strands_rollout.model.sglang_model import SGLangModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """What is known of an episode that a program played.

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


class Step(NamedTuple):
    """Where an episode stands when a turn has ended, or a call of it; the fields are as those of `EpisodeProgress`."""

    messages: Sequence[Mapping[str, Any]]
    finished: Mapping[str, Any]
    calls: Sequence[Mapping[str, Any]]
    counts: tuple[float, ...]
    """Those that `STEP_COUNTS` names."""


STEP_COUNTS: Final = (
    *("covered", "tool_iterations", "tool_calls", "tool_errors", "tool_timeouts"),
    *("tool_s", "duration_s"),
)


class Journal(Protocol):
    """Keeps what another process needs to continue an episode."""

    async def turn_ended(self, step: Step) -> None:
        """A turn has ended, and its tools run as soon as this returns."""

    def call_ended(self, step: Step) -> None:
        """A tool call has ended."""

    def close(self, reason: str) -> None:
        """The episode can't be continued from its further steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSetting:
    """What an episode runs under.

    Attributes:
        limits: The episode's limits.
        self_timed_tools: Names of tools that keep to their own time limit, because waiting for a free place must not
            count.
        hooks: Further Strands hooks; they see each event before the limits do.
        tool_span: Entered around each tool call that is run.
        should_abort: Asked before each request, before the tools of a turn, and every 0.05 s meanwhile; once it holds,
            the episode ends at once, a generation with what the engine had sampled.
        engine_grace_s: How long a generation is waited for then, by when it was sent.
        conversation_manager: What may drop or sum up messages; the model must be one that begins a new segment then.
            None keeps all of them.
        progress: Continue from there instead of from `messages`.
        team: Runs in place of an agent that is built here; `tools`, `conversation_manager` and, where it has one of
            its own, `system_prompt` are not used then.
        next_message: Given the policy's answer, the user's next message; None ends the episode.
        journal: Told of each step after which an agent elsewhere could continue the episode.
    """

    limits: EpisodeLimits
    self_timed_tools: Collection[str] = ()
    hooks: Sequence[HookProvider] = ()
    tool_span: ToolSpan | None = None
    should_abort: Callable[[], bool] = lambda: False
    engine_grace_s: EngineGrace = lambda _sent_at: ABORT_GRACE_S
    conversation_manager: ConversationManager | None = None
    progress: EpisodeProgress | None = None
    team: AbstractAsyncContextManager[Team] | None = None
    next_message: Callable[[str], Awaitable[str | None]] | None = None
    journal: Journal | None = None


async def run_episode(
    model: SGLangModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    system_prompt: str | None,
    tools: Sequence[Any],
    limits: EpisodeLimits,
    **setting: Any,  # noqa: ANN401 - the further fields of EpisodeSetting
) -> Episode:
    """Build an agent, run it once on `messages`, or as long as somebody answers it, discard it.

    Args:
        model: A model whose trajectory is new, or was resumed with the same `progress`.
        messages: Strands messages; the last is a user's. Not read where there is `progress`.
        system_prompt: The agent's system prompt.
        tools: Whatever `strands.Agent(tools=...)` takes.
        limits: The episode's limits.
        **setting: The further fields of `EpisodeSetting`.

    Raises:
        asyncio.CancelledError: The caller was cancelled. Nothing else: every other failure is in the result.
    """
    return await _Run(model, messages, system_prompt, tools, EpisodeSetting(limits=limits, **setting)).play()


class _Run:
    """One episode on its way."""

    def __init__(
        self,
        model: SGLangModel,
        messages: Sequence[Mapping[str, Any]],
        system_prompt: str | None,
        tools: Sequence[Any],
        setting: EpisodeSetting,
    ) -> None:
        self.model = model
        self.setting = setting
        self.system_prompt = system_prompt
        self.tools = tools
        self.begun = begun = setting.progress or EpisodeProgress(messages[:-1], 0)
        self.said: Any = None if setting.progress else list(messages[-1]["content"])
        self.stats = ToolStats(
            begun.tool_s,
            begun.tool_errors,
            begun.tool_timeouts,
            finished=dict(begun.finished),
            unread=set(begun.finished),
            calls=[dict(call) for call in begun.calls],
        )
        self.limiter = limiter_of(setting.limits, begun)
        # a hook or a conversation manager of the user's may listen to anything, and add middleware
        self.is_watched = bool(setting.hooks or setting.conversation_manager or setting.team)
        self.watch = EpisodeWatch(self.stats, setting.should_abort)
        own: list[HookProvider] = [self.watch, self.limiter]
        if setting.journal is not None:
            own.append(_JournalHook(self, setting.journal))
        self.cycles = FlatCycles(None if self.is_watched else own)
        # Strands checks limits and hooks in the order of their registration
        self.every_hook = [*setting.hooks, *own, self.cycles]
        limit_s = setting.limits.episode_timeout_s
        left_s = None if limit_s is None else max(0.0, limit_s - begun.duration_s)
        self.deadline = EpisodeDeadline(left_s, setting.should_abort, model, setting.engine_grace_s)
        self.team: Team | None = None
        self.main: Agent | None = None  # the agent that gave the last answer, or may give the first
        self.limiters: dict[Agent, ToolLimiter] = {}
        self.visits = Visits()
        self.user_turns = 0
        self.started = 0.0

    async def play(self) -> Episode:
        self.started = started = time.monotonic()
        log_failures_once()
        error: Exception | None = None
        try:
            with exits_as_errors("the agent, or a hook of it,", RuntimeError):
                async with self.deadline, self.setting.team or own_team(self.tools, self._build_agent) as team:
                    self._prepare(team)
                    reason = None
                    while reason is None:
                        reason = await self._turn(team)
        except Exception as e:  # every failure of an episode is data for its caller
            reason, error = self._end_of_deadline() if self.deadline.expired() else self._end_by_error(e)
        is_resumable = self.team is None or self.team.is_alone
        history = self.begun.messages if self.main is None else self.main.messages
        self.model.conversation.drop_empty_segment()
        duration_s = self.begun.duration_s + time.monotonic() - started
        return Episode(
            stop_reason=reason,
            error=self.stats.infrastructure_error or error,
            tool_iterations=self.limiter.iterations,
            tool_calls=self.limiter.calls,
            tools=self.stats,
            duration_s=duration_s,
            limits=self.setting.limits,
            progress=self._progress(history, duration_s),
            user_turns=self.user_turns,
            is_resumable=is_resumable,
        )

    def _build_agent(self, tools: Sequence[Any]) -> Agent:
        return Agent(
            model=self.model,
            messages=[dict(message) for message in self.begun.messages],  # type: ignore[misc] # TypedDicts
            tools=list(tools),
            system_prompt=self.system_prompt,
            callback_handler=None,
            conversation_manager=self.setting.conversation_manager or NullConversationManager(),
            retry_strategy=None,
            hooks=list(self.every_hook),
            tool_executor=TurnTools(),
        )

    def _prepare(self, team: Team) -> None:
        """Let the episode's history, hooks and limits hold for its agents."""
        setting, limits, conversation = self.setting, self.setting.limits, self.model.conversation
        self.team, self.main = team, (main := team.candidates[0])
        self.limiters = {main: self.limiter, **{agent: limiter_of(limits) for agent in team.candidates[1:]}}
        if setting.team is not None:
            hooks = {
                agent: self.every_hook if agent is main else [*setting.hooks, self.watch, limiter, FlatCycles()]
                for agent, limiter in self.limiters.items()
            }
            is_resumed = setting.progress is not None
            join_episode(team, self.begun.messages, self.system_prompt, hooks, is_resumed=is_resumed)
        for agent in team.agents:
            bound_tools(agent, limits.tool_timeout_s, setting.self_timed_tools, self.stats, setting.tool_span)
        bound_others(team, limits, setting.self_timed_tools, self.stats, setting.should_abort)
        if self.is_watched:
            contain_exits(team)
        if setting.journal is not None and not team.is_alone:
            setting.journal.close(SEVERAL_AGENTS)
        conversation.bind(main, getattr(main, "_cancel_signal", None))  # not public in older Strands
        conversation.know_tools(main.tool_registry.get_all_tool_specs())

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
        if self.setting.next_message is None:
            return StopReason.COMPLETED
        blocks = self.main.messages[-1]["content"] if self.main and self.main.messages else []
        answer = "\n".join(block["text"] for block in blocks if "text" in block)  # without reasoning
        said, limit = await self.setting.next_message(answer), self.setting.limits.max_user_turns
        if said is None:
            return StopReason.COMPLETED
        if limit is not None and self.user_turns >= limit:
            return StopReason.MAX_USER_TURNS
        self.user_turns += 1
        self.said = [{"text": said}]
        return None

    def _settle_main(self, team: Team, runner: MultiAgentBase) -> None:
        """Make the agent whose answer is that of the swarm or graph the main one: of those that spoke, the last."""
        conversations = self.model.conversations
        spoke = {agent: one for agent in team.candidates if (one := conversations.of_agent(agent)) is not None}
        if not spoke:
            return
        # a user's own structure may tell nothing of its nodes
        by_time = sorted(spoke, key=lambda agent: spoke[agent].last_request_at_s, reverse=True)
        main = next(agent for agent in (*self.visits.last_agents(runner), *by_time) if agent in spoke)
        self.main, self.limiter = main, self.limiters[main]
        conversations.promote(spoke[main])

    def _progress(self, history: Sequence[Mapping[str, Any]], duration_s: float) -> EpisodeProgress:
        limiter, stats = self.limiter, self.stats
        # whether the history ends with calls that have no results yet
        in_tools = bool(history) and any("toolUse" in block for block in history[-1]["content"])
        iterations, calls = limiter.before_turn if in_tools else (limiter.iterations, limiter.calls)
        return EpisodeProgress(
            messages=history,
            covered=self.model.conversation.last.covered_messages,
            finished=stats.finished if in_tools else {},
            tool_iterations=iterations,
            tool_calls=calls,
            tool_errors=stats.errors,
            tool_timeouts=stats.timeouts,
            tool_s=stats.seconds,
            duration_s=duration_s,
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

    def _end_of_deadline(self) -> tuple[StopReason, Exception]:
        was_aborted, limit_s = self.deadline.was_aborted, self.setting.limits.episode_timeout_s
        if self.team is None and not was_aborted:  # what the policy has no part in
            words = f"the episode took more than {limit_s:g} s, in which the agent and its tools did not start"
            return StopReason.SETUP_ERROR, RolloutError(words)
        return deadline_end(was_aborted=was_aborted, limit_s=limit_s, fault=self.model.engine_fault)


class _JournalHook(HookProvider):
    """Tells a journal of the main agent's turns, before their tools run, and of each call's end."""

    def __init__(self, run: _Run, journal: Journal) -> None:
        self._run = run
        self._journal = journal
        run.stats.on_end = self._call_ended

    def register_hooks(self, registry: HookRegistry, **kwargs: object) -> None:  # noqa: ARG002 - Strands' signature
        """Called by Strands."""
        registry.add_callback(BeforeToolsEvent, self._before_tools)

    async def _before_tools(self, event: BeforeToolsEvent) -> None:
        if not event.cancel and (step := self._step()) is not None:
            await self._journal.turn_ended(step)

    def _call_ended(self) -> None:
        if (step := self._step()) is not None:
            self._journal.call_ended(step)

    def _step(self) -> Step | None:
        run, main = self._run, cast("Agent", self._run.main)
        conversation, stats = run.model.conversation, run.stats
        if conversation.segments:
            self._journal.close(SEVERAL_SEGMENTS)
            return None
        duration_s = run.begun.duration_s + time.monotonic() - run.started
        used = conversation.last.covered_messages, *run.limiter.before_turn, stats.errors, stats.timeouts
        return Step(main.messages, stats.finished, stats.calls, (*used, stats.seconds, duration_s))


_LOGGER: Final = "strands.event_loop.event_loop"
_OWN_ERRORS: Final = frozenset(
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, RolloutError)
)


class _ReportedElsewhere(logging.Filter):
    """Drops the records of failed cycles whose error is one of this package's."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log it."""
        # the first argument of such a record is the error's class
        named = record.args[0] if isinstance(record.args, tuple) and record.args else None
        return not (record.levelno == logging.ERROR and named in _OWN_ERRORS)


_FILTER: Final = _ReportedElsewhere()


def log_failures_once() -> None:
    """Install the filter; calling it again changes nothing."""
    logging.getLogger(_LOGGER).addFilter(_FILTER)
