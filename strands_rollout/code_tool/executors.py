"""The protocol `CodeExecutor` and its result, executors made from settings, a fair queue, and the usable CPUs.

A process makes one executor for each setting (a name and options), and all episodes share it. Backends are registered
by dotted path and imported on first use.
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
        stdout: Standard output, decoded as UTF-8 (bad bytes become U+FFFD); if it is too long, only its beginning and
            its end.
        stderr: Standard error, decoded and cut like `stdout`; tracebacks show only the code's own frames.
        exit_code: The exit status of the process; -N if signal N ended it; None if there is an `infra_error`. In a
            session, whose process continues after the code: 1 after an uncaught exception, otherwise 0 or the status
            passed to `sys.exit`.
        timed_out: The time limit ended the code; `stdout` and `stderr` hold the output that the backend received
            until then.
        truncated: At least one stream exceeded the backend's limit; a marker says how much was dropped.
        duration_s: Seconds from the first instruction of the code to its end.
        killed_by: What ended the code from outside, such as a limit or a signal ("time limit of 30 s", "SIGSEGV
            (crash)"); None if the code ended by itself, or if there is an `infra_error`.
        infra_error: Fault of the executor itself, else None. The code did not cause it, and it must not be shown to
            the model.
        queued_s: Seconds that the call waited before its code started, mainly for a free slot.
        session_lost: True if the session's interpreter ended before or during this call. Its variables and files are
            gone; this call or the next one gets a fresh interpreter.
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
    """An executor's capabilities; None means unknown.

    The code tool's description states `libraries`, `memory_mb` and `isolated` if they are known.

    Attributes:
        libraries: Libraries that can be imported besides the standard library.
        memory_mb: Memory limit of one call in mebibytes.
        isolated: The code can neither use the network nor start other programs; False also if that is unknown.
        keeps_sessions: `run` accepts the name of a session.
    """

    libraries: tuple[str, ...] | None = None
    memory_mb: int | None = None
    isolated: bool = False
    keeps_sessions: bool = False


@runtime_checkable
class CodeExecutor(Protocol):
    """Protocol of backends that run Python code for agents. Any tasks, threads and event loops may share a backend.

    A backend guarantees the following, unless its own documentation says otherwise (see `CamelExecutor`):

    - `run` never blocks the event loop, and cancelling `run` ends the code.
    - Whatever the code does, `run` returns an `ExecutionResult` and raises no exception.
    - stdin is empty. Of the caller's environment variables, the code sees at most those for the locale and for the
      folders of shared libraries.
    - Before the backend reports a failure of its own, it repeats the call if that is safe.

    A backend may have an attribute `facts`, an `ExecutorFacts`. Without it, the tool's description omits libraries,
    memory and isolation. A backend may also have an async method `start`, which is awaited before each episode. If
    every call would fail, `start` raises the error.
    """

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        """Run code to its end or to the time limit.

        Args:
            code: Source of a Python module. If it ends with an expression, the value is printed, unless it is None.
            timeout_s: Wall-clock limit in seconds from the first instruction; None for the backend's default.
            session: Name of an interpreter that keeps its variables between calls; None for a fresh interpreter.

        Raises:
            ConfigError: `code` is not a string; `timeout_s` is not a positive, finite number; `session` is not a name;
                or a `session` is given to a backend without sessions.
            SandboxError: The executor has been closed, or can't be started.
        """
        ...

    async def close_session(self, session: str) -> None:
        """End a session's interpreter and delete its files; do nothing if there is no such session."""
        del session  # the default is for backends without sessions

    async def aclose(self) -> None:
        """Wait for running calls or end them, and release all resources; later calls of `run` fail. Safe to repeat."""
        ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


def facts_of(executor: CodeExecutor) -> ExecutorFacts:
    """Return the executor's `facts`, or an empty `ExecutorFacts` if it has none."""
    facts = getattr(executor, "facts", None)
    return facts if isinstance(facts, ExecutorFacts) else ExecutorFacts()


def record_executor_fault(reason: str) -> SandboxError:
    """Return the error to raise for the `infra_error` in `reason`.

    The error is also recorded on the current tool call, in case other code catches it.
    """
    fault, call = SandboxError(f"the code executor failed: {reason}"), current_call()
    if call is not None:
        call.faults.append(fault)
    return fault


def check_run_arguments(
    executor: str, code: object, timeout_s: float, session: str | None, *, keeps_sessions: bool
) -> None:
    """Raise ConfigError for arguments that the executor's `run` does not accept."""
    if not isinstance(code, str):
        raise ConfigError(f"{executor}.run got code of type {type(code).__name__}: {code!r:.80}; expected a string")
    check_positive(timeout_s=timeout_s)
    if session is not None and not keeps_sessions:
        raise ConfigError(f"{executor} keeps no sessions: got session={session!r}, expected None")
    if session is not None and (not isinstance(session, str) or not session):
        raise ConfigError(f"{executor}.run got session={session!r}; expected a name, or None")


def check_positive(**values: object) -> None:
    """Raise ConfigError for a value that is not a positive, finite number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} is {value!r}; expected a positive, finite number")


def infra_failure(reason: object, *, session_lost: bool = False) -> ExecutionResult:
    """Return the result of a call in which the executor itself failed."""
    return ExecutionResult("", "", None, infra_error=str(reason), session_lost=session_lost)


async def run_with_one_retry(attempt: Callable[[], Awaitable[ExecutionResult]]) -> ExecutionResult:
    """Run a stateless call, and repeat it once if the executor itself failed."""
    result = await attempt()
    return await attempt() if result.infra_error is not None else result


class StatelessExecutor(CodeExecutor):
    """Base class of backends without sessions; a subclass implements `_run`, which gets checked arguments."""

    def __init__(self, timeout_s: float, max_output_chars: int, facts: ExecutorFacts, **limits: float) -> None:
        check_positive(timeout_s=timeout_s, max_output_chars=max_output_chars, **limits)
        self._timeout_s = timeout_s
        self._max_output_chars = max_output_chars
        self.facts = facts

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        """Run code in a fresh interpreter; see `CodeExecutor.run`."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        check_run_arguments(type(self).__name__, code, limit_s, session, keeps_sessions=False)
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
    """Return this process's executor for a setting, making it on first use; a forked process makes its own.

    Args:
        setting: A name from `EXECUTORS`, the dotted path of a class or function that makes an executor, or a mapping.
            The mapping's key `name` holds such a name or path; its other keys are the arguments.

    Raises:
        ConfigError: `setting` names no executor; the named class or function does not exist, or does not accept the
            arguments; or its result is not a `CodeExecutor`.
    """
    key = (os.getpid(), json.dumps(setting, sort_keys=True, default=repr))
    if key not in _shared:
        # two threads may both make an executor here; the one that is not kept needs no `aclose`: it was never started
        return _shared.setdefault(key, make_executor(setting))
    return _shared[key]


def make_executor(setting: str | Mapping[str, Any]) -> CodeExecutor:
    """Make a new executor for a setting; the caller closes it. See `shared_executor` for `setting` and errors."""
    options = {"name": setting} if isinstance(setting, str) else dict(setting)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(
            f"got executor={setting!r}; expected a name, or a mapping with the key 'name' and the options"
        )
    make = _resolve_factory(name)
    try:
        bound = inspect.signature(make).bind(**options)
    except TypeError as e:
        got = f"the options {', '.join(options)}" if options else "no options"  # names only: values may be secret
        known = list(inspect.signature(make).parameters)
        unknown = [name for name in options if name not in known]
        near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.4) if unknown else []
        hint = f"did you mean {near[0]!r}?" if near else f"its options: {', '.join(known) or 'none'}"
        raise ConfigError(f"the executor {name!r} got {got}: {e}; {hint}") from e
    executor = make(*bound.args, **bound.kwargs)
    if not isinstance(executor, CodeExecutor):
        raise ConfigError(f"the executor {name!r} made a {type(executor).__name__}; expected a CodeExecutor")
    return executor


def _resolve_factory(name: str) -> Callable[..., object]:
    if name == "ray" or (name.startswith("strands_rollout.") and name.endswith("RayExecutor")):
        raise ConfigError(
            f"the executor {name!r} was removed; set episode_workers instead: it spreads the episodes and the code "
            "that they run over the nodes of the Ray cluster"
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
"""Owner of the current call: `FairQueue` serves the owners in turn. Each episode sets an owner of its own.

All calls without an owner count as calls of one owner.
"""


_RECLAIM_INTERVAL_S: Final = 1.0  # how often a waiting call looks for slots of closed event loops


class FairQueue:
    """A semaphore whose slots go to the owners of waiting calls (`CALL_OWNER`) in turn.

    Calls of one owner get slots in the order in which they arrived.

    An event loop may be closed with calls in flight, which then never release their slots. Waiting calls reclaim these
    slots.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._lock = threading.Lock()
        self._holders: set[_Ticket] = set()
        self._waiting: OrderedDict[str | None, deque[_Ticket]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def slot(self, on_reclaim: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
        """Wait for a slot, and hold it while the context is open.

        Args:
            on_reclaim: Called after slots of closed event loops were reclaimed, to end the code of the calls that held
                these slots.
        """
        loop = asyncio.get_running_loop()
        ticket = _Ticket(loop, loop.create_future())
        await self._acquire(ticket, on_reclaim)
        try:
            yield
        finally:
            self._release(ticket)

    async def _acquire(self, ticket: _Ticket, on_reclaim: Callable[[], None]) -> None:
        with self._lock:
            if self._free > 0:
                self._free -= 1
                self._holders.add(ticket)
                return
            self._waiting.setdefault(CALL_OWNER.get(), deque()).append(ticket)
        is_granted = False
        try:
            self._reclaim_lost(on_reclaim)
            while not ticket.granted.done():
                await asyncio.wait([ticket.granted], timeout=_RECLAIM_INTERVAL_S)
                self._reclaim_lost(on_reclaim)
            is_granted = True
        finally:
            if not is_granted:  # cancelled, or the loop was closed while the call waited
                with self._lock:
                    ticket.abandoned = True
                self._release(ticket)

    def _reclaim_lost(self, on_reclaim: Callable[[], None]) -> None:
        with self._lock:
            lost = [ticket for ticket in self._holders if ticket.loop.is_closed()]
        for ticket in lost:
            self._release(ticket)
        if lost:
            on_reclaim()

    def _release(self, ticket: _Ticket) -> None:
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
            following.loop.call_soon_threadsafe(following.grant)
        except RuntimeError:  # the loop was closed after `_next` looked at it
            self._release(following)

    def _next(self) -> _Ticket | None:
        while self._waiting:
            owner, tickets = self._waiting.popitem(last=False)
            ticket = tickets.popleft()
            if tickets:
                self._waiting[owner] = tickets  # at the end of the order: other owners come first
            if not ticket.abandoned and not ticket.loop.is_closed():
                return ticket
        return None


@dataclass(eq=False, slots=True)
class _Ticket:
    """One call that holds a slot or waits for one, with the call's event loop."""

    loop: asyncio.AbstractEventLoop
    granted: asyncio.Future[None]
    abandoned: bool = False

    def grant(self) -> None:
        if not self.granted.done():
            self.granted.set_result(None)


def usable_cpus(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of CPUs that this process may use, by its affinity and its container's quota; at least 2."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 2
    quota = _cpu_quota(cgroups)
    return max(2, min(cpus, math.ceil(quota)) if quota is not None else cpus)


def _cpu_quota(cgroups: Path) -> float | None:
    """Return the quota of the container's cgroup (v2, else v1) in CPUs; None if there is none or it can't be read."""
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
