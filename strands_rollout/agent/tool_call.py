"""Wraps a Strands tool for an episode: a wall-clock limit, and sync functions in threads of their own.

Strands runs a sync tool in the loop's default thread pool: a few that hang would block every other episode's tools,
and the interpreter's exit. Here each call has a daemon thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, cast

from strands.interrupt import InterruptException
from strands.tools.decorator import DecoratedFunctionTool
from strands.tools.tools import PythonAgentTool
from strands.types._events import ToolInterruptEvent, ToolResultEvent
from strands.types.tools import AgentTool, ToolGenerator, ToolResult, ToolSpec, ToolUse

from strands_rollout.control import Control, RunningCall, calling
from strands_rollout.errors import SandboxError, ToolError, UnplayableAgentError
from strands_rollout.exits import exits_as_errors
from strands_rollout.log_once import log_once
from strands_rollout.own_thread import in_own_thread
from strands_rollout.template.messages import error_result, error_words, plain_result

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ToolStats:
    """Counts and records of the tools of one episode.

    Attributes:
        control: That of the episode, for its clock.
        seconds: Wall-clock time in tools; parallel calls each count.
        waited_s: Wall-clock time in which at least one tool ran, of this agent alone.
        errors: Results with status error, time-outs and calls of unknown tools included.
        timeouts: Calls that were cut at the limit.
        infrastructure_error: The first failure of the sandbox itself, or of an agent that can't be played, which is
            never the policy's fault.
        finished: By tool-use id, results of the calls of the last turn, from this agent or an earlier one.
        succeeded: Ids of all calls whose last result was no error.
        unread: Ids of those from an earlier agent, as long as this one has not had them.
        calls: In the order of their ends: `id`, `tool`, `status` (success, error, timeout or unknown), `s` (seconds),
            `at_s` (when it began, in seconds since the episode did; None outside of one), and `sandbox` where the code
            tool ran: `RunningCall.sandbox`.
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
    on_end: Callable[[], object] | None = None  # called when a call has ended
    waited_s: float = 0.0
    _running: int = 0
    _since: float = 0.0

    def count_unknown(self, tool_use: ToolUse) -> None:
        """Count a call of a tool that the agent does not have."""
        self.errors += 1
        call = {"id": tool_use["toolUseId"], "tool": tool_use["name"], "status": "unknown"}
        self.calls.append({**call, "s": 0.0, "at_s": self.control.at_s(0.0)})

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of one call."""
        started = time.monotonic()
        if not self._running:
            self._since = started
        self._running += 1
        try:
            yield
        finally:
            now = time.monotonic()
            self._running -= 1
            self.seconds += now - started
            if not self._running:
                self.waited_s += now - self._since


CLEANUP_S: Final = 0.05

ToolSpan = Callable[[str], contextlib.AbstractContextManager[object]]
"""Entered around each call that is run, with the tool's name."""


_MAX_NAME_CHARS: Final = 64
_CALLABLE: Final = re.compile(rf"[a-zA-Z0-9_-]{{1,{_MAX_NAME_CHARS}}}")


def callable_names(names: Collection[str]) -> dict[str, str]:
    """Return for each name of a tool the one it can be called by: itself, or one without what Strands refuses.

    Strands shows a tool of any name to the model, and answers each call of one that has other characters than letters
    from a to z, digits, `_` and `-`, or more than 64 of them, with an error; MCP allows dots and 128.

    Raises:
        ToolError: A name has no such letter or digit.
    """
    found = {name: name for name in names if _CALLABLE.fullmatch(name)}
    taken = {name.replace("-", "_") for name in found}  # which Strands takes for one
    for name in names:
        if name in found:
            continue
        plain = re.sub(r"[^a-zA-Z0-9_-]", "_", name)
        if not plain.strip("_-"):
            raise ToolError(
                f"got a tool named {name!r}, which nobody can call: Strands takes letters from a to z, digits, _ and - "
                "alone. Give it another name, or leave it out (tool_filters of an MCP server)"
            )
        endings = ("", *(f"_{number}" for number in range(2, len(names) + 2)))
        options = (plain[: _MAX_NAME_CHARS - len(ending)] + ending for ending in endings)
        found[name] = next(option for option in options if option.replace("-", "_") not in taken)
        taken.add(found[name].replace("-", "_"))
        words = "the tool %r is called %r: Strands refuses calls of its own name"
        log_once(logger, logging.WARNING, words, name, found[name])
    return {name: found[name] for name in names}


class WrappedTool(AgentTool):
    """A tool in the place of another, whose name and specification it has.

    Args:
        tool: The other.
        name: Shown in place of its name; None for that.
    """

    def __init__(self, tool: AgentTool, name: str | None = None) -> None:
        super().__init__()
        self._tool = tool
        self._name = tool.tool_name if name is None else name

    @property
    def tool_name(self) -> str:
        """The name that is shown."""
        return self._name

    @property
    def tool_spec(self) -> ToolSpec:
        """The wrapped tool's specification, under the name that is shown."""
        spec = self._tool.tool_spec
        return spec if spec["name"] == self._name else {**spec, "name": self._name}

    def _own_use(self, tool_use: ToolUse) -> ToolUse:
        """A call as the wrapped tool knows it."""
        return tool_use if self._tool.tool_name == self._name else {**tool_use, "name": self._tool.tool_name}

    @property
    def tool_type(self) -> str:
        """The wrapped tool's type."""
        return self._tool.tool_type


class BoundedTool(WrappedTool):
    """The same tool under the same specification, bounded in time.

    Args:
        tool: Any Strands tool.
        timeout_s: Seconds after which the call is cancelled and answered with an error result; None for no limit.
        stats: Where this call is counted.
        span: Entered around each call.
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
        super().__init__(_threaded(tool), name)
        self._timeout_s = timeout_s
        self._stats = stats
        self._span = span

    @property
    def is_simple(self) -> bool:
        """True for a decorated function that sees its arguments alone, not the agent or the call's context."""
        if type(self._tool) is not DecoratedFunctionTool:  # a subclass may look at more
            return False
        metadata = self._tool._metadata
        return metadata._context_param is None and "agent" not in metadata.signature.parameters

    async def stream(self, tool_use: ToolUse, invocation_state: dict[str, Any], **kwargs: object) -> ToolGenerator:
        """Run the wrapped tool; a time-out becomes an error result that says so.

        A call that an earlier agent has finished is not run again. One that this agent has finished is, for a hook.
        """
        call_id = tool_use["toolUseId"]
        if call_id in self._stats.unread:
            self._stats.unread.remove(call_id)
            yield self._stats.finished[call_id]
            return
        self._stats.finished.pop(call_id, None)
        self._stats.succeeded.discard(call_id)
        result: Any = None
        span = self._span(self.tool_name) if self._span else contextlib.nullcontext()
        with self._stats.running(), span, calling(call_id) as call:
            try:
                result = await self._bounded(tool_use, invocation_state, call, **kwargs)
            except InterruptException:
                raise
            except Exception as e:  # whatever a tool raises; Strands makes this result of it too, and tells the hooks
                self._count(call, error_result(call_id, f"Error: {error_words(e)}"), e)
                raise
        self._count(call, result, getattr(result, "exception", None))
        if result is not None:
            yield result

    async def _bounded(
        self, tool_use: ToolUse, invocation_state: dict[str, Any], call: RunningCall, **kwargs: object
    ) -> Any:  # noqa: ANN401
        """Return the tool's last event; neither a time-out nor an abort waits for a tool that does not end in time."""
        task = asyncio.ensure_future(self._drained(tool_use, invocation_state, **kwargs))
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            await _abandon(task)
            if task.done() and not task.cancelled():  # it must not be run again
                error = task.exception()
                result = task.result() if error is None else error_result(call.id, f"Error: {error_words(error)}")
                self._count(call, result, error or getattr(result, "exception", None))
            raise
        if not done:
            await _abandon(task)
            self._stats.timeouts += 1
            call.timed_out = True
            words = f"Error: the tool did not finish within {self._timeout_s:g} seconds."
            return error_result(tool_use["toolUseId"], words)
        return task.result()

    async def _drained(self, tool_use: ToolUse, invocation_state: dict[str, Any], **kwargs: object) -> Any:  # noqa: ANN401
        last = None
        with exits_as_errors("the tool"):
            async for event in self._tool.stream(self._own_use(tool_use), invocation_state, **kwargs):
                last = event
            return _plain(last, tool_use["toolUseId"])

    def _count(self, call: RunningCall, event: object, error: BaseException | None) -> None:
        fault = sandbox_fault(error) or next(iter(call.faults), None)  # of an agent that it asked, who has read of it
        if fault is not None and self._stats.infrastructure_error is None:
            self._stats.infrastructure_error = fault
        result = getattr(event, "tool_result", event)
        if isinstance(result, dict):
            self._stats.calls.append(self._record(call, result.get("status")))
            if result.get("status") == "error":
                self._stats.errors += 1
            else:
                self._stats.succeeded.add(call.id)
            if fault is None:  # a call that the sandbox failed has not ended, and the policy must not read of it
                self._stats.finished[call.id] = result
                if self._stats.on_end is not None:
                    self._stats.on_end()

    def _record(self, call: RunningCall, status: object) -> dict[str, Any]:
        """Return the record of a call that has ended, as plain JSON."""
        ended = "timeout" if call.timed_out else "error" if status == "error" else "success"
        seconds = time.monotonic() - call.began_at
        at_s = self._stats.control.at_s(seconds)
        record = {"id": call.id, "tool": self.tool_name, "status": ended, "s": seconds, "at_s": at_s}
        return {**record, "sandbox": call.sandbox} if call.sandbox else record


async def _abandon(task: asyncio.Task[Any]) -> None:
    """Cancel a tool and give it a moment to clean up; one that takes longer does so unwatched."""
    task.cancel()
    _ABANDONED.add(task)
    task.add_done_callback(_forget)
    await asyncio.wait({task}, timeout=CLEANUP_S)


def _forget(task: asyncio.Task[Any]) -> None:
    _ABANDONED.discard(task)
    if not task.cancelled():
        task.exception()  # retrieved, or asyncio logs it


# a task that nothing refers to may vanish before it has cleaned up
_ABANDONED: Final[set[asyncio.Task[Any]]] = set()


def sandbox_fault(error: BaseException | None) -> SandboxError | UnplayableAgentError | None:
    """Return the setup's own failure behind a tool's exception; tools wrap what they catch (Strands' python_repl)."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, SandboxError | UnplayableAgentError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _plain(event: object, call_id: str) -> Any:  # noqa: ANN401
    """A tool's last event with a plain result; None of a tool that gave nothing."""
    if event is None or isinstance(event, ToolInterruptEvent):
        return event
    if isinstance(event, ToolResultEvent):
        return ToolResultEvent(cast("ToolResult", plain_result(event.tool_result, call_id)), exception=event.exception)
    return plain_result(event, call_id)


def _threaded(tool: AgentTool) -> AgentTool:
    """A tool whose sync function, if it has one, runs in a thread of its own."""
    if isinstance(tool, DecoratedFunctionTool):
        function = tool._tool_func
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            return tool
        return DecoratedFunctionTool(tool.tool_name, tool.tool_spec, in_own_thread(function), tool._metadata)
    if isinstance(tool, PythonAgentTool):
        function = tool._tool_func
        if not inspect.iscoroutinefunction(function):
            in_thread = cast("Callable[..., ToolResult]", in_own_thread(cast("Callable[..., Any]", function)))
            return PythonAgentTool(tool.tool_name, tool.tool_spec, in_thread)
    return tool
