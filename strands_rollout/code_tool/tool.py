"""The code tool, which runs model-written Python: its specification, its construction, and the format of its results.

The shipped model was trained on this specification: changing a word of it changes the model's input.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from strands.tools.decorator import DecoratedFunctionTool, FunctionToolMetadata

from strands_rollout.code_tool import executors
from strands_rollout.code_tool.executors import CodeExecutor, ExecutionResult, ExecutorFacts
from strands_rollout.code_tool.sandbox.code_runner import shorten
from strands_rollout.control import current_call
from strands_rollout.errors import ConfigError
from strands_rollout.settings import CODE_TOOL_PATH, RolloutSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from strands.types.tools import ToolSpec

    CodeTool = DecoratedFunctionTool[[str], Awaitable[str]]

logger = logging.getLogger(__name__)

NO_OUTPUT: Final = "(no output)"
CODE_TOOL_NAME: Final = "execute_python_code"
CODE_TIMEOUT_S: Final = 60.0
CODE_MEMORY_MB: Final = 4096
CODE_OUTPUT_CHARS: Final = 20_000
CODE_LIBRARIES: Final = ("numpy", "sympy")
CODE_TOOL_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The Python code to run."}},
    "required": ["code"],
}
_CLOSE_LIMIT_S: Final = 10.0


def code_tool_description(
    *,
    timeout_s: float = CODE_TIMEOUT_S,
    output_chars: int = CODE_OUTPUT_CHARS,
    memory_mb: int | None = CODE_MEMORY_MB,
    libraries: Sequence[str] | None = CODE_LIBRARIES,
    isolated: bool = True,
    keeps_state: bool = False,
) -> str:
    """Return the tool's description for the policy.

    Unknown facts are omitted: memory or libraries if the argument is None, isolation if `isolated` is false.
    """
    memory = f", {memory_mb} MB of memory" if memory_mb is not None else ""
    sentences = [
        "Run Python code and return what it prints, and the value of a last expression.",
        "Variables and files are kept between calls."
        if keeps_state
        else "Each call starts fresh: variables and files are not kept.",
        f"Installed besides the standard library: {', '.join(libraries) or 'nothing'}."
        if libraries is not None
        else "",
        "No network, no other programs." if isolated else "",
        f"At most {timeout_s:g} s{memory} and {output_chars} characters of output.",
    ]
    return " ".join(filter(None, sentences))


CODE_TOOL_DESCRIPTION: Final = code_tool_description()


@dataclass
class CodeCallTotals:
    """Totals over the code-tool calls of one episode."""

    calls: int = 0
    queued_s: float = 0.0  # seconds of waiting before the code ran, mainly for a slot; not part of `tool_timeout_s`
    run_s: float = 0.0
    timeouts: int = 0  # calls ended by the time limit
    killed: int = 0  # calls ended by another limit, a signal or the like
    nonzero_exits: int = 0  # calls that ended with an error of the code, such as an exception

    def add(self, result: ExecutionResult) -> None:
        """Add one result to the totals."""
        self.calls += 1
        self.queued_s += result.queued_s
        self.run_s += result.duration_s
        self.timeouts += result.timed_out
        self.killed += result.killed_by is not None and not result.timed_out
        self.nonzero_exits += bool(result.exit_code) and result.killed_by is None and not result.timed_out


def format_result(result: ExecutionResult, max_output_chars: int | None = None) -> str:
    """Return the text that the model reads: stdout, stderr, how a failed run ended, and whether a session was lost.

    Args:
        result: A result without `infra_error`; for an `infra_error`, the tool raises SandboxError instead.
        max_output_chars: Limit on stdout and stderr together; a longer text is cut in the middle. None for no limit.
    """
    printed = "\n".join(stream.rstrip("\n") for stream in (result.stdout, result.stderr) if stream.strip())
    if max_output_chars is not None and len(printed) > max_output_chars:
        printed = shorten(printed, max_output_chars)
    lost = "The interpreter was restarted: variables and files are gone." if result.session_lost else ""
    return "\n".join(part for part in (printed, _failure_line(result), lost) if part) or NO_OUTPUT


def _failure_line(result: ExecutionResult) -> str:
    if result.timed_out:
        return f"TimeoutError: the code was stopped at the {result.killed_by or 'time limit'}."
    if result.killed_by is not None:
        return f"The code was ended by: {result.killed_by}."
    if result.exit_code and (result.exit_code != 1 or not result.stderr):
        return f"Exit code: {result.exit_code}"
    return ""  # no failure, or exit code 1 with a stderr that says enough, such as a traceback


def code_tool(
    executor: CodeExecutor,
    *,
    timeout_s: float = CODE_TIMEOUT_S,
    max_output_chars: int = CODE_OUTPUT_CHARS,
    session: str | None = None,
    calls: CodeCallTotals | None = None,
    is_restarted: bool = False,
) -> CodeTool:
    """Make a Strands tool that runs the model's Python on `executor`; its description states the executor's facts.

    Args:
        executor: The executor; the caller closes it and the session.
        timeout_s: Limit per call in seconds; the model can't raise it.
        max_output_chars: Maximum characters of output per call; longer output is cut in the middle with a marker.
        session: Name of an interpreter that all calls share; None for a fresh interpreter per call.
        calls: Totals to add each call to.
        is_restarted: True if this session replaces one that the model has used. The first result then tells the model
            that variables and files are gone.

    Raises:
        ConfigError: `session` is given, and the executor keeps no sessions.
        SandboxError: Raised by a call of the tool if the executor itself failed. Strands turns a tool's exception into
            an error result for the model and keeps the exception as `AfterToolCallEvent.exception`. Code that drives
            the agent must check this attribute: the model did not cause the failure.
    """
    spec = _specification(executor, timeout_s, max_output_chars, keeps_state=session is not None)
    restart_unreported = is_restarted

    async def execute_python_code(code: str) -> str:
        nonlocal restart_unreported
        result = await executor.run(code, timeout_s=timeout_s, session=session)
        if restart_unreported:
            result, restart_unreported = replace(result, session_lost=True), False
        if calls is not None:
            calls.add(result)
        return _record_and_format(result, max_output_chars)

    return DecoratedFunctionTool(CODE_TOOL_NAME, spec, execute_python_code, _input_validator())


def _record_and_format(result: ExecutionResult, max_output_chars: int) -> str:
    call = current_call()
    if call is not None:
        call.sandbox |= {
            "queued_s": result.queued_s,
            "run_s": result.duration_s,
            "exit_code": result.exit_code,
            "killed_by": result.killed_by,
        }
    if result.infra_error is not None:
        raise executors.record_executor_fault(result.infra_error)
    return format_result(result, max_output_chars)


def _specification(executor: CodeExecutor, timeout_s: float, max_output_chars: int, *, keeps_state: bool) -> ToolSpec:
    facts = executors.facts_of(executor)
    if keeps_state and not facts.keeps_sessions:
        raise ConfigError(
            f"{type(executor).__name__} keeps no sessions: each call starts a fresh interpreter. Set code_session to "
            "false, or use the local executor"
        )
    description = code_tool_description(
        timeout_s=timeout_s,
        output_chars=max_output_chars,
        memory_mb=facts.memory_mb,
        libraries=facts.libraries,
        isolated=facts.isolated,
        keeps_state=keeps_state,
    )
    schema = {"json": copy.deepcopy(CODE_TOOL_SCHEMA)}
    return {"name": CODE_TOOL_NAME, "description": description, "inputSchema": schema}


@functools.cache
def _input_validator() -> FunctionToolMetadata:
    """Return the validator of a call's input; made only once, since making it takes half a millisecond."""

    async def execute_python_code(code: str) -> str:
        return code

    return FunctionToolMetadata(execute_python_code)


class _DefaultExecutor(CodeExecutor):
    """This process's shared `LocalExecutor`, made at the first call."""

    facts = ExecutorFacts(CODE_LIBRARIES, CODE_MEMORY_MB, isolated=True, keeps_sessions=True)

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        return await executors.shared_executor("local").run(code, timeout_s=timeout_s, session=session)

    async def aclose(self) -> None:
        """Do nothing: the executor is shared."""


execute_python_code: CodeTool = code_tool(_DefaultExecutor())
"""The code tool on this process's shared `LocalExecutor`: `await execute_python_code(code="print(1)")` is "1"."""


@contextlib.asynccontextmanager
async def episode_code_tool(settings: RolloutSettings, calls: CodeCallTotals) -> AsyncIterator[CodeTool | None]:
    """Make the code tool of one episode. If the settings ask for a code session, the session ends with the context.

    Yields None if the settings don't list the tool, or if an environment plays the episodes.

    Args:
        settings: `tools`, `environment`, `executor`, `code_session` and `tool_timeout_s` are read.
        calls: Totals to add each call to; the totals of a resumed episode include the calls before the abort.

    Raises:
        ConfigError: The executor can't be made, one of its libraries is not installed, or `code_session` is set and
            the executor keeps no sessions.
        SandboxError: The executor can't start.
    """
    if CODE_TOOL_PATH not in settings.tools or settings.environment_plays:
        yield None
        return
    owner = uuid.uuid4().hex
    executor = executors.shared_executor(settings.executor)
    start = getattr(executor, "start", None)
    if start is not None:
        await start()  # afterwards `facts` are known, and an error that would fail every call is raised here
    session = owner if settings.code_session else None
    timeout_s = settings.tool_timeout_s or CODE_TIMEOUT_S
    owner_before = executors.CALL_OWNER.set(owner)
    try:
        # earlier calls were made before an abort, which ended their session
        is_restarted = session is not None and calls.calls > 0
        yield code_tool(executor, timeout_s=timeout_s, session=session, calls=calls, is_restarted=is_restarted)
    finally:
        executors.CALL_OWNER.reset(owner_before)
        if session is not None:
            try:
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    await executor.close_session(session)
            except Exception as e:  # a user's executor may raise anything; the episode is over in any case
                logger.warning("closing a code session failed error=%s: %s", type(e).__name__, e)
