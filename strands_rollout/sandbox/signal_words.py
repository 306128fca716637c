"""What ended a process, in words that a model understands."""

from __future__ import annotations

import signal
from typing import Final

_WORDS: Final = {
    "SIGKILL": "SIGKILL (probably out of memory)",
    "SIGSEGV": "SIGSEGV (crash)",
    "SIGABRT": "SIGABRT (abort)",
    "SIGXCPU": "SIGXCPU (CPU time limit)",
    "SIGXFSZ": "SIGXFSZ (file size limit)",
    "SIGSYS": "SIGSYS (forbidden system call)",
}


def signal_words(exit_code: int) -> str | None:
    """Name the signal behind a negative exit code; None for a code that the program chose."""
    if exit_code >= 0:
        return None
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
    return _WORDS.get(name, name)
