"""The code tool: model-written Python in, what it printed out; its specification, and the tool of one episode.

The shipped model is trained on this specification and the system prompt.
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
    """Describe the tool to the policy; `keeps_state` if calls share an interpreter, None for what is not known."""
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


@dataclass(slots=True)
class CodeCalls:
    """Counts of the code tool of one episode."""

    calls: int = 0  # pieces of code that were run
    queued_s: float = 0.0  # seconds that they waited for a free place; part of no time limit
    run_s: float = 0.0  # seconds that they ran
    timeouts: int = 0  # how many the time limit ended
    killed: int = 0  # how many ended by another limit, or by a signal
    nonzero_exits: int = 0  # how many ended by themselves with an error, such as an exception

    def add(self, result: ExecutionResult) -> None:
        """Count one result."""
        self.calls += 1
        self.queued_s += result.queued_s
        self.run_s += result.duration_s
        self.timeouts += result.timed_out
        self.killed += result.killed_by is not None and not result.timed_out
        self.nonzero_exits += bool(result.exit_code) and result.killed_by is None and not result.timed_out


def format_result(result: ExecutionResult, max_output_chars: int | None = None) -> str:
    """Write what the model reads: stdout, then stderr, then how the run ended if it did not end well.

    Args:
        result: Its `infra_error` is not shown; see `code_tool`.
        max_output_chars: Limit on stdout and stderr together, cut in the middle; None for no limit.
    """
    printed = "\n".join(stream.rstrip("\n") for stream in (result.stdout, result.stderr) if stream.strip())
    if max_output_chars is not None and len(printed) > max_output_chars:
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
    """Make a Strands tool that runs the model's Python on `executor`; its description says what that offers.

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
    spec = _specification(executor, timeout_s, max_output_chars, keeps_state=session is not None)
    must_tell_restart = is_restarted

    async def execute_python_code(code: str) -> str:
        nonlocal must_tell_restart
        result = await executor.run(code, timeout_s=timeout_s, session=session)
        if must_tell_restart:
            result, must_tell_restart = replace(result, session_lost=True), False
        if calls is not None:
            calls.add(result)
        return _shown(result, max_output_chars)

    return DecoratedFunctionTool(CODE_TOOL_NAME, spec, execute_python_code, _input_check())


def _shown(result: ExecutionResult, max_output_chars: int) -> str:
    """Note a run in the record of the tool call, and return its result as the model reads it."""
    call = current_call()
    if call is not None:
        call.sandbox |= {
            "queued_s": result.queued_s,
            "run_s": result.duration_s,
            "exit_code": result.exit_code,
            "killed_by": result.killed_by,
        }
    if result.infra_error is not None:
        raise executors.executor_fault(result.infra_error)
    return format_result(result, max_output_chars)


def _specification(executor: CodeExecutor, timeout_s: float, max_output_chars: int, *, keeps_state: bool) -> ToolSpec:
    facts = executors.facts_of(executor)
    if keeps_state and not facts.keeps_sessions:
        raise ConfigError(
            f"{type(executor).__name__} keeps no sessions: each call starts fresh there. Turn code_session off, or use "
            "the local executor"
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
def _input_check() -> FunctionToolMetadata:
    """Make the check of a call's input, once: a pydantic model, which would cost each episode half a millisecond."""

    async def execute_python_code(code: str) -> str:
        return code

    return FunctionToolMetadata(execute_python_code)


class _DefaultExecutor(CodeExecutor):
    """This process's shared `LocalExecutor`, which is not made before the first call."""

    facts = ExecutorFacts(CODE_LIBRARIES, CODE_MEMORY_MB, isolated=True, keeps_sessions=True)

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        return await executors.shared_executor("local").run(code, timeout_s=timeout_s, session=session)

    async def aclose(self) -> None:
        """Nothing: it is shared."""


execute_python_code: CodeTool = code_tool(_DefaultExecutor())
"""The code tool on this process's shared `LocalExecutor`: `await execute_python_code(code="print(1)")` is "1"."""


@contextlib.asynccontextmanager
async def episode_code_tool(settings: RolloutSettings, calls: CodeCalls) -> AsyncIterator[CodeTool | None]:
    """Make the code tool of one episode, None where the settings name none; its session ends with the episode.

    Args:
        settings: Whose `executor`, `code_session` and `tool_timeout_s` count.
        calls: Where its calls are counted, those before the episode was resumed included.

    Raises:
        ConfigError: The executor can't be made, or keeps no sessions and one is wanted.
        SandboxError: The executor can't start.
    """
    if CODE_TOOL_PATH not in settings.tools:
        yield None
        return
    owner = uuid.uuid4().hex
    executor = executors.shared_executor(settings.executor)
    start = getattr(executor, "start", None)
    if start is not None:
        await start()  # what it offers is known then, and what would fail every call fails here
    session = owner if settings.code_session else None
    timeout_s = settings.tool_timeout_s or CODE_TIMEOUT_S
    owner_before = executors.CALL_OWNER.set(owner)
    try:
        # calls that were counted before are those of an aborted episode, whose session ended with it
        is_restarted = session is not None and calls.calls > 0
        yield code_tool(executor, timeout_s=timeout_s, session=session, calls=calls, is_restarted=is_restarted)
    finally:
        executors.CALL_OWNER.reset(owner_before)
        if session is not None:
            try:
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    await executor.close_session(session)
            except Exception as e:  # of a user's executor; the episode is over, and its session ends by itself
                logger.warning("a code session could not be closed error=%s: %s", type(e).__name__, e)
