"""The agents of an episode: this package's agent, or the agent, swarm or graph of a user's factory.

Also here: `join_episode` adds an episode's history, system prompt and hooks to agents; `contain_exits` turns a
SystemExit of the user's code into an error; `run_team` runs a swarm or graph; `sub_agent_model` returns another model
of the same policy, with a record of its own.

Tool providers may block while they start or stop a server. Therefore, agents with providers are closed in a thread.
They are built in a thread, too, unless an async factory builds them.
"""

from __future__ import annotations

import asyncio
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
from strands.hooks import HookProvider
from strands.multiagent.base import MultiAgentBase, MultiAgentResult, Status
from strands.tools import ToolProvider
from strands.tools.executors import ConcurrentToolExecutor
from strands.types.tools import AgentTool

from strands_rollout.agent.environment import Task, call_user_code, describe_failure, task_scope
from strands_rollout.agent.tool_call import TurnToolExecutor, sandbox_fault
from strands_rollout.agent.tool_loading import (
    agents_in,
    load_function,
    refuse_blocking,
    refuse_missing_model,
    refuse_unplayable,
)
from strands_rollout.control import current_call
from strands_rollout.errors import ConfigError, RolloutError, TeamLimitError, ToolError
from strands_rollout.exits import exits_as_errors, function_name
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.own_thread import in_own_thread

Result = TypeVar("Result")
_USED_AGENTS: Final[weakref.WeakSet[Agent]] = weakref.WeakSet()
"""Agents of the policy that factories returned. They are refused in a second episode, since they have the history and
the hooks of the first."""


@dataclass(frozen=True, slots=True)
class Team:
    """The agents of one episode.

    Attributes:
        runner: The agent, swarm or graph that receives the task.
        candidates: The members of `agents` that are on the episode's model; the answer of one of them is the episode's
            answer. A swarm or graph may have several candidates.
        agents: The runner if it is an agent; otherwise all agents among the nodes of the swarm or graph, at any depth.
        tool_agents: Further agents, which `agents` use as tools, at any depth.
    """

    runner: Agent | MultiAgentBase
    candidates: Sequence[Agent]
    agents: Sequence[Agent]
    tool_agents: Sequence[Agent] = ()

    @property
    def other_policy_agents(self) -> list[Agent]:
        """All agents on a model of the policy except the candidates."""
        others = [agent for agent in [*self.agents, *self.tool_agents] if agent not in self.candidates]
        return [agent for agent in others if isinstance(agent.model, SGLangModel)]

    @property
    def is_single_agent(self) -> bool:
        """True if the runner is an agent, not a swarm or graph."""
        return self.runner is self.candidates[0]


@asynccontextmanager
async def factory_team(path: str, model: SGLangModel, task: Task) -> AsyncIterator[Team]:
    """Build a team with the user's factory, and release its tool providers when the block ends.

    Args:
        path: Path of the factory, which is called with the model and the task. It may be async; a sync factory runs in
            a thread, since it may block.
        model: The episode's model.
        task: The episode's task.

    Raises:
        ConfigError: The factory raised an exception (the message names file, line and sample); returned no agent, swarm
            or graph; did not give `model` to the returned agent or to an agent of the returned swarm or graph; returned
            agents of another episode; or left an agent without a model. Or an agent has checkpoints, or a router with
            models other than the policy.
        ToolError: The path can't be loaded, or an agent's conversation manager blocks the event loop.
        SandboxError: An MCP server of the agents failed.
        RolloutError: The factory raised a RolloutError other than a ToolError.
    """
    build = load_function(path, "an agent")
    factory_task = replace(task, tools=release_once(task.tools))
    try:
        with task_scope(factory_task):
            built = await call_user_code(build, model, factory_task, in_thread=_run_in_thread)
    except Exception as e:  # the user's code may raise anything
        # a ToolError may come from the user's sys.exit(); see `exits_as_errors`
        if isinstance(e, RolloutError) and not isinstance(e, ToolError):
            raise
        fault = sandbox_fault(e)  # Strands wraps the exceptions of tool providers
        if fault is not None:
            raise fault from e
        raise ConfigError(describe_failure(f"agent_factory {path!r}", e, task)) from e
    team = _team_of(built, model, path)
    try:
        yield team
        if moved := [agent for agent in team.candidates if agent.model is not model]:
            raise ConfigError(_reused_agents_message(path, moved))
    finally:  # use a thread, since stopping a tool provider's server may take long
        agents = (*team.agents, *team.tool_agents)
        await _run_in_thread(lambda: list(map(Agent.cleanup, agents)), "the cleanup of the agents")


def _team_of(built: object, model: SGLangModel, path: str) -> Team:
    if not isinstance(built, Agent | MultiAgentBase):
        raise ConfigError(
            f"agent_factory {path!r} returned a {type(built).__name__}; expected a Strands Agent, Swarm or Graph"
        )
    agents = list(agents_in(built))
    tool_agents = _tool_agents(agents)
    everyone = [*agents, *tool_agents]
    refuse_missing_model(everyone)
    on_model = [agent for agent in agents if agent.model is model]
    if not on_model:
        names = ", ".join(agent.name for agent in everyone if agent.model is model) or "none"
        raise ConfigError(
            f"agent_factory {path!r} gave the model to these agents: {names}; expected it to give the model to the "
            "returned agent, or to an agent of the returned swarm or graph: that agent's tokens become the sample"
        )
    of_policy = [agent for agent in everyone if isinstance(agent.model, SGLangModel)]
    for agent in of_policy:
        refuse_unplayable(agent, path)
    for agent in everyone:  # also agents on other models, since they run on the same event loop
        refuse_blocking(agent.conversation_manager, path)
    reused = [agent for agent in of_policy if agent in _USED_AGENTS]
    if reused:
        raise ConfigError(_reused_agents_message(path, reused))
    _USED_AGENTS.update(of_policy)
    for agent in everyone:
        _replace_strands_defaults(agent)
    return Team(built, on_model, agents, tool_agents)


def _reused_agents_message(path: str, agents: Sequence[Agent]) -> str:
    names = ", ".join(agent.name for agent in agents)
    return (
        f"agent_factory {path!r} gave these agents to more than one episode: {names}; expected new agents for each "
        "episode. Make them inside the function"
    )


def multi_agents_in(runner: object) -> Iterator[MultiAgentBase]:
    """Yield the swarms and graphs in `runner`: the runner itself and its nodes, at any depth."""
    if isinstance(runner, MultiAgentBase):
        yield runner
        for node in getattr(runner, "nodes", {}).values():
            yield from multi_agents_in(node.executor)


def _tool_agents(agents: Sequence[Agent]) -> list[Agent]:
    everyone = list(agents)
    for agent in everyone:  # the loop also visits the agents that it appends
        inner = [getattr(tool, "agent", None) for tool in agent.tool_registry.registry.values()]
        everyone += [found for found in inner if isinstance(found, Agent) and found not in everyone]
    return everyone[len(agents) :]


def _replace_strands_defaults(agent: Agent) -> None:
    if isinstance(agent.callback_handler, PrintingCallbackHandler):
        agent.callback_handler = null_callback_handler
    if type(agent.tool_executor) is ConcurrentToolExecutor:
        agent.tool_executor = TurnToolExecutor()


def contain_exits(team: Team) -> None:
    """Turn SystemExit and similar exceptions into errors where Strands runs a user's code in its own tasks.

    Such tasks run the nodes of a graph. If a turn has several calls, these tasks also run the calls with their hooks
    and middleware. See `exits_as_errors`.
    """
    multi_agents = list(multi_agents_in(team.runner))
    agents = [*team.agents, *team.tool_agents]
    for hooked in [*agents, *multi_agents]:
        _replace_method(getattr(hooked, "hooks", None), "invoke_callbacks_async", _with_contained_exits)
    for agent in agents:
        # `_middleware_registry` is private, and missing in Strands before 1.62
        _replace_method(getattr(agent, "_middleware_registry", None), "invoke", _with_contained_exits_in_stream)
    for multi_agent in multi_agents:
        for node in getattr(multi_agent, "nodes", {}).values():
            _replace_method(node.executor, "stream_async", _with_contained_exits_in_stream)


def _replace_method(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:  # noqa: ANN401 - Strands' objects
    method = getattr(owner, name, None)
    if method is None or getattr(method, "contains_exits", False):
        return
    if getattr(method, "__self__", None) is owner:
        # use a weak reference: a cycle would keep the owner in memory until a garbage collection
        function, weak_owner = method.__func__, weakref.ref(owner)
        method = lambda *args, **kwargs: function(weak_owner(), *args, **kwargs)  # noqa: E731 - never shown
    wrapper: Any = wrap(method)
    wrapper.contains_exits = True
    setattr(owner, name, wrapper)


def _with_contained_exits(call: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapper(*args: object, **kwargs: object) -> object:
        with exits_as_errors("a hook", RuntimeError):
            return await call(*args, **kwargs)

    return wrapper


def _with_contained_exits_in_stream(stream: Callable[..., Any]) -> Callable[..., AsyncIterator[object]]:
    async def wrapper(*args: object, **kwargs: object) -> AsyncIterator[object]:
        events = stream(*args, **kwargs)
        try:
            while True:
                try:
                    with exits_as_errors("the agent, or a hook or middleware of it,", RuntimeError):
                        event = await anext(events)
                except StopAsyncIteration:
                    return
                yield event
        finally:
            if hasattr(events, "aclose"):  # run a generator's cleanup now, not when it is garbage-collected
                await events.aclose()

    return wrapper


def join_episode(
    team: Team,
    history: Sequence[Mapping[str, Any]],
    system_prompt: str | None,
    hooks: Mapping[Agent, Sequence[HookProvider]],
    *,
    is_resumed: bool,
) -> None:
    """Add the episode's history, system prompt and hooks to agents that a user's factory has built.

    Args:
        team: The agents.
        history: Messages before the prompt; used only if the runner is an agent.
        system_prompt: System prompt for the runner, if the runner is an agent without a system prompt.
        hooks: The hooks to add, by candidate.
        is_resumed: True if the history comes from an aborted attempt.

    Raises:
        ConfigError: A session manager has restored another episode's history.
    """
    for agent in () if is_resumed else (*team.candidates, *team.other_policy_agents):
        if agent.messages and getattr(agent, "_session_manager", None) is not None:  # Strands has no public accessor
            raise ConfigError(
                f"the session manager of the agent {agent.name!r} restored {len(agent.messages)} messages of another "
                "episode; expected a new session. Give each episode a session_id of its own"
            )
    for agent, agent_hooks in hooks.items():
        for hook in agent_hooks:
            agent.hooks.add_hook(hook)
    if team.is_single_agent:
        main = team.candidates[0]
        examples = [] if is_resumed else main.messages  # a resumed episode's history already begins with them
        main.messages = [*examples, *(dict(message) for message in history)]  # type: ignore[list-item] # TypedDicts
        if main.system_prompt is None:
            main.system_prompt = system_prompt


@dataclass(slots=True)
class VisitLog:
    """A log of the nodes run by a swarm or graph, read from events.

    Attributes:
        batches: Node ids in the order of their runs; nodes that a graph ran concurrently share an entry.
        inner: Logs of nodes that are swarms or graphs themselves, by node id.
    """

    batches: list[set[str]] = field(default_factory=list)
    inner: dict[str, VisitLog] = field(default_factory=dict)
    _begins_batch: bool = True

    def add(self, event: Mapping[str, Any]) -> None:
        """Add the next event of the swarm or graph."""
        match event.get("type"):
            case "multiagent_node_start":
                if self._begins_batch:
                    self.batches.append(set())
                    self._begins_batch = False
                self.batches[-1].add(event["node_id"])
            case "multiagent_handoff" | "multiagent_result":
                self._begins_batch = True
            case "multiagent_node_stream" if isinstance(event["event"], Mapping):
                self.inner.setdefault(event["node_id"], VisitLog()).add(event["event"])

    def last_agents(self, multi_agent: MultiAgentBase) -> Iterator[Agent]:
        """Yield the agents that ran in this swarm or graph, the last agent first.

        Concurrent agents are yielded in the graph's order of nodes, since their ends have no fixed order.
        """
        nodes = getattr(multi_agent, "nodes", {})
        for batch in reversed(self.batches):
            for name in (name for name in nodes if name in batch):
                executor = nodes[name].executor
                if isinstance(executor, Agent):
                    yield executor
                elif name in self.inner:
                    yield from self.inner[name].last_agents(executor)


async def run_team(runner: MultiAgentBase, prompt: Any, visits: VisitLog) -> None:  # noqa: ANN401 - as Strands takes it
    """Run a swarm or graph once, and add its events to `visits`.

    Raises:
        TeamLimitError: The swarm or graph reached one of its own limits, or failed without an exception of its agents.
        ConfigError: The swarm or graph ended with an interrupt, or without a result.
        Exception: Any other exception that ended the run, or else the first exception among its results.
    """
    event: Mapping[str, Any] = {}
    try:
        async for event in runner.stream_async(prompt):
            visits.add(event)
    except Exception as e:  # a node's timeout is a plain Exception (strands/multiagent/graph.py)
        if type(e) is Exception and "execution timed out" in str(e):
            raise TeamLimitError(str(e)) from e
        raise
    result: MultiAgentResult | None = event.get("result")
    if result is None:
        raise ConfigError(
            f"the last event of {type(runner).__name__}.stream_async has no result; expected an event "
            '{"type": "multiagent_result", "result": ...}'
        )
    refuse_interrupts(result)
    if result.status is Status.FAILED:
        raise next(
            _errors_in(result),
            TeamLimitError(f"the {type(runner).__name__} ended with the status {result.status.value!r}"),
        )


def refuse_interrupts(result: AgentResult | MultiAgentResult) -> None:
    """Refuse a result with interrupts: Strands would continue only after a person has answered them.

    Raises:
        ConfigError: A tool or a hook raised an interrupt.
    """
    found = [f"{interrupt.name!r} ({interrupt.reason})" for interrupt in getattr(result, "interrupts", None) or ()]
    if found:
        raise ConfigError(
            f"a tool or hook raised the interrupt {', '.join(found)}, which nobody answers in an episode; remove the "
            "interrupt"
        )


def _errors_in(result: MultiAgentResult) -> Iterator[Exception]:
    for node in result.results.values():
        if isinstance(node.result, Exception):
            yield node.result
        elif isinstance(node.result, MultiAgentResult):
            yield from _errors_in(node.result)


@dataclass(slots=True)
class _ModelsScope:
    """An episode's models; None after the episode, since timers and idle connections may keep this object longer."""

    models: AgentModels | None


_CURRENT: Final[ContextVar[_ModelsScope | None]] = ContextVar("strands_rollout_agent_models", default=None)


@dataclass(slots=True)
class AgentModels:
    """The models of an episode's sub-agents.

    Attributes:
        make: Returns a new model for the agent of the given name.
        created: Models in the order of their creation.
    """

    make: Callable[[str], SGLangModel]
    created: list[SGLangModel] = field(default_factory=list)
    _names: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make `sub_agent_model` return models of this episode in everything that the block calls, awaits or starts.

        At the end of the block, the records of these models are closed, so that the models sample nothing more.
        """
        scope = _ModelsScope(self)
        token = _CURRENT.set(scope)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            scope.models = None
            for model in self.created:  # also after an error
                model.record.close()

    def create(self) -> SGLangModel:
        """Return a new model for a sub-agent, named by the outermost call's id ("" outside of a call) and a number."""
        call = current_call()
        call_id = "" if call is None else call.outer_id
        self._names[call_id] += 1
        self.created.append(self.make(f"{call_id}/{self._names[call_id]}"))
        return self.created[-1]


def sub_agent_model() -> SGLangModel:
    """Return a new model for another agent in an episode of `generate`; for tools, hooks and agent factories.

    The model is the trained policy, with the episode's sampling parameters and token budgets. Each agent has a
    conversation of its own and the full budgets, even if agents share a model. If `fan_out` is set, the agent's
    tokens are trained as a sample of their own. If the agent's conversation manager drops or summarizes messages, the
    earlier history becomes a sample of its own, too.

    Raises:
        ConfigError: The caller isn't part of an episode.
    """
    scope = _CURRENT.get()
    models = None if scope is None else scope.models
    if models is None:
        raise ConfigError(
            "sub_agent_model() was called outside of an episode; call it in a tool, a hook or an agent factory of an "
            "episode that strands_rollout.generate runs. Elsewhere, make an SGLangModel"
        )
    return models.create()


# agents share providers, and Strands' MCP client uses no lock when it counts its users, starts or stops
_PROVIDERS_LOCK: Final = threading.Lock()
# after this wait, a user's factory runs without the lock: a factory that never returns must not stop all others
_LOCK_TIMEOUT_S: Final = 5.0


@asynccontextmanager
async def single_agent_team(tools: Sequence[Any], build: Callable[[Sequence[Any]], Agent]) -> AsyncIterator[Team]:
    """Build one agent, and release its tool providers when the block ends.

    Args:
        tools: The agent's tools. If one of them is a tool provider, the agent is built and closed in a thread.
        build: Returns an agent with the given tools.
    """
    if not any(isinstance(tool, ToolProvider) for tool in tools):
        agent = build(tools)
        yield Team(agent, [agent], [agent])
        return
    wrapped_tools = release_once(tools)
    # other episodes may use the same provider, unless it has is_shared=False
    shared = [tool for tool in tools if isinstance(tool, ToolProvider) and getattr(tool, "is_shared", True)]

    def in_turn(action: Callable[[], Result]) -> Result:
        return _run_locked(action) if shared else action()

    agent = await asyncio.to_thread(in_turn, lambda: build(wrapped_tools))
    try:
        yield Team(agent, [agent], [agent])
    finally:
        # the thread also finishes if the caller is cancelled
        await asyncio.to_thread(in_turn, agent.cleanup)


def release_once(tools: Sequence[Any]) -> list[Any]:
    """Return the tools; wrap the tool providers among them, so that each agent releases a provider only once."""
    return [_ReleaseOnceProvider(tool) if isinstance(tool, ToolProvider) else tool for tool in tools]


async def _run_in_thread(action: Callable[[], object], name: str | None = None) -> object:
    """Run an action in a thread with `_run_locked`; take over the context variables that the action sets."""
    run = in_own_thread(_run_locked, has_grace_period=False, name=name or function_name(action))
    result, context = await run(lambda: (action(), copy_context()), _LOCK_TIMEOUT_S)
    for variable in context:
        variable.set(context[variable])
    return result


class _ReleaseOnceProvider(ToolProvider):
    """Wrapper of a tool provider, which passes each agent's release on to the provider only once.

    Strands' agents release their providers a second time in their finalizers. A finalizer runs at any time and without
    the lock, so the second release might stop a provider that another agent is just starting.
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


def _run_locked(action: Callable[[], Result], timeout_s: float = -1) -> Result:
    """Run an action under the lock; after the timeout (-1 for no timeout), run it without the lock."""
    is_locked = _PROVIDERS_LOCK.acquire(timeout=timeout_s)
    try:
        return action()
    finally:
        if is_locked:
            _PROVIDERS_LOCK.release()
