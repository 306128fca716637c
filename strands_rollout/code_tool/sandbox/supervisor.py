"""The supervisor process, which runs code in children, keeps spare children ready, and cleans up after each child.

It reads requests from the executor's socket, in frames:

- `{"do": "run", "id": 7, "code": ..., "timeout_s": 30, "session": null}`
- `{"do": "cancel", "id": 7}`
- `{"do": "close_session", "id": 8, "session": ...}`

Its first message is `{"facts": {...}}` or `{"failure": ...}`. Then it answers each `run` with
`{"id": 7, "result": {...}}`; the result has the fields of an `ExecutionResult`. A cancelled `run` gets no answer. Each
`close_session` is answered with `{"id": 8, "result": null}`. After a fault of the sandbox, either result has an
`infra_error`. `{"warning": ...}` is for the executor's log. When the socket closes or the executor's process ends, the
supervisor kills all children, deletes all files and exits.
"""

import asyncio
import contextlib
import functools
import json
import os
import resource
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from strands_rollout.code_tool.sandbox import LENGTH, frame, scratch
from strands_rollout.code_tool.sandbox.children import ForkServerLink, RunningChild
from strands_rollout.code_tool.sandbox.confinement import readable_files
from strands_rollout.code_tool.sandbox.watch import DiskWatch, MemoryWatch, RunWatch

_READY_TIMEOUT_S: Final = 30.0
_FORK_RETRY_S: Final = 5.0  # other runs soon release processes, descriptors and memory
_FORK_PAUSE_S: Final = 0.2
_MANY_FILES: Final = 256
_DELETION_TIMEOUT_S: Final = 10.0
_TOP_UP_DELAY_S: Final = 0.004  # a short call is over by then, and a fork does not compete with it for the CPUs


@dataclass(slots=True)
class Session:
    """An interpreter that is kept between calls, and stopped (SIGSTOP) while no call runs."""

    child: RunningChild | None = None  # None before the first call, and after the session has ended
    calls: int = 0  # completed calls
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the running call


class Supervisor:
    """Owner of the fork server's children, their slots and the sessions. It runs code in the children.

    Args:
        settings: The executor's settings, including `root`, the folder that contains all slots' directories.
        fork_server: A running fork server.
        enforced: The layers of confinement that the fork server enforces.
        warn: Sends a warning to the executor, which logs it.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        fork_server: ForkServerLink,
        enforced: Collection[str],
        warn: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._fork_server = fork_server
        adopter = fork_server if "programs" in enforced else None
        self._disk = DiskWatch(settings["limits"], settings["root"], self._evict, adopter)
        self._memory = MemoryWatch(settings["limits"]["memory_mb"], warn)
        self._watch = RunWatch(settings["limits"], self._disk, fork_server)
        self._free_slots: list[int] = []
        self._slots = 0
        self._spares: deque[RunningChild] = deque()
        self._sessions: dict[str, Session] = {}
        self._lost_sessions: set[str] = set()  # their next call must report the loss
        self._tasks: set[asyncio.Task[None]] = set()

    def top_up(self) -> None:
        """Fork spare children before they are needed; ignore failures, since a call without a spare forks a child."""
        with contextlib.suppress(RuntimeError):
            while len(self._spares) < self._settings["spares"]:
                self._spares.append(self._fork())

    async def run(self, code: str, timeout_s: float, session: str | None) -> dict[str, Any]:
        """Run one piece of code, and return the fields of an `ExecutionResult`."""
        try:
            if session is None:
                return await self._run_alone(code, timeout_s)
            return await self._run_in_session(code, timeout_s, session)
        except (RuntimeError, TimeoutError) as e:  # no child, code that did not start, or an almost full disk
            return infra_failure(str(e) or "a process did not start its code in time")

    async def close_session(self, name: str) -> None:
        """End a session and delete its files."""
        self._lost_sessions.discard(name)
        session = self._sessions.pop(name, None)
        if session is not None and session.child is not None:
            child, session.child = session.child, None
            await self._dispose(child)

    async def _run_alone(self, code: str, timeout_s: float) -> dict[str, Any]:
        child = await self._ready_child()
        try:
            return await self._execute(child, code, timeout_s, in_session=False)
        finally:
            has_many_files = self._disk.usage(child.slot)[1] > _MANY_FILES
            deletion = self._start_task(self._dispose(child))
            if has_many_files:  # without the wait, calls could leave files behind faster than they are deleted
                await asyncio.wait([deletion], timeout=_DELETION_TIMEOUT_S)

    async def _run_in_session(self, code: str, timeout_s: float, name: str) -> dict[str, Any]:
        while True:
            session = self._sessions.setdefault(name, Session())
            async with session.lock:
                if self._sessions.get(name) is session:  # otherwise the session ended while this call waited
                    return await self._run_locked(session, code, timeout_s, name)

    async def _run_locked(self, session: Session, code: str, timeout_s: float, name: str) -> dict[str, Any]:
        try:
            child = session.child or await self._ready_child()
            if self._sessions.get(name) is not session:
                self._start_task(self._dispose(child))
                return infra_failure(f"session {name!r} was closed before its first call")
            session.child = child
            if session.calls == 0:
                result = await self._execute(child, code, timeout_s, in_session=True)
            else:
                self._fork_server.signal(child, signal.SIGCONT)
                # A timer or a thread of earlier code may end or stop the child before this code starts. That is the
                # code's fault, so its time limit includes the start.
                start = child.start(code, session=True)
                result = await self._watch.follow(child, time.monotonic(), timeout_s, start)
            self._fork_server.signal(child, signal.SIGSTOP)
            session.calls += 1
        except BaseException:  # such as a cancellation: if the session had a child, the next call reports the loss
            if session.child is not None:
                self._lost_sessions.add(name)
            self._end_session(name, session)
            raise
        has_ended = child.is_ending or child.ended.done()
        if name in self._lost_sessions or has_ended:
            self._lost_sessions.discard(name)
            result["session_lost"] = True
        if has_ended:
            self._end_session(name, session)
        return result

    def _end_session(self, name: str, session: Session) -> None:
        if self._sessions.get(name) is session:
            del self._sessions[name]
        child, session.child = session.child, None
        if child is not None:
            self._start_task(self._dispose(child))

    async def _execute(self, child: RunningChild, code: str, timeout_s: float, *, in_session: bool) -> dict[str, Any]:
        """Run a child's first piece of code, and return the fields of an `ExecutionResult`."""
        for folder in (self._settings["root"], self._folder(child)):  # old times would reveal when earlier runs ended
            with contextlib.suppress(OSError):
                os.utime(folder)
        self._memory.record_start(child.slot)
        self._watch.allow_threads(child)
        async with asyncio.timeout(_READY_TIMEOUT_S):
            await child.start(code, session=in_session)
        return await self._watch.follow(child, time.monotonic(), timeout_s)

    async def _ready_child(self) -> RunningChild:
        give_up_at = time.monotonic() + _FORK_RETRY_S
        while True:
            try:
                return await self._next_child()
            except RuntimeError:
                if time.monotonic() > give_up_at:
                    raise
            await asyncio.sleep(_FORK_PAUSE_S)

    async def _next_child(self) -> RunningChild:
        child = self._take_spare() or self._fork()
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await asyncio.shield(child.ready)
        except TimeoutError as e:
            self._start_task(self._dispose(child))
            raise RuntimeError(f"a new process was not ready within {_READY_TIMEOUT_S:g} s") from e
        except (RuntimeError, asyncio.CancelledError):
            self._start_task(self._dispose(child))
            raise
        asyncio.get_running_loop().call_later(_TOP_UP_DELAY_S, self.top_up)
        return child

    def _take_spare(self) -> RunningChild | None:
        while self._spares:
            child = self._spares.popleft()
            if not child.ended.done():  # when memory runs out, the kernel kills waiting spares first
                return child
            self._start_task(self._dispose(child))
        return None

    def _fork(self) -> RunningChild:
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot, self._slots = self._slots, self._slots + 1
        try:
            limits = self._settings["limits"]
            child = RunningChild(slot, limits["max_output_chars"], limits["max_output_mb"] << 20)
        except OSError as e:
            self._free_slots.append(slot)
            raise RuntimeError(f"can't create a new process: {e}") from e
        self._fork_server.fork(child)
        return child

    async def _dispose(self, child: RunningChild) -> None:
        with self._memory.checking_end(child.slot):
            await self._watch.kill(child)
            child.close()
        self.top_up()
        if await asyncio.to_thread(scratch.delete, self._folder(child)):  # otherwise the slot is never reused
            self._free_slots.append(child.slot)
        self._disk.forget(child.slot)

    def _folder(self, child: RunningChild) -> str:
        return os.path.join(self._settings["root"], str(child.slot))  # noqa: PTH118

    def _evict(self, slot: int) -> None:
        for name, session in list(self._sessions.items()):
            if session.child is not None and session.child.slot == slot and not session.lock.locked():
                self._lost_sessions.add(name)
                self._end_session(name, session)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def infra_failure(reason: str) -> dict[str, Any]:
    """Return the fields of a result with an `infra_error`: the sandbox itself failed, not the code."""
    return {"stdout": "", "stderr": "", "exit_code": None, "infra_error": reason}


_PARENT_POLL_S: Final = 1.0
_NICE_INCREMENT: Final = -10


async def _serve_requests(supervisor: Supervisor, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    runs: dict[int, asyncio.Task[None]] = {}
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            request = json.loads(await reader.readexactly(length))
            number: int = request["id"]
            if request["do"] != "cancel":
                runs[number] = asyncio.get_running_loop().create_task(_handle_request(request, supervisor, writer))
                runs[number].add_done_callback(functools.partial(lambda number, _: runs.pop(number), number))
            elif number in runs:
                runs[number].cancel()


async def _handle_request(request: Mapping[str, Any], supervisor: Supervisor, writer: asyncio.StreamWriter) -> None:
    result = None
    try:
        if request["do"] == "run":
            result = await supervisor.run(request["code"], request["timeout_s"], request["session"])
        else:
            await supervisor.close_session(request["session"])
    except Exception as e:  # the caller waits for an answer after any error
        result = infra_failure(f"{type(e).__name__}: {e}")
    writer.write(frame({"id": request["id"], "result": result}))


async def _serve(executor: socket.socket, settings: dict[str, Any], parent: int) -> None:
    reader, writer = await asyncio.open_connection(sock=executor)
    fork_server = ForkServerLink(settings["fork_server"])
    with contextlib.suppress(OSError):  # if permitted, so that busy CPUs don't delay the enforcement of limits
        os.nice(_NICE_INCREMENT)  # the fork server has already started, so it does not inherit this priority
    first_done = asyncio.Event()
    refreshing = asyncio.create_task(_refresh_access_times(settings["fork_server"]["libraries"], first_done))
    try:
        try:
            facts = await fork_server.facts
            await first_done.wait()
        except RuntimeError as e:
            writer.write(frame({"failure": str(e)}))
            return
        supervisor = Supervisor(
            settings, fork_server, facts["enforced"], lambda text: writer.write(frame({"warning": text}))
        )
        writer.write(frame({"facts": facts}))
        supervisor.top_up()
        serving = asyncio.create_task(_serve_requests(supervisor, reader, writer))
        # poll the parent, since a fork of the parent may keep the socket's other end open after the parent's end
        while not serving.done() and os.getppid() == parent:
            await asyncio.wait([serving], timeout=_PARENT_POLL_S)
        serving.cancel()
    finally:
        refreshing.cancel()
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        await fork_server.close()
        scratch.delete(settings["root"])


async def _refresh_access_times(libraries: Mapping[str, list[str]], first_done: asyncio.Event) -> None:
    while True:
        try:
            wait_s = await asyncio.to_thread(lambda: scratch.refresh_access_times(readable_files(libraries)))
        finally:
            first_done.set()
        await asyncio.sleep(wait_s)


def main() -> None:
    """Run the supervisor process; its arguments are the socket's descriptor and the settings as JSON."""
    parent = os.getppid()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]), parent))
