"""Follows one piece of code to its end, and ends it at a limit: time, output, disk, files, threads, memory mappings.

Knows a child and its directory; nothing of places, sessions or who asks.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Final

from strands_rollout.sandbox.inside import scratch
from strands_rollout.sandbox.inside.open_files import TooManyMappingsError, unnamed_bytes
from strands_rollout.sandbox.inside.running_child import RunningChild
from strands_rollout.sandbox.inside.template_link import TemplateLink
from strands_rollout.sandbox.signal_words import signal_words

_MEBIBYTE: Final = 1024 * 1024
_END_LIMIT_S: Final = 10.0
_POLL_S: Final = 0.05
_MAX_POLL_S: Final = 2.0
_SHARE_OF_POLLING: Final = 0.1  # of the time, for all children; where looking takes long, it is done less often


class RunWatch:
    """Follows code under one set of limits.

    Args:
        limits: disk_mb, max_files, max_threads, max_output_mb.
        root: The directory of the places.
        template: Who signals the children.
    """

    def __init__(self, limits: Mapping[str, Any], root: str, template: TemplateLink) -> None:
        self._limits = limits
        self._root = root
        self._template = template
        self._following = 0

    async def follow(
        self,
        child: RunningChild,
        started: float,
        timeout_s: float,
        start: Coroutine[Any, Any, None] | None = None,
    ) -> dict[str, Any]:
        """Wait until the code is done, or a limit is passed; `start`, if given, is part of it."""
        end = asyncio.create_task(_wait(child, start))
        self._following += 1
        try:
            killed_by, timed_out = await self._passed_limit(child, started, timeout_s, end)
            if killed_by is not None:
                await self.kill(child)
            exit_code = await end
        finally:
            self._following -= 1
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

    async def _passed_limit(
        self, child: RunningChild, started: float, timeout_s: float, end: asyncio.Task[int | None]
    ) -> tuple[str | None, bool]:
        """Wait until a limit is passed, or the code has ended: what kills it, and whether that is the clock."""
        limits = self._limits
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
            looks_s = (time.monotonic() - looked_at) * self._following
            pause_s = min(max(_POLL_S, looks_s / _SHARE_OF_POLLING), _MAX_POLL_S)

    def _passed_usage_limit(self, child: RunningChild) -> str | None:
        limits = self._limits
        folder = os.path.join(self._root, str(child.place))  # noqa: PTH118 - each 50 ms
        if scratch.free_bytes(self._root) < scratch.RESERVE_BYTES:
            raise RuntimeError(f"the disk of {self._root} is almost full")  # by whom can't be told
        used = scratch.usage(folder, limits["max_files"])
        if used.disk_bytes > limits["disk_mb"] * _MEBIBYTE:
            return f"disk limit of {limits['disk_mb']} MiB"
        try:
            unnamed_bytes = self._unnamed_bytes(child)
        except TooManyMappingsError:
            return "limit of memory mappings"
        if used.disk_bytes + unnamed_bytes > limits["disk_mb"] * _MEBIBYTE:
            return f"disk limit of {limits['disk_mb']} MiB, counting deleted files that are open"
        if used.entries > limits["max_files"]:
            return f"limit of {limits['max_files']} files"
        if _thread_count(child.pid) > limits["max_threads"]:
            return f"limit of {limits['max_threads']} threads"
        return None

    def _unnamed_bytes(self, child: RunningChild) -> int:
        if child.pid is None:
            return 0
        return unnamed_bytes(child.pid, child.user, self._limits["disk_mb"] * _MEBIBYTE)

    async def kill(self, child: RunningChild) -> None:
        """End a child; it may take the kernel some time."""
        while not child.ended.done():
            self._template.signal(child, signal.SIGKILL)
            await asyncio.wait([child.ended], timeout=_END_LIMIT_S)


async def _wait(child: RunningChild, start: Coroutine[Any, Any, None] | None) -> int | None:
    """The exit code of a piece of code, None if its process has ended; it may still have to be started."""
    if start is not None:
        try:
            await start
        except RuntimeError:  # ended before: by what an earlier piece of code has left behind
            return None
    return await child.wait()


def _thread_count(pid: int | None) -> int:
    """Threads of a process; 0 where there is no /proc."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[17])
    except (OSError, IndexError, ValueError):
        return 0
