"""What it means to run model-written Python: the `CodeExecutor` protocol and its result.

Knows nothing of processes, tools or agents. A backend implements the protocol; the code tool calls it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol, Self, runtime_checkable

from strands_rollout.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """What one piece of code printed, and how it ended.

    Attributes:
        stdout: Decoded as UTF-8 (bad bytes become U+FFFD), head and tail kept when `truncated`.
        stderr: As `stdout`; tracebacks name only the code's own frames.
        exit_code: The process's exit status, -N when signal N ended it, None when it never started. In a session, where
            the process lives on, 1 after an uncaught exception, else 0 or what `sys.exit` was given.
        timed_out: The time limit ended it; `stdout` and `stderr` hold what was written until then.
        truncated: At least one stream was longer than the backend keeps; a marker says how much was dropped.
        duration_s: Seconds from the first instruction of the code to the end of the process.
        killed_by: In words, what ended it from outside ("time limit of 30 s", "SIGSEGV (crash)"), else None.
        infra_error: In words, a fault of the executor itself, else None. The code is not to blame for it, and no model
            may be shown it.
        queued_s: Seconds that the call waited for a free place before its code was started.
        session_lost: The call named a session, and its interpreter has ended: variables and files are gone, and the
            next call starts afresh.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    timed_out: bool = False
    truncated: bool = False
    duration_s: float = 0.0
    killed_by: str | None = None
    infra_error: str | None = None
    queued_s: float = 0.0
    session_lost: bool = False


@dataclass(frozen=True, slots=True)
class ExecutorFacts:
    """What an executor can say of itself, so that the policy is told the truth; None where it can't.

    Attributes:
        libraries: What can be imported besides the standard library.
        memory_mb: Memory of one call in mebibytes.
        isolated: Whether network and other programs are out of reach.
        keeps_sessions: Whether `run` takes a session's name.
    """

    libraries: tuple[str, ...] | None = None
    memory_mb: int | None = None
    isolated: bool = False
    keeps_sessions: bool = False


UNKNOWN_FACTS: Final = ExecutorFacts()


@runtime_checkable
class CodeExecutor(Protocol):
    """Runs Python code for an agent; safe to call from any number of tasks, threads and event loops.

    A backend promises: `run` never blocks the event loop; whatever the code does ends in an `ExecutionResult`, never in
    an exception; cancelling `run` ends the code; stdin is empty; the caller's environment variables are not visible; a
    fault of the backend itself has been retried where that is safe before it is reported.

    A backend may have an attribute `facts`, an `ExecutorFacts`, without which nothing is promised to the policy; and an
    async method `start`, awaited before an episode, which raises what would fail every call.
    """

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        """Run code to its end or to the time limit.

        Args:
            code: A Python module's text. The value of a last expression is printed unless it is None.
            timeout_s: Wall-clock limit in seconds from the first instruction; None for the backend's default.
            session: Name of an interpreter that keeps its variables between calls; None for a fresh one.

        Raises:
            ConfigError: `code` is not a string, `timeout_s` is not a positive number, or the backend keeps no sessions
                and one was named.
        """
        ...

    async def close_session(self, session: str) -> None:
        """End a session's interpreter and delete its files; nothing happens where there is no such session."""
        ...

    async def aclose(self) -> None:
        """Wait for what runs, or end it, and release everything; `run` is refused afterwards. Safe to call twice."""
        ...

    async def __aenter__(self) -> Self:
        """Return self."""
        ...

    async def __aexit__(self, *exc_info: object) -> None:
        """Close."""
        ...


def facts_of(executor: CodeExecutor) -> ExecutorFacts:
    """What an executor says of itself; nothing, where it has no `facts`."""
    facts = getattr(executor, "facts", UNKNOWN_FACTS)
    return facts if isinstance(facts, ExecutorFacts) else UNKNOWN_FACTS


def check_call(executor: str, code: object, timeout_s: float, session: str | None, *, keeps_sessions: bool) -> None:
    """Refuse a call that no backend could run.

    Raises:
        ConfigError: See `CodeExecutor.run`; the message names the executor.
    """
    if not isinstance(code, str):
        raise ConfigError(f"{executor}.run got code of type {type(code).__name__}: {code!r:.80}; expected a string")
    check_positive("timeout_s", timeout_s)
    if session is None:
        return
    if not keeps_sessions:
        raise ConfigError(f"{executor} keeps no sessions: got session={session!r}, expected None")
    if not isinstance(session, str) or not session:
        raise ConfigError(f"{executor}.run got session={session!r}; expected a name, or None")


def check_positive(name: str, value: object) -> None:
    """Refuse what is not a positive, finite number.

    Raises:
        ConfigError: Says so.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value!r}; expected a positive, finite number")


async def retried_once(attempt: Callable[[], Awaitable[ExecutionResult]]) -> ExecutionResult:
    """Run a stateless call, and once more if the executor itself failed."""
    result = await attempt()
    return await attempt() if result.infra_error is not None else result
