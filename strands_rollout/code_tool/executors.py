"""Executors of model-written Python: the protocol `CodeExecutor`, its result, and executors by name.

An executor that a setting names is made once per process and set of options, and shared. Backends are known by their
dotted paths alone; none is imported before it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import difflib
import inspect
import json
import math
import os
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self, cast, runtime_checkable

from strands_rollout.control import current_call
from strands_rollout.errors import ConfigError, SandboxError, ToolError
from strands_rollout.user_code import resolve


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The output of one piece of code, and how it ended.

    Attributes:
        stdout: Decoded as UTF-8 (bad bytes become U+FFFD), head and tail kept when `truncated`.
        stderr: As `stdout`; tracebacks name only the code's own frames.
        exit_code: The process's exit status, -N when signal N ended it, None when it never started. In a session, where
            the process lives on, 1 after an uncaught exception, else 0 or what `sys.exit` was given.
        timed_out: The time limit ended it; `stdout` and `stderr` hold what was written until then.
        truncated: At least one stream was longer than the backend keeps; a marker says how much was dropped.
        duration_s: Seconds from the first instruction of the code to the end of the process.
        killed_by: What ended it from outside ("time limit of 30 s", "SIGSEGV (crash)"), else None.
        infra_error: A fault of the executor itself, else None. The code is not to blame for it, and no model
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
    """The offers of an executor, for the tool's description; None where it does not know.

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
            SandboxError: The executor has been closed.
        """
        ...

    async def close_session(self, session: str) -> None:
        """End a session's interpreter and delete its files; nothing happens where there is no such session."""
        del session  # what keeps no sessions has none to end

    async def aclose(self) -> None:
        """Wait for what runs, or end it, and release everything; `run` is refused afterwards. Safe to call twice."""
        ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


def facts_of(executor: CodeExecutor) -> ExecutorFacts:
    """Return the executor's own `facts`, or none where it has none."""
    facts = getattr(executor, "facts", None)
    return facts if isinstance(facts, ExecutorFacts) else ExecutorFacts()


def executor_fault(reason: str) -> SandboxError:
    """The error for an `infra_error`, also noted for the tool call that runs here, in case a tool catches it."""
    fault, call = SandboxError(f"the code executor failed: {reason}"), current_call()
    if call is not None:
        call.faults.append(fault)
    return fault


def check_call(executor: str, code: object, timeout_s: float, session: str | None, *, keeps_sessions: bool) -> None:
    """Refuse a call that no backend could run."""
    if not isinstance(code, str):
        raise ConfigError(f"{executor}.run got code of type {type(code).__name__}: {code!r:.80}; expected a string")
    check_positive(timeout_s=timeout_s)
    if session is not None and not keeps_sessions:
        raise ConfigError(f"{executor} keeps no sessions: got session={session!r}, expected None")
    if session is not None and (not isinstance(session, str) or not session):
        raise ConfigError(f"{executor}.run got session={session!r}; expected a name, or None")


def check_positive(**values: object) -> None:
    """Refuse what is not a positive, finite number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} is {value!r}; expected a positive, finite number")


def infra_failure(reason: object, *, session_lost: bool = False) -> ExecutionResult:
    """The result of a call that the executor itself failed."""
    return ExecutionResult("", "", None, infra_error=str(reason), session_lost=session_lost)


async def retried_once(attempt: Callable[[], Awaitable[ExecutionResult]]) -> ExecutionResult:
    """Run a stateless call, and once more if the executor itself failed."""
    result = await attempt()
    return await attempt() if result.infra_error is not None else result


class StatelessExecutor(CodeExecutor):
    """The base of backends without sessions: each says in `_run` how a call that has been checked is run."""

    def __init__(self, timeout_s: float, max_output_chars: int, facts: ExecutorFacts, **limits: float) -> None:
        check_positive(timeout_s=timeout_s, max_output_chars=max_output_chars, **limits)
        self._timeout_s = timeout_s
        self._max_output_chars = max_output_chars
        self.facts = facts

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        """Run code in a fresh interpreter; see `CodeExecutor.run`."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        check_call(type(self).__name__, code, limit_s, session, keeps_sessions=False)
        return await self._run(code, limit_s)

    async def _run(self, code: str, timeout_s: float) -> ExecutionResult:
        raise NotImplementedError


EXECUTORS: Final = {
    "local": "strands_rollout.code_tool.LocalExecutor",
    "subprocess": "strands_rollout.code_tool.SubprocessExecutor",
    "sandbox_fusion": "strands_rollout.code_tool.SandboxFusionExecutor",
    "camel": "strands_rollout.code_tool.CamelExecutor",
    "strands": "strands_rollout.code_tool.StrandsSandboxExecutor",
}
_shared: dict[tuple[int, str], CodeExecutor] = {}


def shared_executor(setting: str | Mapping[str, Any]) -> CodeExecutor:
    """This process's executor for a setting; a forked process makes its own.

    Args:
        setting: A name of `EXECUTORS`, the dotted path of a class or function that makes an executor, or a mapping
            with such a `name`; its other keys are the arguments.

    Raises:
        ConfigError: There is no such executor, or it does not take these arguments.
    """
    key = (os.getpid(), json.dumps(setting, sort_keys=True, default=repr))
    if key not in _shared:
        return _shared.setdefault(key, make_executor(setting))  # two threads may make one; neither has started it yet
    return _shared[key]


def make_executor(setting: str | Mapping[str, Any]) -> CodeExecutor:
    """A new executor for a setting, which the caller closes; see `shared_executor`."""
    options = {"name": setting} if isinstance(setting, str) else dict(setting)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"got executor={setting!r}; expected a name, or a mapping with the key name and options")
    make = _executor_factory(name)
    try:
        bound = inspect.signature(make).bind(**options)
    except TypeError as e:
        shown = f"the options {', '.join(options)}" if options else "no options"  # their values may be secret
        known = list(inspect.signature(make).parameters)
        unknown = [name for name in options if name not in known]
        near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.4) if unknown else []
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known) or 'none'}"
        raise ConfigError(f"the executor {name!r} can't take {shown}: {e}; {hint}") from e
    executor = make(*bound.args, **bound.kwargs)
    if not isinstance(executor, CodeExecutor):
        raise ConfigError(f"the executor {name!r} made a {type(executor).__name__}, which is no CodeExecutor")
    return executor


def _executor_factory(name: str) -> Callable[..., object]:
    """Find what makes the executor of a name of `EXECUTORS`, or at a dotted path."""
    if name == "ray" or (name.startswith("strands_rollout.") and name.endswith("RayExecutor")):
        raise ConfigError(
            f"got the executor {name!r}, which was removed; set episode_workers instead, which spreads the "
            "episodes, and with them the code that they run, over the nodes of the Ray cluster"
        )
    path = EXECUTORS.get(name, name)
    if "." not in path:
        near = difflib.get_close_matches(name, EXECUTORS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(EXECUTORS)}, or a dotted path"
        raise ConfigError(f"got the unknown executor {name!r}; {hint}")
    try:
        found = resolve(path)
    except ToolError as e:
        raise ConfigError(str(e).replace("can't load", "can't load the executor", 1)) from e
    if not callable(found):
        raise ConfigError(f"the executor {name!r} is a {type(found).__name__}; expected a class or a function")
    return cast("Callable[..., object]", found)


CALL_OWNER: contextvars.ContextVar[str | None] = contextvars.ContextVar("strands_rollout_call_owner", default=None)
"""Whose call it is; set by the episode. Calls without an owner share one turn."""


_LOOK_S: Final = 1.0  # after which who waits for a place looks for those that nobody can give back


class FairQueue:
    """Places that are given to waiting owners in turn, and first come first served within an owner.

    An event loop may be closed with calls in flight, which never give their places back: those are taken back.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._lock = threading.Lock()
        self._holders: set[_Ticket] = set()
        self._waiting: OrderedDict[str | None, deque[_Ticket]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def place(self, on_lost: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
        """Hold a place; waits for one first.

        Args:
            on_lost: Called when places had to be taken back for this one, to end what still runs there.
        """
        loop = asyncio.get_running_loop()
        ticket = _Ticket(loop, loop.create_future())
        await self._take(ticket, on_lost)
        try:
            yield
        finally:
            self._give_back(ticket)

    async def _take(self, ticket: _Ticket, on_lost: Callable[[], None]) -> None:
        with self._lock:
            if self._free > 0:
                self._free -= 1
                self._holders.add(ticket)
                return
            self._waiting.setdefault(CALL_OWNER.get(), deque()).append(ticket)
        is_called = False
        try:
            self._take_back_lost(on_lost)
            while not ticket.called.done():
                await asyncio.wait([ticket.called], timeout=_LOOK_S)
                self._take_back_lost(on_lost)
            is_called = True
        finally:
            if not is_called:  # cancelled, or its loop is closed under it
                with self._lock:
                    ticket.abandoned = True
                self._give_back(ticket)

    def _take_back_lost(self, on_lost: Callable[[], None]) -> None:
        with self._lock:
            lost = [ticket for ticket in self._holders if ticket.loop.is_closed()]
        for ticket in lost:
            self._give_back(ticket)
        if lost:
            on_lost()

    def _give_back(self, ticket: _Ticket) -> None:
        """Hand the place that a ticket holds, if any, to the next owner's first ticket, or set it free."""
        with self._lock:
            if ticket not in self._holders:
                return
            self._holders.remove(ticket)
            following = self._next()
            if following is None:
                self._free += 1
                return
            self._holders.add(following)
        try:
            following.loop.call_soon_threadsafe(following.call)
        except RuntimeError:  # its loop was closed a moment ago
            self._give_back(following)

    def _next(self) -> _Ticket | None:
        while self._waiting:
            owner, tickets = self._waiting.popitem(last=False)
            ticket = tickets.popleft()
            if tickets:
                self._waiting[owner] = tickets  # at the end: the others come first
            if not ticket.abandoned and not ticket.loop.is_closed():
                return ticket
        return None


@dataclass(eq=False, slots=True)
class _Ticket:
    """One call that holds a place or waits for one, on the loop that it runs on."""

    loop: asyncio.AbstractEventLoop
    called: asyncio.Future[None]
    abandoned: bool = False

    def call(self) -> None:
        if not self.called.done():
            self.called.set_result(None)


def usable_cpus(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs that this process may use, and at least 2: its affinity, or its container's quota where that is less."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 2
    quota = _quota(cgroups)
    return max(2, min(cpus, math.ceil(quota)) if quota is not None else cpus)


def _quota(cgroups: Path) -> float | None:
    """CPUs' worth of time per period; None for no limit."""
    try:
        if (limit := cgroups / "cpu.max").exists():
            quota, period = limit.read_text().split()
        else:
            quota, period = (
                (cgroups / "cpu" / name).read_text().strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            )
        return int(quota) / int(period) if quota not in {"max", "-1"} else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
