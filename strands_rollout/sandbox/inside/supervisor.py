"""Runs code in children within limits, keeps a few children ready, and cleans up after each.

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
from pathlib import Path
from typing import Any, Final

from strands_rollout.sandbox.inside import scratch
from strands_rollout.sandbox.inside.open_files import unnamed_bytes
from strands_rollout.sandbox.inside.running_child import RunningChild
from strands_rollout.sandbox.inside.template_link import TemplateLink
from strands_rollout.sandbox.signal_words import signal_words

_MEBIBYTE: Final = 1024 * 1024
_READY_LIMIT_S: Final = 30.0
_END_LIMIT_S: Final = 10.0
_POLL_S: Final = 0.05
_RESERVE_MB: Final = 256
_SHARE_OF_POLLING: Final = 0.1  # of the time; large directories are looked at less often


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
        self._free_places: list[int] = []
        self._places = 0
        self._spares: deque[RunningChild] = deque()
        self._sessions: dict[str, Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def top_up(self) -> None:
        """Have children ready before they are needed."""
        while len(self._spares) < self._settings["spares"]:
            self._spares.append(self._fork())

    async def run(self, code: str, timeout_s: float, session: str | None) -> dict[str, Any]:
        """Run one piece of code; the fields of an `ExecutionResult`."""
        try:
            if session is None:
                return await self._run_alone(code, timeout_s)
            return await self._run_in_session(code, timeout_s, session)
        except (RuntimeError, TimeoutError) as e:  # no child, or one that does not obey
            return {"stdout": "", "stderr": "", "exit_code": None, "infra_error": str(e) or "a process did not obey"}

    async def close_session(self, name: str) -> None:
        """End a session and delete its files."""
        session = self._sessions.get(name)
        if session is not None:
            await self._end_session(name, session)

    async def _run_alone(self, code: str, timeout_s: float) -> dict[str, Any]:
        child = await self._ready_child()
        try:
            return await self._execute(child, code, timeout_s, in_session=False)
        finally:
            self._in_background(self._dispose(child))

    async def _run_in_session(self, code: str, timeout_s: float, name: str) -> dict[str, Any]:
        session = self._sessions.setdefault(name, Session())
        async with session.lock:
            try:
                if session.child is None:
                    session.child = await self._ready_child()
                result = await self._call_in_session(session.child, code, timeout_s, first=session.calls == 0)
                session.calls += 1
            except BaseException:  # cancelled, or no child to be had: what is left of it can't be told
                self._in_background(self._end_session(name, session))
                raise
            if session.child is None or session.child.ended.done():
                result["session_lost"] = True
                self._in_background(self._end_session(name, session))
            return result

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
        return await self._follow(child, time.monotonic(), timeout_s)

    async def _execute_again(self, child: RunningChild, code: str, timeout_s: float) -> dict[str, Any]:
        """Run code in a child that has run other code, which may have left a timer or a thread that ends or stops it.

        All of that is the code's own doing, and on its own time.
        """
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await child.start(code, session=True)
        except TimeoutError:
            await self._kill(child)
            return self._result(child, started, f"time limit of {timeout_s:g} s", timed_out=True)
        except RuntimeError:
            signal_name = signal_words(child.ended.result())
            return self._result(child, started, signal_name or "the end of its interpreter, due to an earlier call")
        return await self._follow(child, started, timeout_s)

    async def _follow(self, child: RunningChild, started: float, timeout_s: float) -> dict[str, Any]:
        """Wait until the code is done, or a limit is passed."""
        end = asyncio.create_task(child.wait())
        try:
            killed_by, timed_out = await self._passed_limit(child, started, timeout_s, end)
            if killed_by is not None:
                await self._kill(child)
            exit_code = await end
        finally:
            end.cancel()
        return self._result(child, started, killed_by, exit_code, timed_out=timed_out)

    def _result(
        self,
        child: RunningChild,
        started: float,
        killed_by: str | None,
        exit_code: int | None = None,
        *,
        timed_out: bool = False,
    ) -> dict[str, Any]:
        """The fields of a result; without an exit code it is that of the process, which has ended."""
        duration_s = time.monotonic() - started
        if exit_code is None:
            exit_code = child.ended.result()
            killed_by = killed_by or signal_words(exit_code)
        return {
            **child.printed(),
            "exit_code": exit_code,
            "timed_out": timed_out,
            "duration_s": duration_s,
            "killed_by": killed_by,
        }

    async def _end_session(self, name: str, session: Session) -> None:
        if self._sessions.get(name) is session:
            del self._sessions[name]
        child, session.child, session.calls = session.child, None, 0
        if child is not None:
            await self._dispose(child)

    async def _passed_limit(
        self, child: RunningChild, started: float, timeout_s: float, end: asyncio.Task[int | None]
    ) -> tuple[str | None, bool]:
        """Wait until a limit is passed, or the code has ended: what kills it, and whether that is the clock."""
        limits = self._settings["limits"]
        pause_s = _POLL_S
        while True:
            left_s = started + timeout_s - time.monotonic()
            if left_s <= 0:
                return f"time limit of {timeout_s:g} s", True
            await asyncio.wait([end], timeout=min(pause_s, left_s))
            if end.done():
                return None, False
            if child.is_broken:
                return "writing to the sandbox's own descriptor", False
            if child.output_bytes > limits["max_output_mb"] * _MEBIBYTE:
                return f"output limit of {limits['max_output_mb']} MiB", False
            looked_at = time.monotonic()
            passed = self._passed_usage_limit(child)
            if passed is not None:
                return passed, False
            pause_s = max(_POLL_S, (time.monotonic() - looked_at) / _SHARE_OF_POLLING)

    def _passed_usage_limit(self, child: RunningChild) -> str | None:
        limits = self._settings["limits"]
        folder = self._folder(child.place)
        if scratch.free_bytes(folder) < _RESERVE_MB * _MEBIBYTE:
            # whose fault it is can't be told: files that are deleted and still open belong to nobody's directory
            raise RuntimeError(f"less than {_RESERVE_MB} MiB are free on the disk of {self._settings['root']}")
        used = scratch.usage(folder, limits["max_files"])
        if used.disk_bytes > limits["disk_mb"] * _MEBIBYTE:
            return f"disk limit of {limits['disk_mb']} MiB"
        if used.disk_bytes + self._unnamed_bytes(child) > limits["disk_mb"] * _MEBIBYTE:
            return f"disk limit of {limits['disk_mb']} MiB, counting deleted files that are open"
        if used.entries > limits["max_files"]:
            return f"limit of {limits['max_files']} files"
        if _thread_count(child.pid) > limits["max_threads"]:
            return f"limit of {limits['max_threads']} threads"
        return None

    def _unnamed_bytes(self, child: RunningChild) -> int:
        if child.pid is None:
            return 0
        return unnamed_bytes(child.pid, child.user, self._settings["limits"]["disk_mb"] * _MEBIBYTE)

    async def _ready_child(self) -> RunningChild:
        """A child that waits for code.

        Raises:
            RuntimeError: There will be none.
        """
        child = self._spares.popleft() if self._spares else self._fork()
        try:
            async with asyncio.timeout(_READY_LIMIT_S):
                await asyncio.shield(child.ready)
        except TimeoutError as e:
            self._in_background(self._dispose(child))
            raise RuntimeError(f"a new process was not ready within {_READY_LIMIT_S:g} s") from e
        except (RuntimeError, asyncio.CancelledError):
            self._in_background(self._dispose(child))
            raise
        asyncio.get_running_loop().call_soon(self.top_up)
        return child

    def _fork(self) -> RunningChild:
        if self._free_places:
            place = self._free_places.pop()
        else:
            place, self._places = self._places, self._places + 1
        child = RunningChild(place, self._settings["limits"]["max_output_chars"])
        self._template.fork(child)
        return child

    async def _kill(self, child: RunningChild) -> None:
        self._template.signal(child, signal.SIGKILL)
        async with asyncio.timeout(_END_LIMIT_S):
            await asyncio.shield(child.ended)

    async def _dispose(self, child: RunningChild) -> None:
        """End a child, empty its place and give that to the next."""
        await self._kill(child)
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


def _thread_count(pid: int | None) -> int:
    """Threads of a process; 0 where there is no /proc."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[17])
    except (OSError, IndexError, ValueError):
        return 0
