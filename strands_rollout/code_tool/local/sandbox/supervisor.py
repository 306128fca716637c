"""Has code run in children: keeps a few ready, keeps those of sessions, and cleans up after each.

Knows children, their limits and their directories; nothing of who asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from strands_rollout.sandbox.inside import scratch
from strands_rollout.sandbox.inside.run_watch import RunWatch
from strands_rollout.sandbox.inside.running_child import RunningChild
from strands_rollout.sandbox.inside.template_link import TemplateLink

_READY_LIMIT_S: Final = 30.0
_TOP_UP_AFTER_S: Final = 0.004  # a short call is over by then, and has not shared the CPUs with a fork


@dataclass(slots=True)
class Session:
    """An interpreter that is kept between calls, stopped while none runs.

    Attributes:
        child: Its process; None before the first call, and when it has ended.
        calls: Pieces of code that this process has run.
        lock: Held by the call that runs.
    """

    child: RunningChild | None = None
    calls: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Supervisor:
    """Runs code in the template's children.

    Args:
        settings: `limits` (disk_mb, max_files, max_threads, max_output_mb, max_output_chars), `spares`, `root`.
        template: Started already.
    """

    def __init__(self, settings: Mapping[str, Any], template: TemplateLink) -> None:
        self._settings = settings
        self._template = template
        self._watch = RunWatch(settings["limits"], settings["root"], template)
        self._free_places: list[int] = []
        self._places = 0
        self._spares: deque[RunningChild] = deque()
        self._sessions: dict[str, Session] = {}
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
            self._in_background(self._dispose(child))

    async def _run_in_session(self, code: str, timeout_s: float, name: str) -> dict[str, Any]:
        while True:
            session = self._sessions.setdefault(name, Session())
            async with session.lock:
                if self._sessions.get(name) is session:  # else it has ended while we waited for its other calls
                    return await self._run_in(session, code, timeout_s, name)

    async def _run_in(self, session: Session, code: str, timeout_s: float, name: str) -> dict[str, Any]:
        try:
            child = session.child or await self._ready_child()
            if self._sessions.get(name) is not session:
                self._in_background(self._dispose(child))
                return fault(f"session {name!r} was closed before its first call")
            session.child = child
            result = await self._call_in_session(child, code, timeout_s, first=session.calls == 0)
            session.calls += 1
        except BaseException:  # cancelled, or no child to be had: nobody hears of it but the next call
            if session.child is not None:
                self._lost_sessions.add(name)
            self._forget(name, session)
            raise
        if name in self._lost_sessions or child.ended.done():
            self._lost_sessions.discard(name)
            result["session_lost"] = True
        if child.ended.done():
            self._forget(name, session)
        return result

    def _forget(self, name: str, session: Session) -> None:
        """End a session now, as far as calls can see; its process is ended in the background."""
        if self._sessions.get(name) is session:
            del self._sessions[name]
        child, session.child = session.child, None
        if child is not None:
            self._in_background(self._dispose(child))

    async def _call_in_session(
        self, child: RunningChild, code: str, timeout_s: float, *, first: bool
    ) -> dict[str, Any]:
        if first:
            result = await self._execute(child, code, timeout_s, in_session=True)
        else:
            self._template.signal(child, signal.SIGCONT)
            result = await self._execute_again(child, code, timeout_s)
        self._template.signal(child, signal.SIGSTOP)
        return result

    async def _execute(self, child: RunningChild, code: str, timeout_s: float, *, in_session: bool) -> dict[str, Any]:
        """Run code in a child that has run none, until it ends or passes a limit.

        Raises:
            RuntimeError: The child ended before.
            TimeoutError: It did not start.
        """
        async with asyncio.timeout(_READY_LIMIT_S):
            await child.start(code, session=in_session)
        return await self._watch.follow(child, time.monotonic(), timeout_s)

    async def _execute_again(self, child: RunningChild, code: str, timeout_s: float) -> dict[str, Any]:
        """Run code in a child that has run other code, which may have left a timer or a thread that ends or stops it.

        All of that is the code's own doing, and on its own time.
        """
        return await self._watch.follow(child, time.monotonic(), timeout_s, child.start(code, session=True))

    async def _ready_child(self) -> RunningChild:
        """A child that waits for code.

        Raises:
            RuntimeError: There will be none.
        """
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
            child = RunningChild(place, self._settings["limits"]["max_output_chars"])
        except OSError as e:
            self._free_places.append(place)
            raise RuntimeError(f"no new process can be had: {e}") from e
        self._template.fork(child)
        return child

    async def _dispose(self, child: RunningChild) -> None:
        """End a child, empty its place and give that to the next."""
        await self._watch.kill(child)
        child.close()
        folder = self._folder(child.place)
        with contextlib.suppress(OSError):  # a place that can't be emptied is used no more
            if os.listdir(folder):  # noqa: PTH208
                await asyncio.to_thread(scratch.empty, folder)
            self._free_places.append(child.place)
        self.top_up()

    def _folder(self, place: int) -> str:
        return os.path.join(self._settings["root"], str(place))  # noqa: PTH118 - each 50 ms for each child

    def _in_background(self, work: Any) -> None:  # noqa: ANN401 - a coroutine
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def fault(words: str) -> dict[str, Any]:
    """The fields of a result that is nobody's but the sandbox's fault."""
    return {"stdout": "", "stderr": "", "exit_code": None, "infra_error": words}
