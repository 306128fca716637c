"""The agents of an episode: this package's, or the agent, swarm or graph that a user's factory builds.

Also how they join an episode, models for further agents (the same policy, each with a trajectory of its own), and
starting and closing agents off the event loop: their tool providers start and stop servers.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from strands import Agent
from strands.agent import AgentResult
from strands.handlers.callback_handler import PrintingCallbackHandler, null_callback_handler
from strands.hooks import HookProvider, HookRegistry
from strands.multiagent.base import MultiAgentBase, MultiAgentResult, Status
from strands.tools import ToolProvider
from strands.tools.executors import ConcurrentToolExecutor
from strands.types.tools import AgentTool

from strands_rollout.agent.environment import Task, failure_words, result_of, running
from strands_rollout.agent.loop import TurnTools
from strands_rollout.agent.tool_call import sandbox_fault
from strands_rollout.agent.tool_loading import (
    agents_in,
    load_function,
    refuse_blocking,
    refuse_no_model,
    refuse_unplayable,
)
from strands_rollout.control import current_call
from strands_rollout.errors import ConfigError, RolloutError, TeamLimitError, ToolError
from strands_rollout.exits import exits_as_errors
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.own_thread import in_own_thread

Result = TypeVar("Result")
_PLAYED: Final[weakref.WeakSet[Agent]] = weakref.WeakSet()
"""Agents of the policy that had an episode: another one's history and hooks would mix with theirs."""


@dataclass(frozen=True, slots=True)
class Team:
    """The agents of one episode.

    Attributes:
        runner: What is given the task.
        candidates: The agents on the episode's model, one of which gives the answer; several in a swarm or graph.
        agents: All of them, but those that are tools of another.
        tool_agents: Those that are.
    """

    runner: Agent | MultiAgentBase
    candidates: Sequence[Agent]
    agents: Sequence[Agent]
    tool_agents: Sequence[Agent] = ()

    @property
    def others(self) -> list[Agent]:
        """The agents that the policy plays too, and that can't give the answer."""
        beside = [agent for agent in [*self.agents, *self.tool_agents] if agent not in self.candidates]
        return [agent for agent in beside if isinstance(agent.model, SGLangModel)]

    @property
    def is_alone(self) -> bool:
        """True if one agent is given the task."""
        return self.runner is self.candidates[0]


@asynccontextmanager
async def built_team(path: str, model: SGLangModel, task: Task) -> AsyncIterator[Team]:
    """Build a team by the user's function, and release its tool providers when the block ends.

    Args:
        path: Of the function, which is given the model and the task; it may be async. One that is not runs in a
            thread, for it may block.
        model: Of the agents that may give the answer.
        task: Of the episode.

    Raises:
        ConfigError: The function raised, which the message names with file, line and sample; or what it built is no
            agent, swarm or graph; or the agent, or none of its agents, is on the model; or one has none.
        ToolError: There is no such function.
    """
    build = load_function(path, "an agent")
    given = replace(task, tools=released_once(task.tools))
    try:
        with running(given):
            made = await result_of(build, model, given, in_thread=_in_thread)
    except Exception as e:  # the user's code may raise anything
        if isinstance(e, RolloutError) and not isinstance(e, ToolError):  # which sys.exit() is made into
            raise
        fault = sandbox_fault(e)  # Strands wraps what a tool provider raises
        if fault is not None:
            raise fault from e
        raise ConfigError(failure_words(f"agent_factory {path!r}", e, task)) from e
    team = _team_of(made, model, path)
    try:
        yield team
        if elsewhere := [agent for agent in team.candidates if agent.model is not model]:
            raise ConfigError(_used_again(path, elsewhere))
    finally:  # a tool provider's server may take its time to stop
        await _in_thread(lambda: list(map(Agent.cleanup, (*team.agents, *team.tool_agents))))


def _team_of(made: object, model: SGLangModel, path: str) -> Team:
    if not isinstance(made, Agent | MultiAgentBase):
        raise ConfigError(
            f"agent_factory {path!r} gave a {type(made).__name__}; expected a Strands Agent, Swarm or Graph"
        )
    agents = list(agents_in(made))
    tool_agents = _tool_agents(agents)
    everyone = [*agents, *tool_agents]
    refuse_no_model(everyone)
    on_model = [agent for agent in agents if agent.model is model]
    if not on_model:
        names = ", ".join(agent.name for agent in everyone if agent.model is model) or "none"
        raise ConfigError(
            f"agent_factory {path!r} put these agents on the model that it was given: {names}; expected the agent that "
            "it returns, or one of the swarm's or graph's, whose tokens are the sample's"
        )
    of_policy = [agent for agent in everyone if isinstance(agent.model, SGLangModel)]
    for agent in of_policy:
        refuse_unplayable(agent, path)
    for agent in everyone:  # of other models too: the loop is the same
        refuse_blocking(agent.conversation_manager, path)
    again = [agent for agent in of_policy if agent in _PLAYED]
    if again:
        raise ConfigError(_used_again(path, again))
    _PLAYED.update(of_policy)
    for agent in everyone:
        _make_quiet(agent)
    return Team(made, on_model, agents, tool_agents)


def _used_again(path: str, agents: Sequence[Agent]) -> str:
    names = ", ".join(agent.name for agent in agents)
    return (
        f"agent_factory {path!r} gave these agents to more than one episode: {names}; expected new ones for each. "
        "Make them inside of the function"
    )


def structures_in(runner: object) -> Iterator[MultiAgentBase]:
    """The swarms and graphs among what plays an episode, at any depth."""
    if isinstance(runner, MultiAgentBase):
        yield runner
        for node in getattr(runner, "nodes", {}).values():
            yield from structures_in(node.executor)


def _tool_agents(agents: Sequence[Agent]) -> list[Agent]:
    """Agents that are tools of others, at any depth."""
    everyone = list(agents)
    for agent in everyone:  # which grows
        inner = [getattr(tool, "agent", None) for tool in agent.tool_registry.registry.values()]
        everyone += [one for one in inner if isinstance(one, Agent) and one not in everyone]
    return everyone[len(agents) :]


def _make_quiet(agent: Agent) -> None:
    """Take Strands' defaults for a person at a terminal away: hundreds of episodes would print at once."""
    if isinstance(agent.callback_handler, PrintingCallbackHandler):
        agent.callback_handler = null_callback_handler
    if type(agent.tool_executor) is ConcurrentToolExecutor:
        agent.tool_executor = TurnTools()


def contain_exits(team: Team) -> None:
    """Turn SystemExit and its like into errors where Strands runs a user's code in tasks of its own.

    It runs several calls of one turn, with their hooks and middleware, and the nodes of a graph so; see
    `exits_as_errors`.
    """
    structures = list(structures_in(team.runner))
    agents = [*team.agents, *team.tool_agents]
    for one in [*agents, *structures]:
        hooks: HookRegistry | None = getattr(one, "hooks", None)
        if hooks is not None:
            hooks.invoke_callbacks_async = _contained(hooks.invoke_callbacks_async)  # type: ignore[method-assign]
    for agent in agents:
        middleware = getattr(agent, "_middleware_registry", None)  # no public way; Strands before 1.62 has none
        if middleware is not None:
            middleware.invoke = functools.partial(_contained_stream, middleware.invoke)
    nodes = [node.executor for one in structures for node in getattr(one, "nodes", {}).values()]
    for node in {id(node): node for node in nodes}.values():
        node.stream_async = functools.partial(_contained_stream, node.stream_async)


def _contained(call: Callable[..., Any]) -> Callable[..., Any]:
    async def contained(*given: object, **named: object) -> object:
        with exits_as_errors("a hook", RuntimeError):
            return await call(*given, **named)

    return contained


async def _contained_stream(stream: Callable[..., Any], *given: object, **named: object) -> AsyncIterator[object]:
    events = stream(*given, **named)
    try:
        while True:
            try:
                with exits_as_errors("the agent, or a hook or middleware of it,", RuntimeError):
                    event = await anext(events)
            except StopAsyncIteration:
                return
            yield event
    finally:
        if hasattr(events, "aclose"):  # a generator: its cleanup is not left to the garbage collector
            await events.aclose()


def join_episode(
    team: Team,
    history: Sequence[Mapping[str, Any]],
    system_prompt: str | None,
    hooks: Mapping[Agent, Sequence[HookProvider]],
    *,
    is_resumed: bool,
) -> None:
    """Put the episode's history and hooks on agents that somebody else has built.

    Args:
        team: The agents.
        history: The messages before the one that is asked, for an agent that plays alone.
        system_prompt: For such an agent, if it has none.
        hooks: By the agents that may give the answer.
        is_resumed: Whether the history is that of an aborted episode.

    Raises:
        ConfigError: A session manager has brought an agent another episode's history.
    """
    for agent in () if is_resumed else (*team.candidates, *team.others):
        if agent.messages and getattr(agent, "_session_manager", None) is not None:  # there is no public way to ask
            raise ConfigError(
                f"the session manager of the agent {agent.name!r} has restored {len(agent.messages)} messages, which "
                "are no part of this episode; expected a new session. Give each episode a session_id of its own"
            )
    for agent, own in hooks.items():
        for hook in own:
            agent.hooks.add_hook(hook)
    if team.is_alone:
        main = team.candidates[0]
        shown = [] if is_resumed else main.messages  # the history of a resumed episode begins with them
        main.messages = [*shown, *(dict(message) for message in history)]  # type: ignore[list-item] # they are TypedDicts
        if main.system_prompt is None:
            main.system_prompt = system_prompt


@dataclass(slots=True)
class Visits:
    """The nodes that a swarm or graph has run, read from its events.

    Attributes:
        batches: Ids of nodes, in their order; those that a graph ran at once are one entry.
        inner: The visits within a node that is a swarm or graph itself, by its id.
    """

    batches: list[set[str]] = field(default_factory=list)
    inner: dict[str, Visits] = field(default_factory=dict)
    _begins_batch: bool = True

    def note(self, event: Mapping[str, Any]) -> None:
        """Take the next event of the swarm or graph."""
        match event.get("type"):
            case "multiagent_node_start":
                if self._begins_batch:
                    self.batches.append(set())
                    self._begins_batch = False
                self.batches[-1].add(event["node_id"])
            case "multiagent_handoff" | "multiagent_result":
                self._begins_batch = True
            case "multiagent_node_stream" if isinstance(event["event"], Mapping):
                self.inner.setdefault(event["node_id"], Visits()).note(event["event"])

    def last_agents(self, structure: MultiAgentBase) -> Iterator[Agent]:
        """The agents that ran in this swarm or graph, the last first.

        Of those that ran at once, the one that was added first comes first: which of them was faster is chance.
        """
        nodes = getattr(structure, "nodes", {})
        for batch in reversed(self.batches):
            for name in (name for name in nodes if name in batch):
                executor = nodes[name].executor
                if isinstance(executor, Agent):
                    yield executor
                elif name in self.inner:
                    yield from self.inner[name].last_agents(executor)


async def ask_team(runner: MultiAgentBase, prompt: Any, visits: Visits) -> None:  # noqa: ANN401 - whatever Strands takes
    """Run a swarm or graph once, and note the nodes that it runs.

    Raises:
        TeamLimitError: It ended at a limit of its own.
        ConfigError: It waits for a person.
        Exception: The first that one of its agents raised.
    """
    event: Mapping[str, Any] = {}
    try:
        async for event in runner.stream_async(prompt):
            visits.note(event)
    except Exception as e:  # a plain one where a node takes longer than it may (strands/multiagent/graph.py)
        if type(e) is Exception and "execution timed out" in str(e):
            raise TeamLimitError(str(e)) from e
        raise
    result: MultiAgentResult | None = event.get("result")
    if result is None:
        raise ConfigError(f"the {type(runner).__name__} ended without its result; expected it in its last event")
    refuse_interrupts(result)
    if result.status is Status.FAILED:
        raise next(_errors_in(result), TeamLimitError(f"the {type(runner).__name__} ended as {result.status.value}"))


def refuse_interrupts(result: AgentResult | MultiAgentResult) -> None:
    """Refuse what waits for a person: Strands would go on when somebody has answered.

    Raises:
        ConfigError: A tool or a hook has raised an interrupt.
    """
    asked = [f"{one.name!r} ({one.reason})" for one in getattr(result, "interrupts", None) or ()]
    if asked:
        raise ConfigError(f"a tool or hook raised the interrupt {', '.join(asked)}; nobody is there to answer it")


def _errors_in(result: MultiAgentResult) -> Iterator[Exception]:
    for node in result.results.values():
        if isinstance(node.result, Exception):
            yield node.result
        elif isinstance(node.result, MultiAgentResult):
            yield from _errors_in(node.result)


@dataclass(slots=True)
class _ModelsScope:
    """The models of an episode, as its contexts hold them, which outlive it in timers and idle connections."""

    models: AgentModels | None


_CURRENT: Final[ContextVar[_ModelsScope | None]] = ContextVar("strands_rollout_agent_models", default=None)


@dataclass(slots=True)
class AgentModels:
    """The models that the tools of one episode made.

    Attributes:
        make: Makes the model of the agent of this name.
        made: In the order of their making.
    """

    make: Callable[[str], SGLangModel]
    made: list[SGLangModel] = field(default_factory=list)
    _names: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make `sub_agent_model` give models of this episode, to whatever the block calls, awaits or starts."""
        scope = _ModelsScope(self)
        token = _CURRENT.set(scope)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            scope.models = None
            for model in self.made:  # however the episode ends
                model.record.close()

    def new(self) -> SGLangModel:
        """Make a model for an agent of the tool call that runs here; its name is that call's and a number."""
        call = current_call()
        call_id = "" if call is None else call.outer_id
        self._names[call_id] += 1
        self.made.append(self.make(f"{call_id}/{self._names[call_id]}"))
        return self.made[-1]


def sub_agent_model() -> SGLangModel:
    """Make a model for one more agent, to be called by a tool of an episode that `generate` runs.

    The agent is played by the policy that is trained, under the episode's sampling parameters and token budgets, which
    count for each agent alone. With the setting `fan_out` its tokens are trained as a sample of their own. Each model
    is for one conversation. Where the agent's conversation manager drops or sums up messages, what was read before is
    a sample of its own too.

    Raises:
        ConfigError: No episode is running here.
    """
    scope = _CURRENT.get()
    models = None if scope is None else scope.models
    if models is None:
        raise ConfigError(
            "sub_agent_model() was called outside of an episode; expected a call from a tool that an agent of "
            "strands_rollout.generate runs. Elsewhere, make an SGLangModel"
        )
    return models.new()


# providers such as Strands' MCP client are shared by agents and start, stop and count these without a lock of their own
_PROVIDERS: Final = threading.Lock()
# a user's function that never ends must not stop all others
_PATIENCE_S: Final = 5.0


@asynccontextmanager
async def own_team(tools: Sequence[Any], build: Callable[[Sequence[Any]], Agent]) -> AsyncIterator[Team]:
    """Build one agent, and release its tool providers when the block ends.

    Args:
        tools: The agent's; where a provider is among them, all that may wait for it happens in a thread.
        build: Makes the agent with the tools that it is given.
    """
    if not any(isinstance(tool, ToolProvider) for tool in tools):
        agent = build(tools)
        yield Team(agent, [agent], [agent])
        return
    given = released_once(tools)
    # other episodes may use a provider unless it says that it is one episode's
    shared = [tool for tool in tools if isinstance(tool, ToolProvider) and getattr(tool, "is_shared", True)]

    def in_turn(action: Callable[[], Result]) -> Result:
        return _locked(action) if shared else action()

    agent = await asyncio.to_thread(in_turn, lambda: build(given))
    try:
        yield Team(agent, [agent], [agent])
    finally:
        # a cancelled caller does not wait; the thread continues
        await asyncio.to_thread(in_turn, agent.cleanup)


def released_once(tools: Sequence[Any]) -> list[Any]:
    """Return the tools for agents that a user's function builds; each agent releases a provider among them once."""
    return [_ReleasedOnce(tool) if isinstance(tool, ToolProvider) else tool for tool in tools]


async def _in_thread(action: Callable[[], object]) -> object:
    """Run an action that may start or stop tool providers, or block; context variables that it sets are set here."""
    made, context = await in_own_thread(_locked, has_last_moment=False)(lambda: (action(), copy_context()), _PATIENCE_S)
    for variable in context:
        variable.set(context[variable])
    return made


class _ReleasedOnce(ToolProvider):
    """A provider that one agent releases once.

    Strands' agents release their providers in their finalizers too, which run at any time and without the lock: another
    agent may be starting the provider just then.
    """

    def __init__(self, provider: ToolProvider) -> None:
        self._provider = provider
        self._consumers: set[Any] = set()

    async def load_tools(self, **kwargs: object) -> Sequence[AgentTool]:
        return await self._provider.load_tools(**kwargs)

    def add_consumer(self, consumer_id: object, **kwargs: object) -> None:
        self._consumers.add(consumer_id)
        self._provider.add_consumer(consumer_id, **kwargs)

    def remove_consumer(self, consumer_id: object, **kwargs: object) -> None:
        if consumer_id in self._consumers:
            self._consumers.remove(consumer_id)
            self._provider.remove_consumer(consumer_id, **kwargs)


def _locked(action: Callable[[], Result], patience_s: float = -1) -> Result:
    has_turn = _PROVIDERS.acquire(timeout=patience_s)
    try:
        return action()
    finally:
        if has_turn:
            _PROVIDERS.release()
