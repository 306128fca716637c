"""A watchdog thread for the event loops of episodes, which logs each line of code that blocks a loop."""

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

_CHECK_INTERVAL_S: Final = 0.5
_BLOCKED_S: Final = 1.5
_MAX_SHOWN_FRAMES: Final = 12


def watch_running_loop() -> None:
    """Watch the running loop, and log once each line that blocks it.

    A loop counts as blocked if its timer is late and consecutive checks see the same call of the same task at the same
    instruction. A busy loop doesn't count as blocked: the checks see different calls. A busy machine doesn't either:
    the watching thread is late itself, or the call has waited for the processor instead of using it.
    """
    loop = asyncio.get_running_loop()
    if loop not in _WATCHED:
        _WATCHED[loop] = _WatchedLoop(weakref.ref(loop), threading.get_ident(), threading.get_native_id())
    _start_watch(os.getpid())


def is_on_episode_loop() -> bool:
    """Return True if the caller is an episode's code and runs on a watched event loop."""
    try:
        return asyncio.get_running_loop() in _WATCHED and is_in_episode()
    except RuntimeError:  # this thread runs no loop
        return False


@functools.cache
def _start_watch(_pid: int) -> None:
    threading.Thread(target=_watch_loops, name="loop-watch", daemon=True).start()


def _watch_loops() -> None:
    checked_at = time.monotonic()
    while True:
        time.sleep(_CHECK_INTERVAL_S)
        is_late, checked_at = time.monotonic() - checked_at > 2 * _CHECK_INTERVAL_S, time.monotonic()
        with suppress(RuntimeError):  # a loop was added during iteration; the next check sees it
            for watched in list(_WATCHED.values()):
                watched.check(is_certain=not is_late)


@dataclass(slots=True)
class _WatchedLoop:
    """The state of a watched loop.

    Attributes:
        at: The task, frame and instruction at the previous check. None before the first check, after a late check, and
            after a check that found the loop on time.
        since: Time of the first check that saw `at`.
        cpu_s: Processor seconds of the loop's thread at the time `since`.
        is_computing: True if a check has seen the thread runnable at or after the time `since`.
    """

    loop: weakref.ref[asyncio.AbstractEventLoop]
    thread: int
    native_thread: int
    at: object = None
    since: float = 0.0
    cpu_s: float = 0.0
    is_computing: bool = False

    def check(self, *, is_certain: bool) -> None:
        """Check the loop, and log the blocking line, if any; `is_certain` is False if the check is late itself."""
        loop = self.loop()
        poller = None if loop is None or not loop.is_running() else POLLERS.get(loop)
        if loop is None or poller is None or not is_certain or poller.late_s < _CHECK_INTERVAL_S:
            self.at = None
            return
        frames = _call_stack(sys._current_frames().get(self.thread))
        blamed = _find_blamed_frame(frames)
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


_WATCHED: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _WatchedLoop]] = weakref.WeakKeyDictionary()
_LOGGED_LINES: Final[set[tuple[str, int]]] = set()


def _log_blocked(blamed: FrameType, frames: Sequence[FrameType], late_s: float) -> None:
    line = blamed.f_code.co_filename, blamed.f_lineno
    if line in _LOGGED_LINES:
        return
    _LOGGED_LINES.add(line)
    called = [frame for frame in frames if is_user_file(frame.f_code.co_filename) or _is_installed(frame)]
    logger.warning(
        "event=event_loop_blocked seconds=%.1f: all episodes of this process, with their deadlines and aborts, are "
        "blocked while the event loop runs %s. Use await there, or move the call to a thread. A tool that is not async "
        "runs in a thread already",
        late_s,
        " < ".join(map(_describe_frame, called[:_MAX_SHOWN_FRAMES])),
    )


def _call_stack(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _find_blamed_frame(frames: Sequence[FrameType]) -> FrameType | None:
    """Return the innermost frame of a user's file, or else of an installed library; None if there is neither."""
    own = (frame for frame in frames if is_user_file(frame.f_code.co_filename))
    return next(own, None) or next(filter(_is_installed, frames), None)


def _is_installed(frame: FrameType) -> bool:
    return "site-packages" in frame.f_code.co_filename


def _describe_frame(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}"


def _cpu_s(thread: int) -> float:
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    with suppress(OSError):  # the thread has ended
        return 0.0 if clock_of is None else time.clock_gettime(clock_of(thread))
    return 0.0


def _is_runnable(native_thread: int) -> bool:
    with suppress(OSError):
        stat = Path(f"/proc/self/task/{native_thread}/stat").read_text(encoding="ascii", errors="replace")
        return stat.rpartition(")")[2].split()[0] == "R"  # it runs, or waits for a processor
    return False
