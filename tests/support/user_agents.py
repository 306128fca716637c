"""Agent factories as users write them, correct and faulty, for `agent_factory: user_agents.NAME`."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from strands import Agent, ToolContext, tool
from strands.agent.conversation_manager import SummarizingConversationManager
from strands.hooks import AfterToolCallEvent, HookProvider, HookRegistry
from strands.multiagent import GraphBuilder, Swarm

from strands_rollout import SGLangModel, Task, current_task, sub_agent_model
from strands_rollout.errors import SandboxError

built: list[Any] = []
"""Agents that `plain` has built, in order."""
factory_is_hanging, factory_may_return = threading.Event(), threading.Event()
"""The first is set when `hanging_for_some_rows` hangs; a test sets the second to let the function return."""


@tool
async def double(number: int) -> int:
    """Double a number."""
    return 2 * number


@tool
async def sleep() -> str:
    """Sleep for a minute."""
    await asyncio.sleep(60)
    return "awake"


@tool
async def row_label() -> str:
    """Return the row's label."""
    return str(current_task().label)


@tool
async def raise_sandbox_error() -> str:
    """Fail."""
    raise SandboxError("no machine")


factories_of_the_test: list[Callable[[SGLangModel, Task], Any]] = []
"""Factories of the running test; `build_for_test` calls the last one."""


def build_for_test(model: SGLangModel, task: Task) -> Any:
    return factories_of_the_test[-1](model, task)


def plain(model: SGLangModel, task: Task) -> Agent:
    """Build an agent with Strands' defaults: it prints its answers and keeps forty messages."""
    built.append(Agent(model=model, tools=[double, sleep, row_label]))
    return built[-1]


def with_tools_of_the_task(model: SGLangModel, task: Task) -> Agent:
    return Agent(model=model, tools=list(task.tools), system_prompt="Be brief.")


def hanging_for_some_rows(model: SGLangModel, task: Task) -> Agent:
    if task.metadata.get("hangs"):
        factory_is_hanging.set()
        factory_may_return.wait(30)
    return plain(model, task)


async def async_factory(model: SGLangModel, task: Task) -> Agent:
    await asyncio.sleep(0)
    return plain(model, task)


def with_earlier_turns(model: SGLangModel, task: Task) -> Agent:
    messages = [
        {"role": "user", "content": [{"text": "What is 1 + 1?"}]},
        {"role": "assistant", "content": [{"text": "2"}]},
    ]
    return Agent(model=model, messages=messages, tools=[double])  # type: ignore[arg-type]


def broken(model: SGLangModel, task: Task) -> Agent:
    return {"agent": plain(model, task)}["the agent"]


def shared_agent(model: SGLangModel, task: Task) -> Agent:
    if not built:
        return plain(model, task)
    built[0].model = model
    return built[0]


def with_an_expert(model: SGLangModel, task: Task) -> Agent:
    expert = Agent(
        name="expert", model=sub_agent_model(), system_prompt="You help.", tools=[double, raise_sandbox_error]
    )
    return Agent(model=model, system_prompt="You answer.", tools=[expert.as_tool()])


def _after_tools(act: Callable[[AfterToolCallEvent], None]) -> HookProvider:
    class Hook(HookProvider):
        def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
            registry.add_callback(AfterToolCallEvent, act)

    return Hook()


@tool(context=True)
async def ask_a_person(question: str, tool_context: ToolContext) -> str:
    """Ask a person."""
    return str(tool_context.interrupt("approval", reason=question))


def with_interrupt(model: SGLangModel, task: Task) -> Agent:
    return Agent(model=model, tools=[ask_a_person])


def graph_with_interrupt(model: SGLangModel, task: Task) -> Any:
    builder = GraphBuilder().set_max_node_executions(2)
    builder.add_node(with_interrupt(model, task), "only")
    return builder.build()


def with_changing_prompt(model: SGLangModel, task: Task) -> Agent:
    def change(event: AfterToolCallEvent) -> None:
        event.agent.system_prompt = "You are tired."

    hooks = [_after_tools(change)]
    return Agent(model=model, tools=[double], system_prompt="You are fresh.", hooks=hooks)


def with_tools_added_later(model: SGLangModel, task: Task) -> Agent:
    def load(event: AfterToolCallEvent) -> None:
        event.agent.tool_registry.process_tools([row_label])

    return Agent(model=model, tools=[double], hooks=[_after_tools(load)])


def with_summarizing_manager(model: SGLangModel, task: Task) -> Agent:
    return Agent(model=model, conversation_manager=SummarizingConversationManager())


def with_node_timeout(model: SGLangModel, task: Task) -> Any:
    builder = GraphBuilder().set_max_node_executions(10).set_node_timeout(0.05)
    builder.add_node(Agent(model=model), "only")
    return builder.build()


class Number(BaseModel):
    """The answer."""

    value: int


def structured(model: SGLangModel, task: Task) -> Agent:
    return Agent(model=model, structured_output_model=Number)


def not_an_agent(model: SGLangModel, task: Task) -> str:
    return "an agent"


def on_another_model(model: SGLangModel, task: Task) -> Agent:
    return Agent(model=sub_agent_model())


def swarm(model: SGLangModel, task: Task) -> Swarm:
    """Build a swarm in which a helper begins and may hand over to the speaker."""
    helper = Agent(name="helper", model=sub_agent_model(), system_prompt="You help.", tools=[double])
    speaker = Agent(name="speaker", model=model, system_prompt="You answer.")
    return Swarm([helper, speaker], entry_point=helper, max_handoffs=2)


def graph(model: SGLangModel, task: Task) -> Any:
    """Build a graph of two parallel nodes, and a node that reads both answers."""
    builder = GraphBuilder().set_max_node_executions(10)
    for name in ("left", "right"):
        builder.add_node(Agent(name=name, model=sub_agent_model(), system_prompt=f"You are {name}."), name)
    builder.add_node(Agent(name="last", model=model, system_prompt="You are last."), "last")
    builder.add_edge("left", "last")
    builder.add_edge("right", "last")
    return builder.build()


def with_a_hidden_agent(model: SGLangModel, task: Task) -> Agent:
    """Build an agent with a tool that creates another agent on the same model."""

    @tool
    async def ask(question: str) -> str:
        """Ask."""
        other = Agent(model=model, system_prompt="You are hidden.", tools=[double], callback_handler=None)
        return str(await other.invoke_async(question))

    return Agent(model=model, tools=[ask])
