"""The program of a symbolic worker: compares two LaTeX expressions with math-verify, one JSON line in, one out.

Protocol: {label, prediction, limit_s} -> {equal: bool}. The first line out is {"ready": true}, or {"error": why}.
A hostile expression may hold the interpreter in one C call, where no exception reaches it: so the kernel's own timer
ends the process (SIGALRM, default action), and the parent starts another.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

MEMORY_MB: Final = 2048
_BARE_CONSTANT: Final = re.compile(r"(?<![A-Za-z\\])(pi|infty|sin|cos|tan|log|ln)(?![A-Za-z])")
_NEGATIVE_POWER: Final = re.compile(r"\^\s*(-\s*\w+)")


def as_formula(text: str) -> str:
    """The text as one LaTeX formula between dollars, with what people write outside LaTeX put into it."""
    text = _BARE_CONSTANT.sub(r"\\\1", text.replace("$", "").replace("**", "^"))
    return "$" + _NEGATIVE_POWER.sub(r"^{\1}", text) + "$"


def load_comparison() -> Callable[[str, str], bool]:
    """Import math-verify and run it once, so that the first question is not the slow one.

    Its own time limits are off: they need the signal that this program leaves to the kernel.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)
    target: list[Any] = [LatexExtractionConfig()]

    def equal(label: str, prediction: str) -> bool:
        sides = [
            parse(as_formula(text), target, fallback_mode="no_fallback", parsing_timeout=None)
            for text in (label, prediction)
        ]
        return all(sides) and bool(verify(*sides, timeout_seconds=None))

    equal(r"\frac{1}{2}", r"\sqrt{\frac{1}{4}}")
    return equal


def serve(replies: int) -> None:
    """Answer questions from stdin on the descriptor `replies` until stdin ends."""
    compare = load_comparison()
    _send(replies, {"ready": True})
    for line in sys.stdin.buffer:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, question["limit_s"])
        try:
            equal = compare(question["label"], question["prediction"])
        except Exception:  # sympy raises whatever it likes on odd input; what can't be compared is not equal
            equal = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(replies, {"equal": equal})


def _send(replies: int, message: dict[str, Any]) -> None:
    os.write(replies, json.dumps(message).encode() + b"\n")


def main() -> None:
    """Keep stdout for the protocol, whatever a library prints, and serve."""
    replies = os.dup(1)
    os.dup2(2, 1)
    limit = MEMORY_MB * 1024 * 1024
    with contextlib.suppress(ValueError, OSError):  # a platform without this limit
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        serve(replies)
    except Exception as e:  # the parent must learn why there is no worker: a missing library, mostly
        _send(replies, {"error": f"{type(e).__name__}: {e}"})
        raise


if __name__ == "__main__":
    main()
