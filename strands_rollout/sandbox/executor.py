"""What it means to run model-written Python: the `CodeExecutor` protocol and its result.

Knows nothing of processes, tools or agents. A backend implements the protocol; the code tool calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """What one piece of code printed, and how it ended.

    Attributes:
        stdout: Decoded as UTF-8 (bad bytes become U+FFFD), head and tail kept when `truncated`.
        stderr: As `stdout`; tracebacks name only the code's own frames.
        exit_code: The process's exit status, -N when signal N ended it, None when it never started.
        timed_out: The time limit ended it; `stdout` and `stderr` hold what was written until then.
        truncated: At least one stream was longer than the backend keeps; a marker says how much was dropped.
        duration_s: Seconds from the first instruction of the code to the end of the process.
        killed_by: In words, what ended it from outside ("time limit of 30 s", "SIGSEGV (crash)"), else None.
        infra_error: In words, a fault of the executor itself, else None. The code is not to blame for it, and no model
            may be shown it.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    timed_out: bool = False
    truncated: bool = False
    duration_s: float = 0.0
    killed_by: str | None = None
    infra_error: str | None = None


@runtime_checkable
class CodeExecutor(Protocol):
    """Runs Python code for an agent; safe to call from any number of tasks, threads and event loops.

    A backend promises: `run` never blocks the event loop; whatever the code does ends in an `ExecutionResult`, never in
    an exception; cancelling `run` ends the code; stdin is empty; the caller's environment variables are not visible.
    """

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        """Run code to its end or to the time limit.

        Args:
            code: A Python module's text. The value of a last expression is printed unless it is None.
            timeout_s: Wall-clock limit in seconds from the first instruction; None for the backend's default.
            session: Name of an interpreter that keeps its variables between calls; None for a fresh one.

        Raises:
            ConfigError: `timeout_s` is not a positive number, or the backend keeps no sessions and one was named.
        """
        ...

    async def aclose(self) -> None:
        """Wait for what runs and release everything; `run` must not be called afterwards. Safe to call twice."""
        ...

    async def __aenter__(self) -> Self:
        """Return self."""
        ...

    async def __aexit__(self, *exc_info: object) -> None:
        """Close."""
        ...
