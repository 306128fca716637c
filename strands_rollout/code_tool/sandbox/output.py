"""What a process printed, with the middle of an endless text cut out; and the name of the signal that ended it.

Sent to remote sandboxes: Python 3.8 and its standard library.
"""

from __future__ import annotations

import codecs
import re
import signal
from typing import Final

_MARKER: Final = re.compile(r"\n\.\.\. \[(\d+) characters dropped\] \.\.\.\n")


def _marker(dropped_chars: int) -> str:
    return f"\n... [{dropped_chars} characters dropped] ...\n"


def shorten(text: str, max_chars: int) -> str:
    """Cut the middle out of a text longer than `max_chars`, with a marker that says how many characters went.

    A marker of an earlier cut that goes with the middle is counted as what it stood for. The result is longer than
    `max_chars` by the marker (at most 50 characters).
    """
    if len(text) <= max_chars:
        return text
    head_chars = max_chars // 2
    tail_start = len(text) - (max_chars - head_chars)
    dropped_chars = tail_start - head_chars
    for earlier in _MARKER.finditer(text, head_chars, tail_start):
        dropped_chars += int(earlier[1]) - len(earlier[0])
    return text[:head_chars] + _marker(dropped_chars) + text[tail_start:]


class CappedOutput:
    """Collects one stream's bytes in bounded memory: at most about twice `max_chars` characters are held."""

    def __init__(self, max_chars: int) -> None:
        self._head_chars = max_chars // 2
        self._tail_chars = max_chars - self._head_chars
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._head = ""
        self._tail = ""
        self._dropped_chars = 0
        self.total_bytes = 0

    @property
    def truncated(self) -> bool:
        """Whether characters were dropped."""
        return self._dropped_chars > 0

    def feed(self, chunk: bytes, *, final: bool = False) -> None:
        """Take the next bytes; `final` marks the end of the stream, where an unfinished character becomes U+FFFD."""
        self.total_bytes += len(chunk)
        text = self._decoder.decode(chunk, final)
        missing = self._head_chars - len(self._head)
        self._head += text[:missing]
        self._tail += text[missing:]
        surplus = len(self._tail) - self._tail_chars
        if surplus > 0:
            self._dropped_chars += surplus
            self._tail = self._tail[surplus:]

    def text(self) -> str:
        """What was kept, with the marker in place of what was dropped."""
        return self._head + (_marker(self._dropped_chars) if self.truncated else "") + self._tail


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
