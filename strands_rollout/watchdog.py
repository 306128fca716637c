"""Finds the line that blocks an event loop which plays episodes, and logs it."""

import asyncio
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from strands_rollout.code_origin import is_user_file
from strands_rollout.control import POLLERS, is_in_episode

logger = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 0.5
_BLOCKED_S: Final = 1.5
_MOST_SHOWN_FRAMES: Final = 12


def watch_running_loop() -> None:
    """Log which line blocks the running loop, which plays episodes, once for each line.

    A loop is blocked where a timer of it is late while one call of one task stands at one line, look after look. One
    that is late because much runs on it, or the machine is busy, is not: then other calls are seen, the thread that
    looks is late itself, or the call has waited for the processor rather than used it.
    """
    loop = asyncio.get_running_loop()
    if loop not in _WATCHED:
        _WATCHED[loop] = _Watched(weakref.ref(loop), threading.get_ident(), threading.get_native_id())
    _start_watch(os.getpid())


def plays_episodes() -> bool:
    """Return True in a step of an episode, on the loop that plays others too."""
    try:
        return asyncio.get_running_loop() in _WATCHED and is_in_episode()
    except RuntimeError:  # no loop runs in this thread
        return False


@functools.cache
def _start_watch(_pid: int) -> None:
    threading.Thread(target=_watch_loops, name="loop-watch", daemon=True).start()


def _watch_loops() -> None:
    looked_at = time.monotonic()
    while True:
        time.sleep(_LOOK_EVERY_S)
        late, looked_at = time.monotonic() - looked_at > 2 * _LOOK_EVERY_S, time.monotonic()
        with suppress(RuntimeError):  # another loop came meanwhile, and is seen the next time
            for watched in list(_WATCHED.values()):
                watched.look(is_certain=not late)


@dataclass(slots=True)
class _Watched:
    """A loop under watch: since when it stands at a line, and what its thread has used of the processor by then."""

    loop: weakref.ref[asyncio.AbstractEventLoop]
    thread: int
    native_thread: int
    at: object = None
    since: float = 0.0
    cpu_s: float = 0.0
    is_computing: bool = False

    def look(self, *, is_certain: bool) -> None:
        """Log the line that the loop stands at, if it does for long; `is_certain` unless the look itself is late."""
        loop = self.loop()
        poller = None if loop is None or not loop.is_running() else POLLERS.get(loop)
        if loop is None or poller is None or not is_certain or poller.late_s < _LOOK_EVERY_S:
            self.at = None
            return
        frames = _stack_of(sys._current_frames().get(self.thread))
        blamed = _blamed(frames)
        if blamed is None:
            return
        task, now, cpu_s = asyncio.current_task(loop), time.monotonic(), _cpu_s(self.thread)
        at = (None if task is None else weakref.ref(task)), id(blamed), blamed.f_code, blamed.f_lasti
        if at != self.at:
            self.at, self.since, self.cpu_s, self.is_computing = at, now, cpu_s, False
        self.is_computing = self.is_computing or _is_runnable(self.native_thread)
        used_s = cpu_s - self.cpu_s if self.is_computing else now - self.since
        if used_s >= _BLOCKED_S:
            _log_blocked(blamed, frames, poller.late_s)


_WATCHED: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watched]] = weakref.WeakKeyDictionary()
_TOLD: Final[set[tuple[str, int]]] = set()


def _log_blocked(blamed: FrameType, frames: Sequence[FrameType], late_s: float) -> None:
    line = blamed.f_code.co_filename, blamed.f_lineno
    if line in _TOLD:
        return
    _TOLD.add(line)
    called = [frame for frame in frames if is_user_file(frame.f_code.co_filename) or _is_installed(frame)]
    logger.warning(
        "event=event_loop_blocked seconds=%.1f: all episodes of this process stand still, with their deadlines and "
        "aborts, while it runs %s. Await there, or move it to a thread, such as by a tool that is not async",
        late_s,
        " < ".join(map(_place, called[:_MOST_SHOWN_FRAMES])),
    )


def _stack_of(frame: FrameType | None) -> list[FrameType]:
    """A frame and those that called it, the innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _blamed(frames: Sequence[FrameType]) -> FrameType | None:
    """The innermost frame of the user's; where there is none, of whatever is not Python's own."""
    own = (frame for frame in frames if is_user_file(frame.f_code.co_filename))
    return next(own, None) or next(filter(_is_installed, frames), None)


def _is_installed(frame: FrameType) -> bool:
    return "site-packages" in frame.f_code.co_filename


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}"


def _cpu_s(thread: int) -> float:
    """Seconds of processor that a thread of this process has used; 0 where the system does not tell."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    with suppress(OSError):  # it has ended
        return 0.0 if clock_of is None else time.clock_gettime(clock_of(thread))
    return 0.0


def _is_runnable(native_thread: int) -> bool:
    """Return True if a thread runs, or waits for a processor only; False where the system does not tell."""
    with suppress(OSError):
        stat = Path(f"/proc/self/task/{native_thread}/stat").read_text(encoding="ascii", errors="replace")
        return stat.rpartition(")")[2].split()[0] == "R"
    return False
