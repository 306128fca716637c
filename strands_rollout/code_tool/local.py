"""The default backend: code runs on this machine, confined by the kernel, in forks of a warm process."""

import asyncio
import contextlib
import importlib.util
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Self

from strands_rollout.code_tool import executors
from strands_rollout.code_tool.executors import CodeExecutor, ExecutionResult, ExecutorFacts
from strands_rollout.code_tool.supervisor_link import (
    LAYERS,
    Isolation,
    SandboxProcesses,
    SandboxReport,
    SupervisorGoneError,
)
from strands_rollout.errors import ConfigError, SandboxError

_EXTRA = re.compile(r";.*\bextra\b")
_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


def library_files(names: Iterable[str]) -> dict[str, list[str]]:
    """What must be readable for these distributions or modules and all that they require: folder -> names in it."""
    found: dict[str, set[str]] = {}
    seen: set[str] = set()
    pending = [_distribution(name) for name in names]
    while pending:
        distribution = pending.pop()
        if distribution.name in seen:
            continue
        seen.add(distribution.name)
        for folder, entry in _entries(distribution):
            found.setdefault(folder, set()).add(entry)
        for requirement in distribution.requires or ():
            name = _NAME.match(requirement)
            if name is not None and not _EXTRA.search(requirement):
                with contextlib.suppress(metadata.PackageNotFoundError):  # its marker is for another platform or Python
                    pending.append(metadata.distribution(name[1]))
    return {folder: sorted(entries) for folder, entries in sorted(found.items())}


def _distribution(name: str) -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        pass
    owners = metadata.packages_distributions().get(name)
    if not owners:
        raise ConfigError(
            f"libraries names {name!r}, which is not installed for this Python; install it (pip install {name}) or "
            "take it off the list"
        )
    return metadata.distribution(owners[0])


def _entries(distribution: metadata.Distribution) -> Iterator[tuple[str, str]]:
    """The top-level entries of a distribution: (folder, name)."""
    for file in distribution.files or ():
        if not file.is_absolute() and ".." not in file.parts and file.parts[:1] not in {(), ("__pycache__",)}:
            yield str(distribution.locate_file("")), file.parts[0]
    # its modules are asked for as well: a distribution of the operating system's has no list of files, and an editable
    # one lists only the file that leads to its sources
    listed = distribution.read_text("top_level.txt")
    modules = listed.split() if listed is not None else [distribution.name.replace("-", "_")]
    for module in filter(str.isidentifier, modules):
        spec = importlib.util.find_spec(module)
        places = [] if spec is None else spec.submodule_search_locations or [spec.origin or ""]
        for path in map(Path, places):
            if path.exists():
                yield str(path.parent), path.name


logger = logging.getLogger(__name__)

_GRACE_S: Final = 90.0  # on top of the code's own limit, before a silent supervisor counts as dead
_CPU_LIMIT_S: Final = 24 * 3600
_MAX_SPARES: Final = 8
_MAX_CODE_CHARS: Final = 16_000_000


class LocalExecutor(CodeExecutor):
    """Runs each piece of code in its own confined process on this machine.

    A supervisor process is started at the first call (or by `start`); it keeps a fork server with numpy and sympy in
    memory and forks it for each call. Code gets: a clean environment, an empty stdin, a directory of its own, and
    limits on time, memory, disk, files, threads and output. It can't: write other files, or read others than Python's
    own, the libraries' and shared objects; use the network; start programs or processes; signal others; raise its
    limits. What the kernel enforces is tried in a real child at the start, and where that is less than `isolation` asks
    for, nothing is run. Kernel exploits are not covered: for code that attacks on purpose, use a remote backend.

    A supervisor that dies is replaced; a stateless call that it took along is run once more.

    Args:
        timeout_s: Default limit in wall-clock seconds; a call may name its own.
        memory_mb: Address space of a process in mebibytes.
        disk_mb: Mebibytes that a process may have on disk, and in one file.
        max_files: Files and directories that it may have.
        max_threads: Threads that it may have.
        max_output_chars: Characters kept of stdout and of stderr: half from the head, half from the tail.
        max_output_mb: A process that writes more mebibytes than this is killed.
        max_concurrency: Calls that run at once, the others wait in turn; None for the number of usable CPUs.
        libraries: What can be imported besides the standard library, with what that requires; names of distributions
            or modules. Imported at the start.
        isolation: The least that is accepted: "full"; "files", without a list of system calls; "seccomp", without
            confinement of files; "rlimits", limits alone. All that the machine offers is enforced in any case.
        programs: Whether code may start the machine's programs, such as a shell, which "full" and "seccomp" refuse.
            Files, sockets and other runs stay out of their reach; `memory_mb` is each program's.
        scratch_dir: Where the directories of the code are made; None for the temporary directory.
        disabled_layers: Layers to leave out, as if the kernel had none: "user", "files", "landlock", "chroot",
            "syscalls"; for finding faults and for tests.

    Raises:
        ConfigError: An argument can't be used.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 60.0,
        memory_mb: int = 4096,
        disk_mb: int = 256,
        max_files: int = 4096,
        max_threads: int = 64,
        max_output_chars: int = 20_000,
        max_output_mb: int = 64,
        max_concurrency: int | None = None,
        libraries: Sequence[str] = ("numpy", "sympy"),
        isolation: Isolation = "full",
        programs: bool = False,
        scratch_dir: str | None = None,
        disabled_layers: Collection[str] = (),
    ) -> None:
        self._limits = {
            "timeout_s": timeout_s,
            "memory_mb": memory_mb,
            "disk_mb": disk_mb,
            "max_files": max_files,
            "max_threads": max_threads,
            "max_output_chars": max_output_chars,
            "max_output_mb": max_output_mb,
            "max_concurrency": executors.usable_cpus() if max_concurrency is None else max_concurrency,
        }
        _check_settings(self._limits, isolation, libraries)
        self._isolation = isolation
        self._libraries = tuple(libraries)
        self._scratch_dir = scratch_dir
        self._programs = programs
        self._disabled = tuple(disabled_layers)
        self._closed = False
        self._supervisor: SandboxProcesses | None = None
        self._finalizer: weakref.finalize[[], LocalExecutor] | None = None
        self._start_anew()
        isolated = "syscalls" in LAYERS[isolation] and "syscalls" not in self._disabled
        self.facts = ExecutorFacts(self._libraries, memory_mb, isolated, keeps_sessions=True)

    def _start_anew(self) -> None:
        """Reset queues and sessions: a fork inherits places that are taken, but not the calls that would free them."""
        self._pid = os.getpid()
        self._queue = executors.FairQueue(int(self._limits["max_concurrency"]))
        self._turns: dict[str, executors.FairQueue] = {}
        self._sessions: dict[str, SandboxProcesses] = {}
        self._starting: dict[asyncio.AbstractEventLoop, asyncio.Task[SandboxProcesses]] = {}
        self._lock = threading.Lock()

    def _turn(self, session: str | None) -> contextlib.AbstractAsyncContextManager[None]:
        """One call of a session at a time; those that wait hold no place."""
        return (
            contextlib.nullcontext()
            if session is None
            else self._turns.setdefault(session, executors.FairQueue(1)).place(self._cancel_unheard)
        )

    def _cancel_unheard(self) -> None:
        """End the code of calls whose event loop was closed before it ended."""
        supervisor = self._supervisor
        if supervisor is not None and supervisor.is_ours:
            supervisor.link.cancel_unheard()

    async def start(self) -> SandboxReport:
        """Start the supervisor, unless it runs, and return what it enforces.

        Raises:
            SandboxError: It can't be started, or would enforce less than `isolation`.
            ConfigError: A library is not installed.
        """
        return (await self._running()).report

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        """Run code; see `CodeExecutor.run`.

        Raises:
            ConfigError: An argument can't be used, or a library is not installed.
            SandboxError: The executor is closed, or the sandbox would enforce less than `isolation`.
        """
        limit_s = self._limits["timeout_s"] if timeout_s is None else timeout_s
        executors.check_call("LocalExecutor", code, limit_s, session, keeps_sessions=True)
        if len(code) > _MAX_CODE_CHARS:
            refusal = f"MemoryError: the code has {len(code)} characters; at most {_MAX_CODE_CHARS} can be run\n"
            return ExecutionResult("", refusal, 1)
        if self._pid != os.getpid():
            self._start_anew()
        asked = time.monotonic()
        async with self._turn(session), self._queue.place(self._cancel_unheard):
            queued_s = time.monotonic() - asked
            if session is None:
                result = await executors.retried_once(lambda: self._attempt(code, limit_s, None))
            else:  # what an earlier attempt has done in the session can't be undone
                result = await self._attempt(code, limit_s, session)
        return replace(result, queued_s=queued_s)

    async def close_session(self, session: str) -> None:
        """End a session's process and delete its files; nothing happens where there is no such session."""
        self._turns.pop(session, None)
        supervisor = self._sessions.pop(session, None)
        if supervisor is not None and supervisor.is_ours:
            with contextlib.suppress(SupervisorGoneError, TimeoutError):
                async with asyncio.timeout(_GRACE_S):
                    await supervisor.link.close_session(session)

    async def aclose(self) -> None:
        """End the supervisor and what it runs, delete all files. Safe to call twice."""
        self._closed = True

        def close() -> None:
            with self._lock:
                supervisor, self._supervisor = self._supervisor, None
            if supervisor is not None:
                supervisor.close()

        await asyncio.to_thread(close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def _attempt(self, code: str, timeout_s: float, session: str | None) -> ExecutionResult:
        supervisor = await self._running()
        if session is not None and self._sessions.setdefault(session, supervisor) is not supervisor:
            del self._sessions[session]
            reason = f"session {session!r} was lost with the supervisor process that kept it"
            return executors.infra_failure(reason, session_lost=True)
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                return ExecutionResult(**await supervisor.link.run(code, timeout_s, session))
        except TimeoutError:
            supervisor.link.kill()
            reason = f"the supervisor process did not answer within {timeout_s + _GRACE_S:g} s, and was ended"
        except SupervisorGoneError:
            reason = "the supervisor process ended"
        logger.warning("code sandbox failed reason=%r", reason)
        self._sessions.pop(session or "", None)
        return executors.infra_failure(reason, session_lost=session is not None)

    async def _running(self) -> SandboxProcesses:
        supervisor = self._supervisor
        if supervisor is not None and supervisor.is_ours and not self._closed:
            return supervisor
        # of a loop's few threads those who ask at once take one: others need them too
        loop = asyncio.get_running_loop()
        starting = self._starting.get(loop)
        if starting is None:
            starting = self._starting[loop] = loop.create_task(asyncio.to_thread(self._start))
            starting.add_done_callback(self._started)
        return await asyncio.shield(starting)

    def _started(self, starting: asyncio.Task[SandboxProcesses]) -> None:
        self._starting.pop(starting.get_loop(), None)
        if not starting.cancelled():
            starting.exception()  # the calls that waited may have been cancelled

    def _start(self) -> SandboxProcesses:
        with self._lock:
            if self._closed:
                raise SandboxError("LocalExecutor was used after aclose(); make a new executor")
            if self._supervisor is not None and self._supervisor.is_ours:
                return self._supervisor
            if self._supervisor is not None:
                self._supervisor.close()
            self._supervisor = None
            try:
                supervisor = SandboxProcesses(self._settings(), self._scratch_dir)
            except (OSError, RuntimeError) as e:  # no descriptors, processes, memory or threads left
                raise SandboxError(f"the code sandbox could not be started: {type(e).__name__}: {e}") from e
            with contextlib.ExitStack() as unless_accepted:
                unless_accepted.callback(supervisor.close)
                self._accept(supervisor.report)
                unless_accepted.pop_all()
            self._supervisor = supervisor
            self.facts = replace(self.facts, isolated="syscalls" in supervisor.report.enforced)
            if self._finalizer is not None:
                self._finalizer.detach()
            self._finalizer = weakref.finalize(self, supervisor.close)  # also at exit, if this was not closed
            return supervisor

    def _accept(self, report: SandboxReport) -> None:
        """Say what is enforced; refuse what is less than was asked for."""
        enforced = "; ".join(f"{layer}: {how}" for layer, how in report.enforced.items())
        missing = "; ".join(f"{layer}: {why}" for layer, why in report.missing.items()) or "nothing"
        lacking = [layer for layer in LAYERS[self._isolation] if layer in report.missing]
        if lacking:
            raise SandboxError(
                f"the code sandbox can't enforce isolation={self._isolation!r} on this machine. Missing: {missing}. "
                f"Enforced: {enforced}. To run code with less, name it: isolation={report.isolation!r}; or use another "
                "executor"
            )
        level = logging.WARNING if report.missing else logging.INFO
        logger.log(level, "code sandbox isolation=%s enforced=[%s] missing=[%s]", report.isolation, enforced, missing)

    def _settings(self) -> dict[str, Any]:
        limits = self._limits
        of_child = {"memory_mb": limits["memory_mb"], "file_mb": limits["disk_mb"]}
        fork_server = {
            "libraries": library_files(self._libraries),
            "preload": list(self._libraries),
            "disabled": list(self._disabled),
            "programs": self._programs,
            "limits": of_child | {"max_threads": limits["max_threads"], "cpu_s": _CPU_LIMIT_S},
        }
        spares = min(int(limits["max_concurrency"]), _MAX_SPARES)
        return {"limits": limits, "spares": spares, "fork_server": fork_server}


def _check_settings(limits: Mapping[str, float], isolation: object, libraries: object) -> None:
    executors.check_positive(**limits)
    for name, value in limits.items():
        if name != "timeout_s" and not isinstance(value, int):
            raise ConfigError(f"{name} is {value!r}; expected a whole number")
    if isolation not in LAYERS:
        raise ConfigError(f"isolation is {isolation!r}; expected one of {', '.join(LAYERS)}")
    if isinstance(libraries, str):
        raise ConfigError(f"libraries is the string {libraries!r}; expected a list of names: [{libraries!r}]")
