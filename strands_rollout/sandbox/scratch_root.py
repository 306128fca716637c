"""The directory that holds everything that the code of one executor writes: found, made, locked, deleted.

The lock tells other executors that its owner lives; what a killed owner left behind is deleted by the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Final

from strands_rollout.errors import SandboxError
from strands_rollout.sandbox.inside import scratch

_PREFIX: Final = "strands-rollout-code-"
_YOUNG_S: Final = 60.0  # a directory that is this young may be about to be locked


class ScratchRoot:
    """One such directory.

    Args:
        parent: Where to make it; None for the temporary directory, or /tmp if other users can't reach that.

    Attributes:
        path: Its path; other users may pass through it, and can't list it.

    Raises:
        SandboxError: It can't be made.
    """

    def __init__(self, parent: str | None = None) -> None:
        folder = parent or _default_parent()
        try:
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=folder)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(self.path).chmod(0o711)
        except OSError as e:
            raise SandboxError(f"can't make a scratch directory in {folder!r}: {e}; name another as scratch_dir") from e
        if scratch.free_bytes(self.path) < scratch.RESERVE_BYTES:
            self.delete()
            raise SandboxError(f"the disk of {folder!r} is almost full; name another folder as scratch_dir")
        _delete_abandoned(Path(folder))

    def delete(self) -> None:
        """Delete it with all it holds. Safe to call twice."""
        scratch.delete(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _default_parent() -> str:
    """Code runs as another user where we are root, and names its files by absolute paths."""
    chosen = tempfile.gettempdir()
    if os.geteuid() != 0 or _others_can_pass(chosen) or not _others_can_pass("/tmp"):  # noqa: S108
        return chosen
    return "/tmp"  # noqa: S108 - a directory of our own is made in it, by mkdtemp


def _others_can_pass(folder: str) -> bool:
    here = Path(os.path.realpath(folder))
    return here.is_dir() and all(place.stat().st_mode & stat.S_IXOTH for place in (here, *here.parents))


def _delete_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _YOUNG_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                scratch.delete(str(folder))
            finally:
                os.close(lock)
