"""Episodes that a Strands agent plays in this process: `run_episode` builds the agent and runs it within its limits.

Strands logs each exception in its loop as an error: aborts alone may cause hundreds of lines in a rollout step. A log
filter drops the lines about errors of `strands_rollout.errors`, since each sample reports why its episode failed.
"""

import logging
import weakref
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from strands import Agent
from strands.agent.conversation_manager import ConversationManager, NullConversationManager
from strands.hooks import BeforeToolsEvent, HookProvider, HookRegistry
from strands.multiagent.base import MultiAgentBase
from strands.types.exceptions import MaxTokensReachedException

from strands_rollout import errors
from strands_rollout.agent.limits import (
    TOOL_LIMIT_REASONS,
    TURN_CUT_MESSAGE,
    EpisodeLimits,
    EpisodeWatch,
    StopReason,
    ToolLimiter,
    limit_other_agents,
    make_limiter,
    reason_of_error,
    wrap_tools,
)
from strands_rollout.agent.loop import SHARED_PLUGINS, DirectLoop, skip_unrecorded_span
from strands_rollout.agent.multi_agent import (
    Team,
    VisitLog,
    contain_exits,
    join_episode,
    refuse_interrupts,
    run_team,
    single_agent_team,
)
from strands_rollout.agent.run import (
    SEVERAL_AGENTS,
    SEVERAL_SEGMENTS,
    Ending,
    Episode,
    EpisodeRun,
    Journal,
    original_error,
)
from strands_rollout.agent.tool_call import ToolSpan, TurnToolExecutor, sandbox_fault
from strands_rollout.control import Control
from strands_rollout.errors import RolloutError, TeamLimitError
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.record.saved import EpisodeProgress

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class EpisodeSetup:
    """The agent of an episode and its limits, hooks and control.

    Attributes:
        system_prompt: The agent's system prompt.
        tools: Tools as `strands.Agent(tools=...)` takes them.
        limits: The episode's limits.
        control: The episode's control. An abort ends the episode immediately. But if a request is in flight, the engine
            first gets a grace period to return the sampled tokens.
        self_timed_tools: Names of tools that apply `tool_timeout_s` themselves. They don't count a call's time in a
            queue.
        hooks: The user's Strands hooks; they are registered before the hooks of the limits.
        tool_span: Returns a context manager to enter around each tool call; None for no context manager.
        conversation_manager: Strands conversation manager. If it drops or summarizes messages, the model needs
            `on_rewritten_history="segment"`. None keeps all messages.
        progress: State to continue from; `run_episode` then ignores its argument `messages`. None for a new episode.
        team: Agents of a user's factory; None for this package's agent. With a team, `tools` and `conversation_manager`
            are not used. `system_prompt` is then used only for a single agent without a system prompt.
        next_message: Returns the next user message after an answer of the policy, or None to end the episode. If
            `next_message` itself is None, the first answer ends the episode.
        journal: Stores each step, so that another process can continue the episode; None for no journal.
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
    """Run the agents of `setup` on `messages` and on each reply of `next_message`, and return the finished episode.

    Args:
        model: A model with an empty trajectory or, if `setup.progress` is set, resumed from the same attempt.
        messages: Strands messages, which end with a user message. Ignored if `setup.progress` is set.
        setup: The agent and its limits.

    Raises:
        asyncio.CancelledError: The caller was cancelled. All other failures are returned in `Episode.error`.
    """
    return await AgentRun(model, messages, setup).play()


class AgentRun(EpisodeRun):
    """An episode that a Strands agent plays in this process; see `run_episode` for the arguments."""

    player_name = "the agent, or a hook of it,"

    def __init__(self, model: SGLangModel, messages: Sequence[Mapping[str, Any]], setup: EpisodeSetup) -> None:
        super().__init__(model, setup.control, setup.limits, setup.progress or EpisodeProgress(messages[:-1], 0))
        self.setup = setup
        # None after a resume: `start.messages` then ends with what the policy has to answer, or with calls to run
        self.next_prompt: Any = None if setup.progress else list(messages[-1]["content"])
        self.limiter = make_limiter(setup.limits, self.start)
        # the user's hooks, conversation managers and agents may listen to any event and add middleware
        self.is_observed = bool(setup.hooks or setup.conversation_manager or setup.team)
        self.watch = EpisodeWatch(self.stats, setup.control)
        own_hooks: list[HookProvider] = [self.watch, self.limiter]
        if setup.journal is not None:
            own_hooks.append(_JournalHook(self, setup.journal))
        self.loop = DirectLoop(None if self.is_observed else own_hooks)
        # Strands calls hooks in the order of their registration, or in reverse for events such as AfterToolCallEvent
        self.all_hooks = [*setup.hooks, _HookGroup([*own_hooks, self.loop])]
        self.team: Team | None = None
        # None before `_prepare`, then the first candidate, and later the candidate that answered last
        self.main: Agent | None = None
        self.limiters: dict[Agent, ToolLimiter] = {}
        self.visits = VisitLog()

    async def _play(self) -> Ending:
        hide_reported_failures()
        async with self.setup.team or single_agent_team(self.setup.tools, self._build_agent) as team:
            self._prepare(team)
            reason = None
            while reason is None:
                reason = await self._play_turn(team)
        return reason, None

    def _build_agent(self, tools: Sequence[Any]) -> Agent:
        agent = Agent(
            model=self.model,
            messages=[dict(message) for message in self.start.messages],  # type: ignore[misc] # TypedDicts
            tools=list(tools),
            system_prompt=self.setup.system_prompt,
            callback_handler=None,
            conversation_manager=self.setup.conversation_manager or NullConversationManager(),
            retry_strategy=None,
            hooks=list(self.all_hooks),
            plugins=list(SHARED_PLUGINS),
            tool_executor=TurnToolExecutor(),
        )
        skip_unrecorded_span(agent)
        return agent

    def _prepare(self, team: Team) -> None:
        setup, limits, conversation = self.setup, self.setup.limits, self.model.conversation
        self.team, self.main = team, (main := team.candidates[0])
        self.is_resumable = self.is_single_agent = team.is_single_agent
        self.limiters = {main: self.limiter, **{agent: make_limiter(limits) for agent in team.candidates[1:]}}
        if setup.team is not None:
            hooks = {
                agent: self.all_hooks if agent is main else [*setup.hooks, self.watch, limiter, DirectLoop()]
                for agent, limiter in self.limiters.items()
            }
            is_resumed = setup.progress is not None
            join_episode(team, self.start.messages, self.setup.system_prompt, hooks, is_resumed=is_resumed)
        for agent in team.agents:
            wrap_tools(agent, limits.tool_timeout_s, setup.self_timed_tools, self.stats, setup.tool_span)
        limit_other_agents(team, limits, setup.self_timed_tools, self.stats, setup.control)
        if self.is_observed:
            contain_exits(team)
        if setup.journal is not None and not team.is_single_agent:
            setup.journal.close(SEVERAL_AGENTS)
        conversation.bind(main, getattr(main, "_cancel_signal", None))  # private in older Strands
        if setup.progress is not None or self.is_observed:  # otherwise the first request binds the same tools
            self.model.bind_tools(conversation, main.tool_registry.get_all_tool_specs())

    async def _play_turn(self, team: Team) -> StopReason | None:
        """Let the agents answer `next_prompt`; return the stop reason, or None if another user message follows."""
        if isinstance(team.runner, Agent):
            refuse_interrupts(await self.loop.run(team.runner, self.next_prompt))
        else:
            try:
                await run_team(team.runner, self.next_prompt, self.visits)
            finally:
                self._settle_main(team, team.runner)
            if not self.model.conversation.turn_count:
                names = " or ".join(repr(agent.name) for agent in team.candidates)
                raise TeamLimitError(
                    f"the {type(team.runner).__name__} ended before {names} answered; the sample needs the tokens of "
                    "that answer"
                )
        if self.stats.infrastructure_error is not None:
            return reason_of_error(self.stats.infrastructure_error)
        if self.limiter.tripped:
            return TOOL_LIMIT_REASONS[self.limiter.tripped]
        if self.setup.next_message is None:
            return StopReason.COMPLETED
        blocks = self.main.messages[-1]["content"] if self.main and self.main.messages else []
        answer = "\n".join(block["text"] for block in blocks if "text" in block)  # without reasoning
        reply, limit = await self.setup.next_message(answer), self.setup.limits.max_user_turns
        if reply is None:
            return StopReason.COMPLETED
        if limit is not None and self.user_turns >= limit:
            return StopReason.MAX_USER_TURNS
        self.user_turns += 1
        self.next_prompt = [{"text": reply}]
        return None

    def _settle_main(self, team: Team, runner: MultiAgentBase) -> None:
        """Make the candidate that answered last the main agent: its answer is the answer of the swarm or graph."""
        record = self.model.record
        conversations = {
            agent: conversation
            for agent in team.candidates
            if (conversation := record.last_conversation_of(agent)) is not None
        }
        if not conversations:
            return
        # a user's own multi-agent class may emit no events of its nodes; then the agent with the last request is chosen
        by_time = sorted(conversations, key=lambda agent: conversations[agent].last_request_at_s, reverse=True)
        main = next(agent for agent in (*self.visits.last_agents(runner), *by_time) if agent in conversations)
        self.main, self.limiter = main, self.limiters[main]
        record.promote(conversations[main])

    def _root_cause(self) -> Ending | None:
        fault = self.stats.infrastructure_error
        return None if fault is None else (reason_of_error(fault), fault)

    def _ending_at_timeout(self) -> Ending:
        if self.team is None:  # the policy never ran, so the timeout isn't its fault
            limit_s = self.limits.episode_timeout_s
            message = (
                f"the agent and its tools did not start within the episode's timeout of {limit_s:g} s; raise "
                "episode_timeout_s"
            )
            return StopReason.SETUP_ERROR, RolloutError(message)
        return super()._ending_at_timeout()

    def _ending_by_error(self, error: Exception) -> Ending:
        error = original_error(error)
        if isinstance(error, MaxTokensReachedException):
            error = MaxTokensReachedException(TURN_CUT_MESSAGE)  # Strands' message advises calling the agent again
        if not isinstance(error, RolloutError):  # Strands also wraps the exceptions of tool providers
            error = sandbox_fault(error) or error
        return self._ending_of(error)

    def progress(self) -> EpisodeProgress:
        """See `EpisodeRun.progress`."""
        history = self._history()
        is_in_tools = bool(history) and any("toolUse" in block for block in history[-1]["content"])
        return self.progress_in_tools() if is_in_tools else super().progress()

    def progress_in_tools(self) -> EpisodeProgress:
        """Return the state before or between the calls of the last turn; the counts don't include this turn yet."""
        iterations, calls = self.limiter.before_turn
        progress = super().progress()
        return replace(progress, finished=self.stats.finished, tool_iterations=iterations, tool_calls=calls)

    def _history(self) -> Sequence[Mapping[str, Any]]:
        return self.start.messages if self.main is None else self.main.messages

    def _counts(self) -> tuple[int, int]:
        return self.limiter.iterations, self.limiter.calls


class _HookGroup(HookProvider):
    """Several hooks in one, since `Agent`'s check of each hook takes about 0.3% of an episode's CPU."""

    def __init__(self, members: Sequence[HookProvider]) -> None:
        self._members = members

    def register_hooks(self, registry: HookRegistry, **kwargs: object) -> None:  # noqa: ARG002 - Strands' signature
        for member in self._members:
            registry.add_hook(member)


class _JournalHook(HookProvider):
    """Hook that writes each turn of the main agent to the journal before its tools run, and each call after its end."""

    def __init__(self, run: AgentRun, journal: Journal) -> None:
        self._run = weakref.ref(run)  # the run refers to this hook
        self._journal = journal
        run.stats.on_call_end = self._call_ended

    def register_hooks(self, registry: HookRegistry, **kwargs: object) -> None:  # noqa: ARG002 - Strands' signature
        registry.add_callback(BeforeToolsEvent, self._before_tools)

    async def _before_tools(self, event: BeforeToolsEvent) -> None:
        if not event.cancel and (progress := self._progress()) is not None:
            await self._journal.turn_ended(progress)

    def _call_ended(self) -> None:
        if (progress := self._progress()) is not None:
            self._journal.call_ended(progress)

    def _progress(self) -> EpisodeProgress | None:
        run = self._run()
        if run is None:  # the episode has ended, and the user's code calls the agent again
            return None
        if len(run.model.conversation.branches) > 1:
            self._journal.close(SEVERAL_SEGMENTS)
            return None
        return run.progress_in_tools()


_EVENT_LOOP_LOGGER: Final = "strands.event_loop.event_loop"
_OWN_ERRORS: Final = frozenset(
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, RolloutError)
)


class _ReportedFailureFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        # Strands passes the error's class name as the first argument
        name = record.args[0] if isinstance(record.args, tuple) and record.args else None
        return not (record.levelno == logging.ERROR and name in _OWN_ERRORS)


_FILTER: Final = _ReportedFailureFilter()


def hide_reported_failures() -> None:
    """Drop Strands' log lines about failures that samples report anyway; calling this again has no effect."""
    logging.getLogger(_EVENT_LOOP_LOGGER).addFilter(_FILTER)
