"""Who plays an episode: the agent that this package builds, or the agent, swarm or graph that a user's function builds.

Knows Strands' agents and multi-agent structures; nothing of limits or samples.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from strands import Agent
from strands.agent import AgentResult
from strands.handlers.callback_handler import PrintingCallbackHandler, null_callback_handler
from strands.multiagent.base import MultiAgentBase, MultiAgentResult, Status
from strands.tools.executors import ConcurrentToolExecutor

from strands_rollout.agent_lifetime import agent_with, built_in_thread, released, released_once
from strands_rollout.bounded_tool import sandbox_fault
from strands_rollout.errors import ConfigError, RolloutError, TeamLimitError, ToolError
from strands_rollout.sglang_model import SGLangModel
from strands_rollout.task import Task, running
from strands_rollout.tool_loading import load_function, refuse_blocking
from strands_rollout.turn_tools import TurnTools
from strands_rollout.user_code import failure_words, result_of, was_cancelled

_PLAYED: Final[weakref.WeakSet[Agent]] = weakref.WeakSet()
"""Agents of the policy that had an episode: another one's history and hooks would mix with theirs."""


@dataclass(frozen=True, slots=True)
class Team:
    """The agents of one episode.

    Attributes:
        runner: What is given the task.
        main: The agent on the episode's model; its tokens are the sample's.
        agents: All of them, but those that are tools of another.
        tool_agents: Those that are.
    """

    runner: Agent | MultiAgentBase
    main: Agent
    agents: Sequence[Agent]
    tool_agents: Sequence[Agent] = ()

    @property
    def others(self) -> list[tuple[Agent, SGLangModel]]:
        """The agents beside the main one that the policy plays too, with their models."""
        beside = [(agent, agent.model) for agent in [*self.agents, *self.tool_agents] if agent is not self.main]
        return [(agent, model) for agent, model in beside if isinstance(model, SGLangModel)]

    @property
    def is_alone(self) -> bool:
        """Whether it is one agent."""
        return self.runner is self.main


@asynccontextmanager
async def own_team(tools: Sequence[Any], build: Callable[[Sequence[Any]], Agent]) -> AsyncIterator[Team]:
    """One agent that this package builds; see `agent_with`."""
    async with agent_with(tools, build) as agent:
        yield Team(agent, agent, [agent])


@asynccontextmanager
async def built_team(path: str, model: SGLangModel, task: Task) -> AsyncIterator[Team]:
    """What the user's function builds, its tool providers released when the block ends.

    Args:
        path: Of the function, which is given the model and the task; it may be async. One that is not runs in a
            thread, for it may block.
        model: To be the main agent's.
        task: Of the episode.

    Raises:
        ConfigError: The function raised, which the message names with file, line and sample; or what it built is no
            agent, swarm or graph; or not exactly one of its agents is on the model.
        ToolError: There is no such function.
    """
    build = load_function(path, "an agent")
    given = replace(task, tools=released_once(task.tools))
    try:
        with running(given):
            made = await result_of(build, model, given, in_thread=built_in_thread)
    except (Exception, asyncio.CancelledError) as e:  # the user's code may raise anything
        # sys.exit() in a thread is made into a ToolError
        is_ours = isinstance(e, RolloutError) and not isinstance(e, ToolError)
        if is_ours or (isinstance(e, asyncio.CancelledError) and was_cancelled()):
            raise
        fault = sandbox_fault(e)  # Strands wraps what a tool provider raises
        if fault is not None:
            raise fault from e
        raise ConfigError(failure_words(f"agent_factory {path!r}", e, task)) from e
    team = _team_of(made, model, path)
    try:
        yield team
        if team.main.model is not model:
            raise ConfigError(_used_again(path, [team.main]))
    finally:
        await released([*team.agents, *team.tool_agents])


def _team_of(made: object, model: SGLangModel, path: str) -> Team:
    if not isinstance(made, Agent | MultiAgentBase):
        raise ConfigError(
            f"agent_factory {path!r} gave a {type(made).__name__}; expected a Strands Agent, Swarm or Graph"
        )
    agents = list(_agents_in(made))
    tool_agents = _tool_agents(agents)
    everyone = [*agents, *tool_agents]
    on_model = [agent for agent in everyone if agent.model is model]
    if len(on_model) != 1 or on_model[0] not in agents:
        names = ", ".join(agent.name for agent in on_model) or "none"
        raise ConfigError(
            f"agent_factory {path!r} put these agents on the model that it was given: {names}; expected one, whose "
            "tokens are the sample's, and which is no tool. Give each other agent a model of its own: "
            "strands_rollout.sub_agent_model()"
        )
    of_policy = [agent for agent in everyone if isinstance(agent.model, SGLangModel)]
    for agent in of_policy:
        refuse_blocking(agent.conversation_manager, path)
    again = [agent for agent in of_policy if agent in _PLAYED]
    if again:
        raise ConfigError(_used_again(path, again))
    _PLAYED.update(of_policy)
    for agent in everyone:
        _make_quiet(agent)
    return Team(made, on_model[0], agents, tool_agents)


def _used_again(path: str, agents: Sequence[Agent]) -> str:
    names = ", ".join(agent.name for agent in agents)
    return (
        f"agent_factory {path!r} gave these agents to more than one episode: {names}; expected new ones for each. "
        "Make them inside of the function"
    )


def _agents_in(runner: object) -> Iterator[Agent]:
    if isinstance(runner, Agent):
        yield runner
    elif isinstance(runner, MultiAgentBase):
        for node in getattr(runner, "nodes", {}).values():
            yield from _agents_in(node.executor)


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


async def ask_team(runner: MultiAgentBase, prompt: Any) -> None:  # noqa: ANN401 - whatever Strands takes
    """Run a swarm or graph once.

    Raises:
        TeamLimitError: It ended at a limit of its own.
        ConfigError: It waits for a person.
        Exception: The first that one of its agents raised.
    """
    try:
        result = await runner.invoke_async(prompt)
    except Exception as e:  # a plain one where a node takes longer than it may (strands/multiagent/graph.py)
        if type(e) is Exception and "execution timed out" in str(e):
            raise TeamLimitError(str(e)) from e
        raise
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
