"""The default backend, which runs code on this machine in confined children of a fork server.

`library_files` finds the files that these children must read to import libraries.
"""

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

from strands_rollout.aio import shared_result
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

_EXTRA_MARKER = re.compile(r";.*\bextra\b")
_REQUIREMENT_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


def library_files(names: Iterable[str]) -> dict[str, list[str]]:
    """Find the files that code must read to import the distributions or modules in `names`, with their requirements.

    Returns:
        Folder -> names of files and folders in it.

    Raises:
        ConfigError: One of the `names` is not installed. Requirements that are not installed are skipped.
    """
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
            name = _REQUIREMENT_NAME.match(requirement)
            if name is not None and not _EXTRA_MARKER.search(requirement):
                with contextlib.suppress(metadata.PackageNotFoundError):  # required on another platform or Python
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
            f"libraries contains {name!r}, which is not installed for this Python; install it (pip install {name}) or "
            "remove it from the list"
        )
    return metadata.distribution(owners[0])


def _entries(distribution: metadata.Distribution) -> Iterator[tuple[str, str]]:
    """Yield the top-level files and folders of a distribution, as (parent folder, name)."""
    for file in distribution.files or ():
        if not file.is_absolute() and ".." not in file.parts and file.parts[:1] not in {(), ("__pycache__",)}:
            yield str(distribution.locate_file("")), file.parts[0]
    # also look up the modules: a distribution installed by the operating system has no list of files, and an
    # editable one lists only the .pth file
    listed = distribution.read_text("top_level.txt")
    modules = listed.split() if listed is not None else [distribution.name.replace("-", "_")]
    for module in filter(str.isidentifier, modules):
        spec = importlib.util.find_spec(module)
        locations = [] if spec is None else spec.submodule_search_locations or [spec.origin or ""]
        for path in map(Path, locations):
            if path.exists():
                yield str(path.parent), path.name


logger = logging.getLogger(__name__)

_ANSWER_GRACE_S: Final = 90.0  # after the code's time limit; a supervisor that has not answered by then counts as dead
_CPU_LIMIT_S: Final = 24 * 3600
_MAX_SPARES: Final = 8
_MAX_CODE_CHARS: Final = 16_000_000


class LocalExecutor(CodeExecutor):
    """Executor that runs code on this machine, in a confined process for each call or session.

    The first call (or `start`) starts a supervisor process and a fork server. The fork server keeps the libraries in
    memory, and forks a child for each call or session. Code gets a clean environment, an empty stdin, a directory of
    its own, and limits on time, memory, disk, files, threads and output.

    With `isolation` "full", the code can read only its own directory, the standard library, the `libraries`, shared
    objects, locales, time zones and a few devices such as /dev/null. It can write only to its directory and these
    devices. It can't use the network, start programs or processes, signal other processes or raise its limits.

    At the start, probes in a real child test what the kernel enforces. If the kernel enforces less than `isolation`
    demands, the start fails. Kernel exploits are not covered: for deliberately hostile code, use a remote backend.

    If the supervisor dies, it is replaced. A stateless call that was running is then repeated once. Sessions are lost,
    so a call in a session ends with an `infra_error`.

    Args:
        timeout_s: Default limit in wall-clock seconds; a call may set its own.
        memory_mb: Maximum address space of a process in mebibytes.
        disk_mb: Maximum disk space of a process's files, and maximum size of one file, in mebibytes.
        max_files: Maximum number of files and directories of a process.
        max_threads: Maximum number of threads of a process.
        max_output_chars: Characters kept of stdout and of stderr: half from the head, half from the tail.
        max_output_mb: Code that prints more mebibytes than this, on stdout and stderr together, is killed.
        max_concurrency: Maximum number of calls that run at once; further calls wait. None for the number of usable
            CPUs, at least 2.
        libraries: Modules that can be imported besides the standard library, with the requirements of their
            distributions. Imported at the start.
        isolation: Weakest mode that is accepted: "full" (all layers); "files" (all but the filter of system calls);
            "seccomp" (only the limits and the filter of system calls); or "rlimits" (only the limits). In every mode,
            all layers that the machine supports are enforced, except the `disabled_layers`.
        programs: Allow code to start the machine's programs, such as a shell; `isolation` must then be "files" or
            "rlimits". With "files", a program can't use the network or reach other runs, and it can read only programs,
            what they need, and the code's own files. `memory_mb` applies to each program separately.
        scratch_dir: Folder for the code's directories; None for the temporary directory (for root: /tmp, if other users
            can enter /tmp but not the temporary directory).
        disabled_layers: Layers to treat as missing in the kernel: "user", "files", "landlock", "chroot", "syscalls".
            For debugging and tests.

    Raises:
        ConfigError: An argument is invalid.
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
        self._reset_process_state()
        isolated = "syscalls" in LAYERS[isolation] and "syscalls" not in self._disabled
        self.facts = ExecutorFacts(self._libraries, memory_mb, isolated, keeps_sessions=True)

    def _reset_process_state(self) -> None:
        """Reset queues and sessions: a forked process inherits occupied slots, but no call that would free them."""
        self._pid = os.getpid()
        self._queue = executors.FairQueue(int(self._limits["max_concurrency"]))
        self._session_queues: dict[str, executors.FairQueue] = {}
        self._sessions: dict[str, SandboxProcesses] = {}
        self._starting: dict[asyncio.AbstractEventLoop, asyncio.Task[SandboxProcesses]] = {}
        self._lock = threading.Lock()

    def _session_slot(self, session: str | None) -> contextlib.AbstractAsyncContextManager[None]:
        return (
            contextlib.nullcontext()
            if session is None
            else self._session_queues.setdefault(session, executors.FairQueue(1)).slot(self._cancel_orphaned_calls)
        )

    def _cancel_orphaned_calls(self) -> None:
        supervisor = self._supervisor
        if supervisor is not None and supervisor.is_usable:
            supervisor.link.cancel_orphaned_calls()

    async def start(self) -> SandboxReport:
        """Start the supervisor if it is not running, and return a report of what it enforces.

        Raises:
            SandboxError: The supervisor can't be started, or would enforce less than `isolation`; or the executor is
                closed.
            ConfigError: A library is not installed.
        """
        return (await self._ensure_started()).report

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        """Run code; see `CodeExecutor.run`.

        Raises:
            ConfigError: An argument is invalid, or a library is not installed.
            SandboxError: The executor is closed, or the sandbox can't be started or would enforce less than
                `isolation`.
        """
        limit_s = self._limits["timeout_s"] if timeout_s is None else timeout_s
        executors.check_run_arguments("LocalExecutor", code, limit_s, session, keeps_sessions=True)
        if len(code) > _MAX_CODE_CHARS:
            refusal = f"MemoryError: the code has {len(code)} characters; at most {_MAX_CODE_CHARS} can be run\n"
            return ExecutionResult("", refusal, 1)
        if self._pid != os.getpid():
            self._reset_process_state()
        called_at = time.monotonic()
        # wait for the session first: meanwhile, the call must not occupy a slot of the queue
        async with self._session_slot(session), self._queue.slot(self._cancel_orphaned_calls):
            queued_s = time.monotonic() - called_at
            if session is None:
                result = await executors.run_with_one_retry(lambda: self._attempt(code, limit_s, None))
            else:  # not repeated: a failed attempt may have changed the session's state
                result = await self._attempt(code, limit_s, session)
        return replace(result, queued_s=queued_s)

    async def close_session(self, session: str) -> None:
        """End a session's process and delete its files; do nothing if there is no such session."""
        self._session_queues.pop(session, None)
        supervisor = self._sessions.pop(session, None)
        if supervisor is not None and supervisor.is_usable:
            with contextlib.suppress(SupervisorGoneError, TimeoutError):
                async with asyncio.timeout(_ANSWER_GRACE_S):
                    await supervisor.link.close_session(session)

    async def aclose(self) -> None:
        """End the supervisor and all code that it runs, and delete the code's files. Safe to call twice."""
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
        supervisor = await self._ensure_started()
        if session is not None and self._sessions.setdefault(session, supervisor) is not supervisor:
            del self._sessions[session]
            reason = f"session {session!r} was lost with the supervisor process that kept it"
            return executors.infra_failure(reason, session_lost=True)
        try:
            async with asyncio.timeout(timeout_s + _ANSWER_GRACE_S):
                return ExecutionResult(**await supervisor.link.run(code, timeout_s, session))
        except TimeoutError:
            supervisor.link.kill()
            reason = f"the supervisor process did not answer within {timeout_s + _ANSWER_GRACE_S:g} s and was killed"
        except SupervisorGoneError:
            reason = "the supervisor process ended"
        logger.warning("code sandbox failed reason=%r", reason)
        self._sessions.pop(session or "", None)
        return executors.infra_failure(reason, session_lost=session is not None)

    async def _ensure_started(self) -> SandboxProcesses:
        supervisor = self._supervisor
        if supervisor is not None and supervisor.is_usable and not self._closed:
            return supervisor
        # calls that arrive together share one task: otherwise, they could occupy all threads of the loop's small pool
        loop = asyncio.get_running_loop()
        starting = self._starting.get(loop)
        if starting is None:
            starting = self._starting[loop] = loop.create_task(asyncio.to_thread(self._start))
            starting.add_done_callback(self._on_start_done)
        return await shared_result(starting)

    def _on_start_done(self, starting: asyncio.Task[SandboxProcesses]) -> None:
        self._starting.pop(starting.get_loop(), None)
        if not starting.cancelled():
            starting.exception()  # retrieve it: otherwise, asyncio would log it if all waiting calls were cancelled

    def _start(self) -> SandboxProcesses:
        with self._lock:
            if self._closed:
                raise SandboxError("LocalExecutor was used after aclose(); create a new executor")
            if self._supervisor is not None and self._supervisor.is_usable:
                return self._supervisor
            if self._supervisor is not None:
                self._supervisor.close()
            self._supervisor = None
            try:
                supervisor = SandboxProcesses(self._supervisor_settings(), self._scratch_dir)
            except (OSError, RuntimeError) as e:  # out of descriptors, processes, memory or threads
                raise SandboxError(f"the code sandbox could not be started: {type(e).__name__}: {e}") from e
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(supervisor.close)
                self._check_isolation(supervisor.report)
                on_failure.pop_all()
            self._supervisor = supervisor
            self.facts = replace(self.facts, isolated="syscalls" in supervisor.report.enforced)
            if self._finalizer is not None:
                self._finalizer.detach()
            self._finalizer = weakref.finalize(self, supervisor.close)  # runs at exit too, if nobody called aclose()
            return supervisor

    def _check_isolation(self, report: SandboxReport) -> None:
        enforced = "; ".join(f"{layer}: {how}" for layer, how in report.enforced.items())
        missing = "; ".join(f"{layer}: {why}" for layer, why in report.missing.items()) or "nothing"
        lacking = [layer for layer in LAYERS[self._isolation] if layer in report.missing]
        if lacking:
            raise SandboxError(
                f"the code sandbox can't enforce isolation={self._isolation!r} on this machine. Missing: {missing}. "
                f"Enforced: {enforced}. To accept less, set isolation={report.isolation!r}; or use another executor"
            )
        level = logging.WARNING if report.missing else logging.INFO
        logger.log(level, "code sandbox isolation=%s enforced=[%s] missing=[%s]", report.isolation, enforced, missing)

    def _supervisor_settings(self) -> dict[str, Any]:
        limits = self._limits
        child_limits = {"memory_mb": limits["memory_mb"], "file_mb": limits["disk_mb"]}
        fork_server = {
            "libraries": library_files(self._libraries),
            "preload": list(self._libraries),
            "disabled": list(self._disabled),
            "programs": self._programs,
            "limits": child_limits | {"max_threads": limits["max_threads"], "cpu_s": _CPU_LIMIT_S},
        }
        spares = min(int(limits["max_concurrency"]), _MAX_SPARES)
        return {"limits": limits, "spares": spares, "fork_server": fork_server}


def _check_settings(limits: Mapping[str, float], isolation: object, libraries: object) -> None:
    executors.check_positive(**limits)
    for name, value in limits.items():
        if name != "timeout_s" and not isinstance(value, int):
            raise ConfigError(f"{name} is {value!r}; expected an integer")
    if isolation not in LAYERS:
        raise ConfigError(f"isolation is {isolation!r}; expected one of {', '.join(LAYERS)}")
    if isinstance(libraries, str):
        raise ConfigError(f"libraries is the string {libraries!r}; expected a list of names: [{libraries!r}]")
