"""What runs on a node of a Ray cluster: a local executor and the process that holds it.

Knows the `CodeExecutor` protocol. Must not know Ray, which is told elsewhere to make an actor of it.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strands_rollout.errors import ConfigError
from strands_rollout.sandbox.executor import CodeExecutor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strands_rollout.sandbox.executor import ExecutionResult


@dataclass(frozen=True, slots=True)
class ExecutorRecipe:
    """How to make the same executor on every node.

    Attributes:
        path: Dotted path to the class, importable on every node.
        options: Its keyword arguments.
    """

    path: str
    options: dict[str, Any]

    def make(self) -> CodeExecutor:
        """Make one.

        Raises:
            ConfigError: The path names no class that can be imported here, the class refuses the options, or it is not
                a `CodeExecutor`.
        """
        kind = _class_at(self.path)
        try:
            executor = kind(**self.options)
        except TypeError as e:
            raise ConfigError(f"{self.path} does not take the options {self.options}: {e}") from e
        if not isinstance(executor, CodeExecutor):
            raise ConfigError(f"{self.path} makes a {type(executor).__name__}; expected a CodeExecutor")
        return executor

    def with_defaults(self, defaults: Mapping[str, object]) -> ExecutorRecipe:
        """Add those defaults that the class has a parameter for; the options win.

        Raises:
            ConfigError: The path names no class that can be imported here.
        """
        parameters = inspect.signature(_class_at(self.path)).parameters
        known = {name: value for name, value in defaults.items() if name in parameters}
        return ExecutorRecipe(self.path, known | self.options)


def _class_at(path: str) -> type:
    module_path, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_path), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(
            f"can't load the executor {path!r}: {e}; expected the dotted path of a class, installed on every node"
        ) from e
    if not isinstance(found, type):
        raise ConfigError(f"the executor {path!r} is a {type(found).__name__}; expected a class")
    return found


@dataclass(frozen=True, slots=True)
class Call:
    """What to run, and where its session lives.

    Attributes:
        code: As for `CodeExecutor.run`.
        timeout_s: As for `CodeExecutor.run`.
        session: As for `CodeExecutor.run`.
        incarnation: The process that holds the session; None without one.
    """

    code: str
    timeout_s: float
    session: str | None = None
    incarnation: str | None = None


class RayWorker:
    """One node's executor. All methods run on one event loop, any number of calls at a time."""

    def __init__(self, recipe: ExecutorRecipe) -> None:
        self._recipe = recipe
        self._incarnation = uuid.uuid4().hex
        self._starting = asyncio.Lock()
        self._executor: CodeExecutor | None = None

    async def hello(self) -> str:
        """Make and start the executor; returns this process's incarnation, which a restarted actor does not share.

        Raises:
            ConfigError: See `ExecutorRecipe.make`.
            Exception: What the executor raises when it is entered.
        """
        await self._started()
        return self._incarnation

    async def ping(self) -> None:
        """Answer."""

    async def run(self, call: Call) -> ExecutionResult | None:
        """Run the code; None, without running it, where the session is one of another incarnation."""
        if call.incarnation not in (None, self._incarnation):
            return None
        executor = await self._started()
        return await executor.run(call.code, timeout_s=call.timeout_s, session=call.session)

    async def close_session(self, session: str) -> None:
        """As `CodeExecutor.close_session`."""
        if self._executor is not None:
            await self._executor.close_session(session)

    async def aclose(self) -> None:
        """As `CodeExecutor.aclose`."""
        if self._executor is not None:
            await self._executor.aclose()

    async def _started(self) -> CodeExecutor:
        # Not in the constructor, whose errors Ray buries; a restarted actor may be given a call before it is greeted.
        async with self._starting:
            if self._executor is None:
                self._executor = await self._recipe.make().__aenter__()
            return self._executor
