"""Wrap Strands tools for an episode: limit their time, count their calls, run each sync call in its own thread.

Strands runs sync tools in the loop's default thread pool, where a few hanging tools would block the tools of all
episodes and the interpreter's exit. Here, each call of a sync tool has its own daemon thread.

Also here: `callable_names` renames tools whose names Strands refuses, `sandbox_fault` finds an infrastructure fault in
an exception's causes, and `TurnToolExecutor` runs the calls of a turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final, cast

from strands import Agent
from strands.interrupt import InterruptException
from strands.tools.decorator import DecoratedFunctionTool
from strands.tools.executors import ConcurrentToolExecutor, SequentialToolExecutor
from strands.tools.tools import PythonAgentTool
from strands.types._events import ToolInterruptEvent, ToolResultEvent
from strands.types.tools import AgentTool, ToolGenerator, ToolResult, ToolSpec, ToolUse

from strands_rollout.aio import start_task
from strands_rollout.control import Control, RunningCall, calling
from strands_rollout.errors import SandboxError, ToolError, UnplayableAgentError
from strands_rollout.exits import exits_as_errors
from strands_rollout.log_once import log_once
from strands_rollout.own_thread import in_own_thread
from strands_rollout.template.messages import error_message, error_result, normalize_tool_result

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ToolStats:
    """Counts, times and results of the tools of one episode.

    Attributes:
        control: The episode's control, for its clock.
        seconds: Wall-clock seconds in tools, summed over parallel calls.
        waited_s: Wall-clock seconds with at least one running tool.
        errors: Number of results with status error, including timeouts and calls of unknown tools.
        timeouts: Number of calls that were cancelled at the time limit.
        infrastructure_error: The first fault of the code executor, of an MCP server, or of an agent that can't be
            played; never the policy's fault.
        finished: Results of the last turn's calls by tool-use id, from this agent or the agent of an aborted attempt.
        succeeded: Ids of all calls whose last result was not an error.
        unread: Ids of results in `finished` that come from an aborted attempt and were not returned to this agent yet.
        calls: An entry for each call, in the order of completion: `id`, `tool`, `status` (success, error, timeout or
            unknown), `s` (seconds), `at_s` (start, in seconds since the episode's start; None outside of an episode),
            and `sandbox` for calls of the code tool (`RunningCall.sandbox`).
        on_call_end: Called after a result has been added to `finished`.
    """

    control: Control = field(default_factory=Control)
    seconds: float = 0.0
    errors: int = 0
    timeouts: int = 0
    infrastructure_error: SandboxError | UnplayableAgentError | None = None
    finished: dict[str, Any] = field(default_factory=dict)
    succeeded: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    calls: list[dict[str, Any]] = field(default_factory=list)
    on_call_end: Callable[[], object] | None = None
    waited_s: float = 0.0
    _running: int = 0
    _since: float = 0.0

    def count_unknown(self, tool_use: ToolUse) -> None:
        """Count a call of an unknown tool as an error, and add its entry to `calls`."""
        self.errors += 1
        call = {"id": tool_use["toolUseId"], "tool": tool_use["name"], "status": "unknown"}
        self.calls.append({**call, "s": 0.0, "at_s": self.control.step_start_s(0.0)})

    def begin_call(self, now: float) -> None:
        """Note that a call begins at `now` (`time.monotonic`); time with several calls counts once in `waited_s`."""
        if not self._running:
            self._since = now
        self._running += 1

    def end_call(self, began_at: float, now: float) -> None:
        """Add the time from `began_at` to `now` to `seconds`; if no other call is running, update `waited_s`, too."""
        self._running -= 1
        self.seconds += now - began_at
        if not self._running:
            self.waited_s += now - self._since


CLEANUP_TIMEOUT_S: Final = 0.05

ToolSpan = Callable[[str], contextlib.AbstractContextManager[object]]
"""Returns the context manager to enter around a call, given the tool's name."""
_NO_SPAN: Final = contextlib.nullcontext()


_MAX_NAME_CHARS: Final = 64
_VALID_NAME: Final = re.compile(rf"[a-zA-Z0-9_-]{{1,{_MAX_NAME_CHARS}}}")


def callable_names(names: Collection[str]) -> dict[str, str]:
    """Map tool names to names that Strands accepts in calls, replacing invalid characters by `_`.

    Strands offers tools of any name to the model. However, Strands answers a call with an error if the tool's name has
    more than 64 characters, or characters other than ASCII letters, digits, `_` and `-`. MCP also allows dots, and up
    to 128 characters. Names are cut to 64 characters, and a number is appended to a name that is already taken. Each
    renaming is logged once.

    Raises:
        ToolError: A name to replace has no ASCII letter or digit.
    """
    found = {name: name for name in names if _VALID_NAME.fullmatch(name)}
    taken = {name.replace("-", "_") for name in found}  # Strands treats `-` and `_` as equal
    for name in names:
        if name in found:
            continue
        plain = re.sub(r"[^a-zA-Z0-9_-]", "_", name)
        if not plain.strip("_-"):
            raise ToolError(
                f"the tool {name!r} can't be called: its name has no ASCII letter or digit, and Strands accepts only "
                "names of ASCII letters, digits, _ and -; rename the tool, or exclude it (tool_filters of an MCP "
                "server)"
            )
        endings = ("", *(f"_{number}" for number in range(2, len(names) + 2)))
        options = (plain[: _MAX_NAME_CHARS - len(ending)] + ending for ending in endings)
        found[name] = next(option for option in options if option.replace("-", "_") not in taken)
        taken.add(found[name].replace("-", "_"))
        message = "renamed the tool %r to %r, since Strands refuses calls of the original name"
        log_once(logger, logging.WARNING, message, name, found[name])
    return {name: found[name] for name in names}


class WrappedTool(AgentTool):
    """A wrapper around a tool, with the same specification.

    Args:
        tool: The wrapped tool.
        name: Name for the model; None for the wrapped tool's name.
    """

    def __init__(self, tool: AgentTool, name: str | None = None) -> None:
        super().__init__()
        self._tool = tool
        self._name = tool.tool_name if name is None else name

    @property
    def tool_name(self) -> str:
        """The name for the model."""
        return self._name

    @property
    def tool_spec(self) -> ToolSpec:
        """The wrapped tool's specification, with the name for the model."""
        spec = self._tool.tool_spec
        return spec if spec["name"] == self._name else {**spec, "name": self._name}

    def _inner_use(self, tool_use: ToolUse) -> ToolUse:
        return tool_use if self._tool.tool_name == self._name else {**tool_use, "name": self._tool.tool_name}

    @property
    def tool_type(self) -> str:
        """The wrapped tool's type, as Strands names it."""
        return self._tool.tool_type


class BoundedTool(WrappedTool):
    """A wrapper that limits a tool's time and counts its calls.

    Args:
        tool: Any Strands tool.
        timeout_s: Time limit of a call in seconds; None for no limit. At the limit, the call is cancelled and gets an
            error result.
        stats: Counts the tool's calls.
        span: Returns a context manager to enter around each call; None for no context manager.
        name: See `WrappedTool`.
    """

    def __init__(
        self,
        tool: AgentTool,
        *,
        timeout_s: float | None,
        stats: ToolStats,
        span: ToolSpan | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(_with_own_thread(tool), name)
        self._timeout_s = timeout_s
        self._stats = stats
        self._span = span

    @property
    def inner(self) -> AgentTool:
        """The wrapped tool; a sync function is already wrapped so that it runs in a thread of its own."""
        return self._tool

    @property
    def is_simple(self) -> bool:
        """True if the tool is a decorated function that gets neither the agent nor the tool context."""
        if type(self._tool) is not DecoratedFunctionTool:  # a subclass may read more than the arguments
            return False
        metadata = self._tool._metadata
        return metadata._context_param is None and "agent" not in metadata.signature.parameters

    async def stream(self, tool_use: ToolUse, invocation_state: dict[str, Any], **kwargs: object) -> ToolGenerator:
        """Run the wrapped tool; a timeout yields an error result.

        If the call finished in an aborted attempt, its stored result is yielded. A call that finished in this attempt
        runs again, since a hook has requested a retry.
        """
        call_id = tool_use["toolUseId"]
        if call_id in self._stats.unread:
            self._stats.unread.remove(call_id)
            yield self._stats.finished[call_id]
            return
        self._stats.finished.pop(call_id, None)
        self._stats.succeeded.discard(call_id)
        result: Any = None
        span = self._span(self.tool_name) if self._span else _NO_SPAN
        with span, calling(call_id) as call:
            self._stats.begin_call(call.began_at)
            try:
                result = await self._run_with_timeout(tool_use, invocation_state, call, **kwargs)
            except InterruptException:
                raise
            except Exception as e:  # a tool may raise anything; Strands turns it into the same result, and fires hooks
                self._count_result(call, error_result(call_id, f"Error: {error_message(e)}"), e)
                raise
            finally:
                self._stats.end_call(call.began_at, time.monotonic())
        self._count_result(call, result, getattr(result, "exception", None))
        if result is not None:
            yield result

    async def _run_with_timeout(
        self, tool_use: ToolUse, invocation_state: dict[str, Any], call: RunningCall, **kwargs: object
    ) -> Any:  # noqa: ANN401
        """Return the tool's last event; after a timeout, count the timeout and return an error result."""
        task = start_task(self._last_event(tool_use, invocation_state, **kwargs))
        try:
            if not task.done():
                await asyncio.wait({task}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            await _abandon(task)
            if task.done() and not task.cancelled():  # the call has ended, so a resumed episode must not run it again
                error = task.exception()
                result = task.result() if error is None else error_result(call.id, f"Error: {error_message(error)}")
                self._count_result(call, result, error or getattr(result, "exception", None))
            raise
        if not task.done():
            await _abandon(task)
            self._stats.timeouts += 1
            call.timed_out = True
            text = f"Error: the tool did not finish within {self._timeout_s:g} seconds."
            return error_result(tool_use["toolUseId"], text)
        return task.result()

    async def _last_event(self, tool_use: ToolUse, invocation_state: dict[str, Any], **kwargs: object) -> Any:  # noqa: ANN401
        last = None
        with exits_as_errors("the tool"):
            async for event in self._tool.stream(self._inner_use(tool_use), invocation_state, **kwargs):
                last = event
            return _plain_event(last, tool_use["toolUseId"])

    def _count_result(self, call: RunningCall, event: object, error: BaseException | None) -> None:
        # an agent run by the tool may have read a fault as an ordinary tool result; `call.faults` has such faults
        fault = sandbox_fault(error) or next(iter(call.faults), None)
        if fault is not None and self._stats.infrastructure_error is None:
            self._stats.infrastructure_error = fault
        result = getattr(event, "tool_result", event)
        if isinstance(result, dict):
            self._stats.calls.append(self._call_entry(call, result.get("status")))
            if result.get("status") == "error":
                self._stats.errors += 1
            else:
                self._stats.succeeded.add(call.id)
            if fault is None:  # otherwise the policy never reads the result, and a resumed episode runs the call again
                self._stats.finished[call.id] = result
                if self._stats.on_call_end is not None:
                    self._stats.on_call_end()

    def _call_entry(self, call: RunningCall, status: object) -> dict[str, Any]:
        ended = "timeout" if call.timed_out else "error" if status == "error" else "success"
        seconds = time.monotonic() - call.began_at
        at_s = self._stats.control.step_start_s(seconds)
        entry = {"id": call.id, "tool": self.tool_name, "status": ended, "s": seconds, "at_s": at_s}
        return {**entry, "sandbox": call.sandbox} if call.sandbox else entry


async def _abandon(task: asyncio.Task[Any]) -> None:
    """Cancel a tool and wait up to `CLEANUP_TIMEOUT_S` for its cleanup, which otherwise continues in the background."""
    task.cancel()
    _ABANDONED.add(task)
    task.add_done_callback(_discard_task)
    await asyncio.wait({task}, timeout=CLEANUP_TIMEOUT_S)


def _discard_task(task: asyncio.Task[Any]) -> None:
    _ABANDONED.discard(task)
    if not task.cancelled():
        task.exception()  # asyncio logs exceptions that are never retrieved


# asyncio holds tasks weakly: without a reference, a task may be collected before its cleanup ends
_ABANDONED: Final[set[asyncio.Task[Any]]] = set()


def sandbox_fault(error: BaseException | None) -> SandboxError | UnplayableAgentError | None:
    """Return the infrastructure fault in an exception's chain of causes; None if there is no such fault.

    Tools such as Strands' python_repl wrap exceptions that they catch.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, SandboxError | UnplayableAgentError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _plain_event(event: object, call_id: str) -> Any:  # noqa: ANN401
    if event is None or isinstance(event, ToolInterruptEvent):
        return event
    if isinstance(event, ToolResultEvent):
        return ToolResultEvent(
            cast("ToolResult", normalize_tool_result(event.tool_result, call_id)), exception=event.exception
        )
    return normalize_tool_result(event, call_id)


def _with_own_thread(tool: AgentTool) -> AgentTool:
    if isinstance(tool, DecoratedFunctionTool):
        function = tool._tool_func
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            return tool
        in_thread = in_own_thread(function, name="the tool")
        return DecoratedFunctionTool(tool.tool_name, tool.tool_spec, in_thread, tool._metadata)
    if isinstance(tool, PythonAgentTool):
        function = tool._tool_func
        if not inspect.iscoroutinefunction(function):
            call_in_thread = in_own_thread(cast("Callable[..., Any]", function), name="the tool")
            return PythonAgentTool(tool.tool_name, tool.tool_spec, cast("Callable[..., ToolResult]", call_in_thread))
    return tool


class TurnToolExecutor(ConcurrentToolExecutor):
    """Strands tool executor that runs a turn's only call in the current task, and several calls concurrently."""

    def __init__(self) -> None:
        self._in_place = SequentialToolExecutor()

    async def _execute(self, agent: Agent, tool_uses: list[ToolUse], *rest: Any) -> AsyncGenerator[Any, None]:  # noqa: ANN401 - Strands' arguments
        execute = self._in_place._execute if len(tool_uses) == 1 else super()._execute
        async for event in execute(agent, tool_uses, *rest):
            yield event
