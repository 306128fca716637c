"""The resource limits of one process that runs code (setrlimit)."""

from __future__ import annotations

import contextlib
import resource
import sys
from dataclasses import dataclass
from typing import Final

OPEN_FILES: Final = 64
_STACK_BYTES: Final = 8 * 1024 * 1024
_MEBIBYTE: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """What one process may use.

    Attributes:
        memory_mb: Address space in mebibytes; macOS ignores it.
        file_mb: Largest file in mebibytes.
        max_threads: Threads, where the process has a user of its own.
        cpu_s: Seconds on a CPU; the last resort, since wall-clock limits are its supervisor's.
    """

    memory_mb: int
    file_mb: int
    max_threads: int
    cpu_s: int

    def impose(self, *, own_user: bool) -> None:
        """Limit the calling process, hard limits included.

        Args:
            own_user: Whether nobody else runs as its user: threads are counted by user.

        Raises:
            OSError: The kernel refuses.
        """
        wanted = {
            resource.RLIMIT_AS: self.memory_mb * _MEBIBYTE,
            resource.RLIMIT_FSIZE: self.file_mb * _MEBIBYTE,
            resource.RLIMIT_CPU: self.cpu_s,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_STACK: _STACK_BYTES,
            resource.RLIMIT_CORE: 0,
        }
        if own_user:
            wanted[resource.RLIMIT_NPROC] = self.max_threads
        if sys.platform == "linux":
            wanted |= {resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0, resource.RLIMIT_RTPRIO: 0}
        for kind, value in wanted.items():
            ceiling = resource.getrlimit(kind)[1]
            limit = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
            # macOS refuses some of these, and enforces nothing that depends on them
            with contextlib.nullcontext() if sys.platform == "linux" else contextlib.suppress(ValueError, OSError):
                resource.setrlimit(kind, (limit, limit))
