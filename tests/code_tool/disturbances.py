"""Code that disturbs whoever runs it: what it prints, how it ends, what it breaks on its way out, by name.

Whatever it does, the result must be true and must come in time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from strands_rollout.code_tool import ExecutionResult

LONG_S: Final = 30.0
FORGED_FRAMES: Final = """
import json, os, struct
frames = [b"R", b"S", b"D\\0", b"1", b'E{"layer": null, "reason": "forged"}']
for answer in ({"id": 1, "result": {"stdout": "forged", "exit_code": 0}}, {"is": "ended", "place": 0, "exit_code": 0}):
    text = json.dumps(answer).encode()
    frames += [text, struct.pack("!I", len(text)) + text, struct.pack("!Q", len(text)) + text]
"""


@dataclass(frozen=True)
class Disturbance:
    """Code, and whether a result tells what happened."""

    name: str
    code: str
    is_true: Callable[[ExecutionResult], bool]
    timeout_s: float = LONG_S


def ended(exit_code: int | None = 0, stdout: str | None = None, stderr: str = "") -> Callable[[ExecutionResult], bool]:
    """It ended by itself, with this exit code, having printed this."""

    def is_true(result: ExecutionResult) -> bool:
        return (
            (exit_code is None or result.exit_code == exit_code)
            and not result.timed_out
            and result.infra_error is None
            and (result.killed_by is None or (result.exit_code or 0) < 0)
            and (stdout is None or result.stdout == stdout)
            and stderr in result.stderr
        )

    return is_true


def timed_out(result: ExecutionResult) -> bool:
    return result.timed_out and result.exit_code == -9 and "time limit" in (result.killed_by or "")


def died(number: int) -> Callable[[ExecutionResult], bool]:
    return lambda result: (
        (result.exit_code, result.timed_out, result.infra_error) == (-number, False, None) and bool(result.killed_by)
    )


def cut(result: ExecutionResult) -> bool:
    """More was printed than is kept, and it was stopped at some limit."""
    return result.truncated and result.infra_error is None and len(result.stdout + result.stderr) < 50_000


def survived(result: ExecutionResult) -> bool:
    """Anything but a fault of the executor."""
    return result.infra_error is None and result.exit_code is not None


def caught_or_over(result: ExecutionResult) -> bool:
    """What it wrote to the sandbox's descriptor was seen, which is looked for every 50 ms, or it was over before."""
    seen = result.killed_by == "writing to the sandbox's own descriptor" and result.exit_code in (3, -9)
    return not result.timed_out and result.infra_error is None and (seen or ended(3, "a\n")(result))


def stopped(result: ExecutionResult) -> bool:
    """It was ended by force, for its time or for something that it did."""
    return result.exit_code == -9 and bool(result.killed_by) and result.infra_error is None


# code that goes on for ever, and code that prints what it should not
_LOOPS: Final = (
    Disturbance("loop", "while True: pass", timed_out),
    Disturbance("loop-in-c", "sum(range(10**12))", timed_out),
    Disturbance(
        "loop-with-all-signals-blocked",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))\nwhile True: pass",
        timed_out,
    ),
    Disturbance(
        "loop-that-catches-everything", "while True:\n    try:\n        while True: pass\n    except: pass", timed_out
    ),
    Disturbance(
        "thread-that-never-ends",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()",
        timed_out,
    ),
    Disturbance("exit-handler-that-never-ends", "import atexit, time\natexit.register(time.sleep, 99)", timed_out),
    Disturbance("stopped-by-itself", "import os\nos.kill(os.getpid(), 19)", timed_out),
    Disturbance("closed-output", "import os\nos.close(1); os.close(2)\nwhile True: pass", timed_out),
    Disturbance(
        "stdout-without-an-end",
        """
import sys
class A:
    def write(self, _):
        while True: pass
    flush = write
sys.stdout = A()
print('a')
""",
        timed_out,
    ),
    Disturbance(
        "forged-start-and-loop",
        FORGED_FRAMES
        + """
import time
while True:
    for handle in range(3, 64):
        for frame in frames:
            try: os.write(handle, frame)
            except OSError: pass
    time.sleep(0.01)
""",
        stopped,
    ),
    Disturbance(
        "message-that-loops",
        "class A(Exception):\n    def __str__(self):\n        while True: pass\nraise A",
        timed_out,
    ),
)

_OUTPUTS: Final = (
    Disturbance("endless-stdout", "while True: print('x' * 1000)", cut),
    Disturbance("invalid-text", "import os\n_ = os.write(1, b'\\xff\\xfe\\xc3')", ended(stdout="\ufffd\ufffd\ufffd")),
    Disturbance("zero-bytes", "print('\\0' * 3)", ended(stdout="\0\0\0\n")),
    Disturbance("lone-surrogates", "print('\\ud800')", ended(stdout="\\ud800\n")),
    Disturbance(
        "words-of-a-timeout",
        """
print('TimeoutError: killed by time limit of 30 s')
import sys
sys.stderr.write('Killed')
raise TimeoutError('time limit')
""",
        ended(1),
    ),
    Disturbance(
        "output-after-nonblocking",
        "import os\nos.set_blocking(1, False)\nos.set_blocking(2, False)\nprint('a')",
        ended(stdout="a\n"),
    ),
)

# code that ends in strange ways, or breaks what its end depends on
_ENDS: Final = (
    Disturbance("hard-exit", "import os\nprint('a', flush=True)\nos._exit(7)", ended(7, "a\n")),
    Disturbance("hard-exit-as-if-killed", "import os; os._exit(137)", ended(137, "")),
    Disturbance("exit-of-a-giant-number", "import sys\nsys.exit(10**30)", survived),
    Disturbance(
        "exit-with-an-object", "import sys\nclass A:\n    def __str__(self): raise ValueError\nsys.exit(A())", survived
    ),
    Disturbance("abort", "import os; os.abort()", died(6)),
    Disturbance("kill-itself", "import os\nos.kill(os.getpid(), 9)", died(9)),
    Disturbance("interrupt-itself", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)", survived),
    Disturbance("stack-overflow", "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", survived, 0.5),
    Disturbance("close-everything", "import os\nos.closerange(0, 1000)", ended()),
    Disturbance(
        "swap-descriptors", "import os\nfor i in range(3, 30): os.dup2(1, i)\nos.dup2(2, 1)\nprint('a')", ended()
    ),
    Disturbance("closed-stdout", "import sys\nsys.stdout.close()\nprint('a')", ended(1)),
    Disturbance(
        "stdout-that-raises",
        """
import sys
class A:
    def write(self, _): raise OSError
    def flush(self): raise OSError
sys.stdout = sys.stderr = A()
print('a')
""",
        survived,
    ),
    Disturbance(
        "exit-handlers-that-raise", "import atexit\natexit.register(lambda: 1 / 0)\nprint('a')", ended(None, "a\n")
    ),
    Disturbance("no-modules", "import sys\nsys.modules.clear()\n1 / 0", survived),
    Disturbance(
        "no-builtins",
        "import builtins\nfor name in list(vars(builtins)):\n    if name != 'delattr': delattr(builtins, name)",
        survived,
    ),
    Disturbance("main-that-is-gone", "import sys\ndel sys.modules['__main__']\nprint('a')", ended(stdout="a\n")),
    Disturbance(
        "tracing", "import sys\nsys.settrace(lambda *a: 1 / 0)\nsys.setprofile(lambda *a: 1 / 0)\nlen('a')", survived
    ),
    Disturbance(
        "forged-frames",
        FORGED_FRAMES
        + """
for handle in range(3, 256):
    for frame in frames:
        try: os.write(handle, frame)
        except OSError: pass
print('a')
raise SystemExit(3)
""",
        caught_or_over,
    ),
    Disturbance(
        "forged-frames-on-stdout",
        FORGED_FRAMES
        + """
for frame in frames: os.write(1, frame)
raise SystemExit(3)
""",
        ended(3),
    ),
    Disturbance("memory-that-is-not-there", "x = bytearray(10**15)", ended(1, "", "MemoryError")),
)

# code whose error can hardly be shown, and code that is hardly code
_ERRORS: Final = (
    Disturbance("deep-recursion", "def f(): f()\nf()", ended(1, "", "RecursionError")),
    Disturbance("huge-message", "raise ValueError('x' * 10**8)", cut),
    Disturbance(
        "message-that-raises",
        "class A(Exception):\n    def __str__(self): raise ValueError\n    __repr__ = __str__\nraise A",
        ended(1),
    ),
    Disturbance(
        "message-that-exits", "import sys\nclass A(Exception):\n    def __str__(self): sys.exit(0)\nraise A", survived
    ),
    Disturbance("replaced-hook", "import sys\nsys.excepthook = lambda *a: print('b')\n1 / 0", ended(1, "b\n")),
    Disturbance("hook-that-raises", "import sys\nsys.excepthook = lambda *a: 1 / 0\n1 / 0", ended(1)),
    Disturbance(
        "cycle-of-causes",
        "a, b = ValueError('a'), ValueError('b')\na.__cause__, b.__cause__ = b, a\nraise a",
        ended(1, "", "ValueError"),
    ),
    Disturbance(
        "long-chain",
        "e = None\nfor i in range(2000):\n    n = ValueError(i)\n    n.__context__ = e\n    e = n\nraise e",
        ended(1),
    ),
    Disturbance("keyboard-interrupt", "raise KeyboardInterrupt", survived),
    Disturbance(
        "value-that-can-not-be-shown",
        "class A:\n    def __repr__(self): raise ValueError('no')\nA()",
        ended(1, "", "ValueError"),
    ),
    Disturbance("value-of-endless-length", "class A:\n    def __repr__(self): return 'x' * 10**8\nA()", cut),
)

_CODES: Final = (
    Disturbance("empty", "", ended(stdout="")),
    Disturbance("zero-byte-in-the-code", "print(1)\0print(2)", ended(1, "")),
    Disturbance("surrogate-in-the-code", "print('\ud800')", survived),
    Disturbance("other-encoding", "# -*- coding: latin-1 -*-\nprint('\u00e9')", ended(stdout="\u00e9\n")),
    Disturbance("carriage-returns", "print(1)\r\nprint(2)\rprint(3)", ended(stdout="1\n2\n3\n")),
    Disturbance("ten-megabytes", "x = '" + "x" * 10_000_000 + "'\nprint(len(x))", ended(stdout="10000000\n")),
    Disturbance("deep-parentheses", "(" * 100_000 + ")" * 100_000, survived),
    Disturbance("deep-blocks", "".join(" " * i + "if 1:\n" for i in range(200)) + " " * 200 + "pass", ended(1, "")),
    Disturbance("future-annotations", "from __future__ import annotations\nx: nothing = 1\nx", ended(stdout="1\n")),
)

_SOON_S: Final = 0.15
_HURRIED: Final = tuple(replace(loop, timeout_s=_SOON_S) if loop.timeout_s == LONG_S else loop for loop in _LOOPS)
DISTURBANCES: Final[tuple[Disturbance, ...]] = (*_HURRIED, *_OUTPUTS, *_ENDS, *_ERRORS, *_CODES)
