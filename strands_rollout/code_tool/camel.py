"""Code on an interpreter of camel-ai, in threads; see `camel_interpreters.py` for what is relied on.

Knows threads and places. Imports `camel` only when an executor is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from strands_rollout.errors import ConfigError
from strands_rollout.sandbox.camel_interpreters import (
    Interpreter,
    check_alone,
    check_interpreter,
    import_camel,
    interpreter_maker,
    keeps_nothing,
    limited,
    result_of_answer,
    result_of_error,
)
from strands_rollout.sandbox.capped_output import shorten
from strands_rollout.sandbox.executor import ExecutionResult, ExecutorFacts, check_call, check_positive, retried_once
from strands_rollout.sandbox.private_loop import PrivateLoop

_OWN_LIMIT_MARGIN_S: Final = 5.0  # for an interpreter that ends the code by itself
_START_LIMIT_S: Final = 600.0  # the first container may need its image built
_POLL_S: Final = 0.05  # how soon the end of a thread that nobody waits for is seen


class CamelExecutor:
    """Runs each piece of code on a camel interpreter, in a daemon thread.

    How far the code is isolated is the interpreter's matter. `SubprocessInterpreter` isolates nothing: the code sees
    the environment variables, the files, the working directory and the stdin of this process.

    Each call gets an interpreter of its own, so that nothing is kept between calls, unless `reuse` is set or an
    instance was given. An instance of `SubprocessInterpreter` keeps nothing and is copied for each call; any other
    instance is used by one call at a time, and what it remembers is kept.

    Cancelling `run` stops waiting: camel can't be told to end the code, which goes on to the interpreter's own limit.
    Only `SubprocessInterpreter` is given the call's. Code that another one doesn't end at the time limit is left behind
    in its thread; while there are `max_concurrency` of those, calls end in an `infra_error`.

    Args:
        interpreter: A class of `camel.interpreters` by name ("SubprocessInterpreter") or dotted path, a class, a
            function without arguments that makes an interpreter, or an instance.
        options: The constructor's arguments, for a name, a path or a class. Not to ask for confirmation, not to print
            what the code prints, and to raise errors are the defaults here, where the constructor knows them.
        timeout_s: Default limit in wall-clock seconds, from the start of the interpreter's `run`; a call may name its
            own.
        max_output_chars: Characters kept of stdout and of stderr, half from each end.
        max_concurrency: Calls at once; the rest wait. 1 for code that runs in this process.
        reuse: Keep interpreters between calls, with whatever they remember: for those that are slow to start.

    Raises:
        ConfigError: camel-ai is not installed, there is no such interpreter, or an argument can't be used.
    """

    def __init__(
        self,
        interpreter: Any = "SubprocessInterpreter",  # noqa: ANN401 - one of several kinds
        *,
        options: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        max_output_chars: int = 20_000,
        max_concurrency: int = 8,
        reuse: bool = False,
    ) -> None:
        limits = {"timeout_s": timeout_s, "max_output_chars": max_output_chars, "max_concurrency": max_concurrency}
        for name, value in limits.items():
            check_positive(name, value)
        self._make, kind = interpreter_maker(interpreter, options)
        shared = isinstance(interpreter, import_camel().BaseInterpreter) and not keeps_nothing(interpreter)
        self._timeout_s = timeout_s
        self._max_output_chars = max_output_chars
        self._max_concurrency = 1 if shared else max_concurrency
        check_alone(kind, self._max_concurrency)
        self._reuse = reuse
        self._idle: list[Interpreter] = []
        self._left_behind: list[tuple[threading.Thread, float]] = []  # and when each should have ended
        self._loop = PrivateLoop("CamelExecutor", self._max_concurrency, self._release)
        self.facts = ExecutorFacts()

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        """Run code on an interpreter; see `CodeExecutor.run`.

        Raises:
            ConfigError: An argument can't be used; `session` must be None, since this backend keeps none. Or the
                interpreter asks for confirmation, or runs code in this process with others.
            SandboxError: The executor has been closed.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        check_call("CamelExecutor", code, limit_s, session, keeps_sessions=False)
        return await retried_once(lambda: self._loop.run(lambda: self._attempt(code, limit_s)))

    async def close_session(self, session: str) -> None:
        """Nothing to do: this backend keeps none."""

    async def aclose(self) -> None:
        """Refuse new calls, wait for running ones, clean the kept interpreters up. Safe to call twice."""
        await self._loop.aclose()

    async def __aenter__(self) -> Self:
        """Return self."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close."""
        await self.aclose()

    async def _attempt(self, code: str, timeout_s: float) -> ExecutionResult:
        """One call in a thread of its own; on the private loop."""
        if not await self._has_room():
            words = (
                f"{self._max_concurrency} threads are held by code that does not end; use an interpreter that ends it"
            )
            return ExecutionResult("", "", None, infra_error=words)
        call = _Call(code, timeout_s, self._taken)
        thread = threading.Thread(target=call.work, name="camel-interpreter", daemon=True)
        thread.start()
        try:
            result = await call.result()
        finally:
            if not call.done.done():
                self._left_behind.append((thread, call.due_at()))
        if self._reuse and call.interpreter is not None and not result.timed_out:
            self._idle.append(call.interpreter)
        stdout, stderr = (shorten(text, self._max_output_chars) for text in (result.stdout, result.stderr))
        truncated = (stdout, stderr) != (result.stdout, result.stderr)
        return replace(result, stdout=stdout, stderr=stderr, truncated=truncated)

    async def _has_room(self) -> bool:
        """Wait while threads that nobody waits for, but that will end, are too many; False if they don't end."""
        while True:
            self._left_behind = [(thread, due_at) for thread, due_at in self._left_behind if thread.is_alive()]
            if len(self._left_behind) < self._max_concurrency:
                return True
            if all(due_at <= time.monotonic() for _, due_at in self._left_behind):
                return False
            await asyncio.sleep(_POLL_S)

    def _taken(self) -> Interpreter:
        """An interpreter for one call; in the call's thread, since to make one may take long."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        made = self._make()
        check_interpreter(made)
        check_alone(type(made), self._max_concurrency)
        return made

    async def _release(self) -> None:
        while self._idle:
            cleanup = getattr(self._idle.pop(), "cleanup", None)
            if callable(cleanup):
                await asyncio.to_thread(cleanup)


@dataclass(slots=True)
class _Call:
    """One piece of code: made and awaited on the private loop, worked off in a thread."""

    code: str
    timeout_s: float
    taken: Callable[[], Interpreter]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    started: asyncio.Future[bool] = field(init=False)
    done: asyncio.Future[ExecutionResult] = field(init=False)
    interpreter: Interpreter = None
    began_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.started = self.loop.create_future()
        self.done = self.loop.create_future()

    async def result(self) -> ExecutionResult:
        """Wait for the end or the time limit, which starts when there is an interpreter."""
        await asyncio.wait([self.started], timeout=_START_LIMIT_S)
        if not self.started.done():
            return ExecutionResult("", "", None, infra_error=f"no interpreter was made in {_START_LIMIT_S:g} s")
        await asyncio.wait([self.done], timeout=self.due_at() - time.monotonic())
        if self.done.done():
            return self.done.result()
        killed_by, duration_s = f"time limit of {self.timeout_s:g} s", time.monotonic() - self.began_at
        return ExecutionResult("", "", 1, timed_out=True, killed_by=killed_by, duration_s=duration_s)

    def due_at(self) -> float:
        """When the interpreter should be done, on the monotonic clock."""
        margin_s = _OWN_LIMIT_MARGIN_S if self.interpreter is not None and keeps_nothing(self.interpreter) else 0.0
        return self.began_at + self.timeout_s + margin_s

    def work(self) -> None:
        """The thread."""
        found: ExecutionResult | BaseException
        try:
            self.interpreter = self.taken()
            self.began_at = time.monotonic()
            self._tell(self.started, True)  # noqa: FBT003 - a future's value
            with limited(self.interpreter, self.timeout_s) as one:
                found = result_of_answer(one, one.run(self.code, "python"), self.timeout_s)
        except ConfigError as e:
            found = e
        except BaseException as e:  # code that runs in this process may raise anything, SystemExit included
            found = result_of_error(self.interpreter, e)
        if isinstance(found, ExecutionResult):
            found = replace(found, duration_s=time.monotonic() - self.began_at)
        self._tell(self.done, found)
        self._tell(self.started, False)  # noqa: FBT003 - a future's value

    def _tell(self, future: asyncio.Future[Any], value: object) -> None:
        def tell() -> None:
            if not future.done():
                future.set_exception(value) if isinstance(value, BaseException) else future.set_result(value)

        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self.loop.call_soon_threadsafe(tell)
