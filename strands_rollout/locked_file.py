"""Files that one process at a time may have open, such as the results of a run."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from strands_rollout.errors import ConfigError


def open_alone(path: Path) -> int:
    """Open a file to read and append to, and make it if it is not there; the lock ends when it is closed.

    Returns:
        The file's descriptor.

    Raises:
        ConfigError: It can't be opened, or another process has it.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as e:
        raise ConfigError(f"can't open {path}: {e.strerror}; choose another folder with --out") from e
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(file)
        raise ConfigError(f"{path} is in use by another run ({e.strerror}); wait, or choose another --out") from e
    return file
