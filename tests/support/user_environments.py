"""Resources and environments as users write them, correct and faulty; some record their calls in `seen`."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, Self

from strands import tool

from strands_rollout import Task, current_task

seen: list[str] = []
"""Recorded calls of resources and environments, in order."""


@asynccontextmanager
async def database(task: Task) -> AsyncIterator[dict[str, str]]:
    seen.append(f"open {task.index}")
    try:
        yield {"name": "db"}
    finally:
        await asyncio.sleep(0)
        seen.append(f"close {task.index}")


@asynccontextmanager
async def second(task: Task) -> AsyncIterator[str]:
    seen.append(f"second knows {task.resources['database']['name']}")
    yield "second"
    seen.append("second closed")


@asynccontextmanager
async def fails_to_open(task: Task) -> AsyncIterator[None]:
    raise OSError("no disk")
    yield


@asynccontextmanager
async def never_opens(task: Task) -> AsyncIterator[None]:
    seen.append("opening")
    await asyncio.sleep(60)
    yield


@asynccontextmanager
async def fails_to_close(task: Task) -> AsyncIterator[None]:
    yield
    raise OSError("still in use")


def not_async(task: Task) -> AbstractContextManager[bool]:
    return threading.Lock()


@tool
async def read_database() -> str:
    """Read the database."""
    return str(current_task().resources["database"]["name"])


class PlannedEnvironment:
    """Environment that acts, answers and fails as the row's metadata says, and records its calls in `seen`."""

    def __init__(self, task: Task) -> None:
        self.plan: dict[str, Any] = dict(task.metadata)
        self.answers = list(self.plan.get("answers", ()))

    async def __aenter__(self) -> Self:
        seen.append("enter")
        return self

    async def __aexit__(self, *error: object) -> None:
        seen.append("leave")

    def prepare(self) -> Any:
        """Return the first user message; sync, so it runs in a thread."""
        seen.append("prepare")
        if self.plan.get("fails_to") == "prepare":
            raise ValueError("nothing there")
        return self.plan.get("first")

    async def answer(self, reply: str) -> Any:
        seen.append(f"heard {reply}")
        if self.plan.get("fails_to") == "answer":
            raise ValueError("nothing to say")
        return self.answers.pop(0) if self.answers else None

    async def score(self) -> Any:
        seen.append("score")
        if self.plan.get("fails_to") == "score":
            raise ValueError("nothing to count")
        return self.plan.get("score", 0.25)


class OneTool:
    def __init__(self, task: Task) -> None:
        self.tools = read_database


class PlainTools:
    def __init__(self, task: Task) -> None:
        self.tools = [self.look]

    def look(self) -> str:
        """Look."""
        return "seen"


class NoTools:
    def __init__(self, task: Task) -> None:
        pass

    @property
    def tools(self) -> list[Any]:
        raise OSError("no tools today")


@tool
async def read_task() -> str:
    """Read the task."""
    return f"The task is: {current_task().text}"


hanging_calls: list[str] = []
"""An entry for each call that hangs."""
may_return = threading.Event()


class HangingEnvironment:
    def __init__(self, task: Task) -> None:
        self.hangs = bool(task.metadata.get("hangs"))

    def score(self) -> float:
        if self.hangs:
            hanging_calls.append("")
            may_return.wait(30)
        return 1.0


class Empty:
    def __init__(self, task: Task) -> None:
        pass
