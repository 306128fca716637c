"""The supervisor process, beside the trainer: has code run in children, keeps a few ready, cleans up after each.

It takes orders from the executor's socket, in frames: `{"do": "run", "id": 7, "code": ..., "timeout_s": 30, "session":
null}`, `{"do": "cancel", "id": 7}` and `{"do": "close_session", "id": 8, "session": ...}`. It answers with `{"id": 7,
"result": {...}}`, after a first `{"facts": {...}}` or `{"failure": ...}`; `{"warning": ...}` is for the log. When the
socket closes, all children are
killed, all files are deleted and the process ends.
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

_READY_LIMIT_S: Final = 30.0
_FORK_PATIENCE_S: Final = 5.0  # what other runs have used up (processes, descriptors, memory) is free again soon
_FORK_PAUSE_S: Final = 0.2
_MANY_FILES: Final = 256
_DELETION_LIMIT_S: Final = 10.0
_TOP_UP_AFTER_S: Final = 0.004  # a short call is over by then, and has not shared the CPUs with a fork


@dataclass(slots=True)
class KeptInterpreter:
    """An interpreter that is kept between calls, stopped while none runs."""

    child: RunningChild | None = None  # None before the first call, and when it has ended
    calls: int = 0  # pieces of code that this process has run
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the call that runs


class Supervisor:
    """Runs code in the fork server's children.

    Args:
        settings: The executor's, with the `root` of all places.
        fork_server: Makes the children; up.
        enforced: Layers that it enforces.
        tell: Takes what the trainer's log should say.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        fork_server: ForkServerLink,
        enforced: Collection[str],
        tell: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._fork_server = fork_server
        adopts = fork_server if "programs" in enforced else None
        self._disk = DiskWatch(settings["limits"], settings["root"], self._evict, adopts)
        self._memory = MemoryWatch(settings["limits"]["memory_mb"], tell)
        self._watch = RunWatch(settings["limits"], self._disk, fork_server)
        self._free_places: list[int] = []
        self._places = 0
        self._spares: deque[RunningChild] = deque()
        self._sessions: dict[str, KeptInterpreter] = {}
        self._lost_sessions: set[str] = set()  # whose next call has to say so
        self._tasks: set[asyncio.Task[None]] = set()

    def top_up(self) -> None:
        """Have children ready before they are needed, as far as that is possible now."""
        with contextlib.suppress(RuntimeError):
            while len(self._spares) < self._settings["spares"]:
                self._spares.append(self._fork())

    async def run(self, code: str, timeout_s: float, session: str | None) -> dict[str, Any]:
        """Run one piece of code; the fields of an `ExecutionResult`."""
        try:
            if session is None:
                return await self._run_alone(code, timeout_s)
            return await self._run_in_session(code, timeout_s, session)
        except (RuntimeError, TimeoutError) as e:  # no child, or one that does not obey
            return fault(str(e) or "a process did not obey")

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
            has_many_files = self._disk.held(child.place)[1] > _MANY_FILES
            deletion = self._in_background(self._dispose(child))
            if has_many_files:  # else calls that leave thousands behind would come faster than those can be deleted
                await asyncio.wait([deletion], timeout=_DELETION_LIMIT_S)

    async def _run_in_session(self, code: str, timeout_s: float, name: str) -> dict[str, Any]:
        while True:
            session = self._sessions.setdefault(name, KeptInterpreter())
            async with session.lock:
                if self._sessions.get(name) is session:  # else it has ended while we waited for its other calls
                    return await self._run_in(session, code, timeout_s, name)

    async def _run_in(self, session: KeptInterpreter, code: str, timeout_s: float, name: str) -> dict[str, Any]:
        try:
            child = session.child or await self._ready_child()
            if self._sessions.get(name) is not session:
                self._in_background(self._dispose(child))
                return fault(f"session {name!r} was closed before its first call")
            session.child = child
            if session.calls == 0:
                result = await self._execute(child, code, timeout_s, in_session=True)
            else:
                self._fork_server.signal(child, signal.SIGCONT)
                # earlier code may have left a timer or a thread that ends or stops the child before this code starts:
                # all of that is the code's own doing, and on its own time
                start = child.start(code, session=True)
                result = await self._watch.follow(child, time.monotonic(), timeout_s, start)
            self._fork_server.signal(child, signal.SIGSTOP)
            session.calls += 1
        except BaseException:  # cancelled, or no child available: the next call reports the loss
            if session.child is not None:
                self._lost_sessions.add(name)
            self._forget(name, session)
            raise
        is_over = child.is_ending or child.ended.done()
        if name in self._lost_sessions or is_over:
            self._lost_sessions.discard(name)
            result["session_lost"] = True
        if is_over:
            self._forget(name, session)
        return result

    def _forget(self, name: str, session: KeptInterpreter) -> None:
        """End a session now, as far as calls can see; its process is ended in the background."""
        if self._sessions.get(name) is session:
            del self._sessions[name]
        child, session.child = session.child, None
        if child is not None:
            self._in_background(self._dispose(child))

    async def _execute(self, child: RunningChild, code: str, timeout_s: float, *, in_session: bool) -> dict[str, Any]:
        """Run code in a child that has run none, until it ends or passes a limit."""
        for folder in (self._settings["root"], self._folder(child)):  # their times would show when earlier runs ended
            with contextlib.suppress(OSError):
                os.utime(folder)
        self._memory.starts(child.place)
        self._watch.allow_threads(child)
        async with asyncio.timeout(_READY_LIMIT_S):
            await child.start(code, session=in_session)
        return await self._watch.follow(child, time.monotonic(), timeout_s)

    async def _ready_child(self) -> RunningChild:
        """A child that waits for code."""
        give_up_at = time.monotonic() + _FORK_PATIENCE_S
        while True:
            try:
                return await self._next_child()
            except RuntimeError:
                if time.monotonic() > give_up_at:
                    raise
            await asyncio.sleep(_FORK_PAUSE_S)

    async def _next_child(self) -> RunningChild:
        child = self._spare() or self._fork()
        try:
            async with asyncio.timeout(_READY_LIMIT_S):
                await asyncio.shield(child.ready)
        except TimeoutError as e:
            self._in_background(self._dispose(child))
            raise RuntimeError(f"a new process was not ready within {_READY_LIMIT_S:g} s") from e
        except (RuntimeError, asyncio.CancelledError):
            self._in_background(self._dispose(child))
            raise
        asyncio.get_running_loop().call_later(_TOP_UP_AFTER_S, self.top_up)
        return child

    def _spare(self) -> RunningChild | None:
        """A child that is or will be ready; the kernel kills those that wait first when memory runs out."""
        while self._spares:
            child = self._spares.popleft()
            if not child.ended.done():
                return child
            self._in_background(self._dispose(child))
        return None

    def _fork(self) -> RunningChild:
        if self._free_places:
            place = self._free_places.pop()
        else:
            place, self._places = self._places, self._places + 1
        try:
            limits = self._settings["limits"]
            child = RunningChild(place, limits["max_output_chars"], limits["max_output_mb"] << 20)
        except OSError as e:
            self._free_places.append(place)
            raise RuntimeError(f"no new process can be had: {e}") from e
        self._fork_server.fork(child)
        return child

    async def _dispose(self, child: RunningChild) -> None:
        """End a child, delete its directory and give its place to the next, which makes another."""
        with self._memory.ending(child.place):
            await self._watch.kill(child)
            child.close()
        self.top_up()
        if await asyncio.to_thread(scratch.delete, self._folder(child)):  # else the place is used no more
            self._free_places.append(child.place)
        self._disk.forget(child.place)

    def _folder(self, child: RunningChild) -> str:
        return os.path.join(self._settings["root"], str(child.place))  # noqa: PTH118

    def _evict(self, place: int) -> None:
        """End the session that has a place if no call of it runs; its next call hears of it."""
        for name, session in list(self._sessions.items()):
            if session.child is not None and session.child.place == place and not session.lock.locked():
                self._lost_sessions.add(name)
                self._forget(name, session)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def fault(words: str) -> dict[str, Any]:
    """The fields of the result of a call that the sandbox itself failed."""
    return {"stdout": "", "stderr": "", "exit_code": None, "infra_error": words}


_PARENT_POLL_S: Final = 1.0
_NICER: Final = -10


async def _take_orders(supervisor: Supervisor, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the socket closes."""
    runs: dict[int, asyncio.Task[None]] = {}
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            order = json.loads(await reader.readexactly(length))
            number: int = order["id"]
            if order["do"] != "cancel":
                runs[number] = asyncio.get_running_loop().create_task(_carry_out(order, supervisor, writer))
                runs[number].add_done_callback(functools.partial(lambda number, _: runs.pop(number), number))
            elif number in runs:
                runs[number].cancel()


async def _carry_out(order: Mapping[str, Any], supervisor: Supervisor, writer: asyncio.StreamWriter) -> None:
    result = None
    try:
        if order["do"] == "run":
            result = await supervisor.run(order["code"], order["timeout_s"], order["session"])
        else:
            await supervisor.close_session(order["session"])
    except Exception as e:  # whatever it is, the caller waits for an answer
        result = fault(f"{type(e).__name__}: {e}")
    writer.write(frame({"id": order["id"], "result": result}))


async def _serve(executor: socket.socket, settings: dict[str, Any], parent: int) -> None:
    reader, writer = await asyncio.open_connection(sock=executor)
    fork_server = ForkServerLink(settings["fork_server"])
    with contextlib.suppress(OSError):  # where that is allowed, be on time however busy what is watched keeps the CPUs
        os.nice(_NICER)  # from here on: the fork server, and so the code, has the priority of the trainer
    settled = asyncio.Event()
    settling = asyncio.create_task(_settle_access_times(settings["fork_server"]["libraries"], settled))
    try:
        try:
            facts = await fork_server.facts
            await settled.wait()
        except RuntimeError as e:
            writer.write(frame({"failure": str(e)}))
            return
        supervisor = Supervisor(
            settings, fork_server, facts["enforced"], lambda words: writer.write(frame({"warning": words}))
        )
        writer.write(frame({"facts": facts}))
        supervisor.top_up()
        serving = asyncio.create_task(_take_orders(supervisor, reader, writer))
        # a fork of the trainer may hold the other end of the socket open after the trainer has ended
        while not serving.done() and os.getppid() == parent:
            await asyncio.wait([serving], timeout=_PARENT_POLL_S)
        serving.cancel()
    finally:
        settling.cancel()
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        await fork_server.close()
        scratch.delete(settings["root"])


async def _settle_access_times(libraries: Mapping[str, list[str]], done_once: asyncio.Event) -> None:
    """Again and again, before reading would change any."""
    while True:
        try:
            wait_s = await asyncio.to_thread(lambda: scratch.settle(readable_files(libraries)))
        finally:
            done_once.set()
        await asyncio.sleep(wait_s)


def main() -> None:
    """Run as a process: arguments are the number of the socket and the settings in JSON."""
    parent = os.getppid()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]), parent))
