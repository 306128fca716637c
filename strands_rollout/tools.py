"""The code tool that the agent calls: model-written Python in, what it printed out.

Knows Strands' tools and the `CodeExecutor` protocol. Must not know episodes, samples or slime.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from strands.tools.decorator import DecoratedFunctionTool, FunctionToolMetadata

from strands_rollout.bounded_tool import note_outcome
from strands_rollout.errors import ConfigError, SandboxError
from strands_rollout.executors import shared_executor
from strands_rollout.prompts import (
    CODE_LIBRARIES,
    CODE_MEMORY_MB,
    CODE_OUTPUT_CHARS,
    CODE_TIMEOUT_S,
    CODE_TOOL_NAME,
    CODE_TOOL_SCHEMA,
    code_tool_description,
)
from strands_rollout.sandbox.capped_output import shorten
from strands_rollout.sandbox.executor import CodeExecutor, ExecutionResult, ExecutorFacts, facts_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from strands.types.tools import ToolSpec

    CodeTool = DecoratedFunctionTool[[str], Awaitable[str]]

NO_OUTPUT: Final = "(no output)"
_DEFAULT_EXECUTOR: Final = "local"
_DEFAULT_FACTS: Final = ExecutorFacts(CODE_LIBRARIES, CODE_MEMORY_MB, isolated=True, keeps_sessions=True)


@dataclass(slots=True)
class CodeCalls:
    """What the code tool of one episode did.

    Attributes:
        calls: Pieces of code that were run.
        queued_s: Seconds that they waited for a free place; part of no time limit.
        run_s: Seconds that they ran.
        timeouts: How many the time limit ended.
        killed: How many ended by another limit, or by a signal.
    """

    calls: int = 0
    queued_s: float = 0.0
    run_s: float = 0.0
    timeouts: int = 0
    killed: int = 0

    def add(self, result: ExecutionResult) -> None:
        """Count one result."""
        self.calls += 1
        self.queued_s += result.queued_s
        self.run_s += result.duration_s
        self.timeouts += result.timed_out
        self.killed += result.killed_by is not None and not result.timed_out


def format_result(result: ExecutionResult, max_output_chars: int | None = None) -> str:
    """What the model reads: stdout, then stderr, then how the run ended if it did not end well.

    Args:
        result: Its `infra_error` is not shown; see `code_tool`.
        max_output_chars: Limit on stdout and stderr together, cut in the middle; None for no limit.
    """
    printed = "\n".join(stream.rstrip("\n") for stream in (result.stdout, result.stderr) if stream.strip())
    if max_output_chars is not None:
        printed = shorten(printed, max_output_chars)
    lost = "The interpreter was restarted: variables and files are gone." if result.session_lost else ""
    return "\n".join(part for part in (printed, _status(result), lost) if part) or NO_OUTPUT


def _status(result: ExecutionResult) -> str:
    if result.timed_out:
        return f"TimeoutError: the code was stopped at the {result.killed_by or 'time limit'}."
    if result.killed_by is not None:
        return f"The code was ended by: {result.killed_by}."
    if result.exit_code and (result.exit_code != 1 or not result.stderr):
        return f"Exit code: {result.exit_code}"
    return ""  # an uncaught exception exits with 1 and has said so on stderr


def code_tool(
    executor: CodeExecutor,
    *,
    timeout_s: float = CODE_TIMEOUT_S,
    max_output_chars: int = CODE_OUTPUT_CHARS,
    session: str | None = None,
    calls: CodeCalls | None = None,
    is_restarted: bool = False,
) -> CodeTool:
    """A Strands tool that runs the model's Python on `executor`; its description says what that offers.

    Args:
        executor: Not owned: the caller closes it, and its session.
        timeout_s: Limit per call in seconds; the model can't raise it.
        max_output_chars: Limit on what one call prints, in characters, cut in the middle with a marker.
        session: Name of an interpreter that all calls share; None for a fresh one each time.
        calls: Where calls are counted.
        is_restarted: The session is new, and the model knows an older one: its first call says so.

    Raises:
        ConfigError: A session is named, and the executor keeps none.
        SandboxError: From a call, when the executor itself failed. Strands turns whatever a tool raises into an error
            result for the model and keeps the exception as `AfterToolCallEvent.exception`: who drives the agent must
            look for it there, since the model is not to blame for it.
    """
    facts = facts_of(executor)
    if session is not None and not facts.keeps_sessions:
        raise ConfigError(
            f"{type(executor).__name__} keeps no sessions: each call starts fresh there. Turn code_session off, or use "
            "the local executor"
        )
    return _code_tool(lambda: executor, facts, timeout_s, max_output_chars, session, calls, is_restarted=is_restarted)


def _code_tool(
    find_executor: Callable[[], CodeExecutor],
    facts: ExecutorFacts,
    timeout_s: float,
    max_output_chars: int,
    session: str | None = None,
    calls: CodeCalls | None = None,
    *,
    is_restarted: bool = False,
) -> CodeTool:
    untold = is_restarted

    async def execute_python_code(code: str) -> str:
        """Run Python code; the model reads the description in `prompts` instead."""
        nonlocal untold
        result = await find_executor().run(code, timeout_s=timeout_s, session=session)
        if untold:
            result, untold = replace(result, session_lost=True), False
        if calls is not None:
            calls.add(result)
        note_outcome(
            queued_s=result.queued_s, run_s=result.duration_s, exit_code=result.exit_code, killed_by=result.killed_by
        )
        if result.infra_error is not None:
            raise SandboxError(f"the code executor failed: {result.infra_error}")
        return format_result(result, max_output_chars)

    description = code_tool_description(
        timeout_s=timeout_s,
        output_chars=max_output_chars,
        memory_mb=facts.memory_mb,
        libraries=facts.libraries,
        isolated=facts.isolated,
        keeps_state=session is not None,
    )
    spec: ToolSpec = {
        "name": CODE_TOOL_NAME,
        "description": description,
        "inputSchema": {"json": copy.deepcopy(CODE_TOOL_SCHEMA)},
    }
    return DecoratedFunctionTool(CODE_TOOL_NAME, spec, execute_python_code, _input_check())


@functools.cache
def _input_check() -> FunctionToolMetadata:
    """What checks the input of a call: a pydantic model, whose making would cost each episode half a millisecond."""

    async def execute_python_code(code: str) -> str:
        """Give the signature."""
        return code

    return FunctionToolMetadata(execute_python_code)


execute_python_code: CodeTool = _code_tool(
    lambda: shared_executor(_DEFAULT_EXECUTOR), _DEFAULT_FACTS, CODE_TIMEOUT_S, CODE_OUTPUT_CHARS
)
"""The code tool on this process's shared `LocalExecutor`: `await execute_python_code(code="print(1)")` is "1"."""
