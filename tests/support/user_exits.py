"""Tools, hooks, agents, environments and resources that raise `raises`, to be named in settings."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from strands import Agent, hooks, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.multiagent import GraphBuilder
from strands.tools import ToolProvider

from strands_rollout import SGLangModel, Task, sub_agent_model

raises: BaseException = SystemExit(2)
"""Exception to raise; each test sets it."""


class CustomBaseException(BaseException):
    """An exception that `except Exception` does not catch."""


def _raise(*_: Any, **__: Any) -> Any:
    raise raises


async def _raise_async(*_: Any, **__: Any) -> Any:
    await asyncio.sleep(0)
    raise raises


should_abort = factory = _raise


@tool
async def async_tool(number: int = 0) -> str:
    """Raise `raises`."""
    return str(await _raise_async())


@tool
def sync_tool(number: int = 0) -> str:
    """Raise `raises`."""
    return str(_raise())


@tool
async def streaming_tool(number: int = 0) -> AsyncGenerator[Any, None]:
    """Raise `raises`."""
    yield "so far"
    raise raises


@tool
async def fine(number: int = 0) -> str:
    """Do nothing."""
    return "fine"


class UnreadableError(Exception):
    """An exception whose `str` and `repr` raise."""

    __repr__ = __str__ = _raise


@tool
async def unreadable_tool(number: int = 0) -> str:
    """Raise an exception that can't be printed."""
    raise UnreadableError


def _at(event: type[Any], callback: Any = _raise) -> type[hooks.HookProvider]:
    class Hook(hooks.HookProvider):
        def register_hooks(self, registry: hooks.HookRegistry, **kwargs: Any) -> None:
            registry.add_callback(event, callback)

    return Hook


BeforeModel = _at(hooks.BeforeModelCallEvent)
AfterTool = _at(hooks.AfterToolCallEvent)
AsyncAfterTool = _at(hooks.AfterToolCallEvent, _raise_async)


class BrokenConstructor(hooks.HookProvider):
    __init__ = _raise


class Manager(NullConversationManager):
    apply_management = _raise


class Provider(ToolProvider):
    def __init__(self, where: str) -> None:
        self.where = where

    async def load_tools(self, **_: Any) -> list[Any]:
        if self.where == "load":
            await _raise_async()
        return [fine]

    def add_consumer(self, *_: Any, **__: Any) -> None:
        pass

    def remove_consumer(self, *_: Any, **__: Any) -> None:
        if self.where == "remove":
            self.where = ""  # a later call, by `Agent.__del__`, may come during another test
            raise raises


def agent_with_hook(model: SGLangModel, task: Task) -> Agent:
    return Agent(model=model, tools=[fine], hooks=[AfterTool()])


def agent_with_agent(model: SGLangModel, task: Task) -> Agent:
    inner = Agent(name="fine", description="An agent.", model=sub_agent_model(), hooks=[BeforeModel()])
    return Agent(model=model, tools=[inner.as_tool()])


def agent_with_provider(model: SGLangModel, task: Task) -> Agent:
    return Agent(model=model, tools=[Provider(task.metadata["where"])])


def agent_with_middleware(model: SGLangModel, task: Task) -> Agent:
    from strands.middleware import InvokeModelStage

    agent = Agent(model=model, tools=[fine])

    async def wrap(context: Any, next_stage: Any) -> AsyncGenerator[Any, None]:
        async for event in next_stage(context):
            yield event
        await _raise_async()

    agent.add_middleware(InvokeModelStage, wrap)
    return agent


def graph(model: SGLangModel, task: Task) -> Any:
    builder = GraphBuilder()
    builder.add_node(Agent(model=model, hooks=[BeforeModel()]), "first")
    return builder.set_max_node_executions(3).build()


class Environment:
    def __init__(self, task: Task) -> None:
        self.where = task.metadata.get("where")
        if self.where == "init":
            raise raises

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._raise_at("leave")

    async def answer(self, reply: str) -> None:
        await self._raise_at("answer")

    async def score(self) -> Any:
        return await self._raise_at("score", 1.0)

    async def _raise_at(self, place: str, result: Any = None) -> Any:
        return await _raise_async() if place == self.where else result


@asynccontextmanager
async def resource(task: Task) -> AsyncIterator[None]:
    await _raise_async()
    yield


@asynccontextmanager
async def resource_not_closed(task: Task) -> AsyncIterator[None]:
    yield
    await _raise_async()
