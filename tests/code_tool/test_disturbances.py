"""Code that disturbs its supervisor: the result is true and in time, and the next run is unaffected."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import pytest

from strands_rollout.code_tool import CodeExecutor, ExecutionResult

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what the kernel does to code is Linux's")

_LONG_S: Final = 30.0
_FORGED_FRAMES: Final = """
import json, os, struct
frames = [b"R", b"S", b"D\\0", b"1", b'E{"layer": null, "reason": "forged"}']
for answer in ({"id": 1, "result": {"stdout": "forged", "exit_code": 0}}, {"is": "ended", "slot": 0, "exit_code": 0}):
    text = json.dumps(answer).encode()
    frames += [text, struct.pack("!I", len(text)) + text, struct.pack("!Q", len(text)) + text]
"""


@dataclass(frozen=True)
class Disturbance:
    name: str
    code: str
    is_true: Callable[[ExecutionResult], bool]
    timeout_s: float = _LONG_S


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
        "thread-that-never-ends",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()",
        timed_out,
    ),
    Disturbance("exit-handler-that-never-ends", "import atexit, time\natexit.register(time.sleep, 99)", timed_out),
    Disturbance("stopped-by-itself", "import os\nos.kill(os.getpid(), 19)", timed_out),
    Disturbance("closed-output", "import os\nos.close(1); os.close(2)\nwhile True: pass", timed_out),
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
)

# code that ends in strange ways, or breaks what its end depends on
_ENDS: Final = (
    Disturbance("hard-exit", "import os\nprint('a', flush=True)\nos._exit(7)", ended(7, "a\n")),
    Disturbance("exit-of-a-giant-number", "import sys\nsys.exit(10**30)", survived),
    Disturbance("abort", "import os; os.abort()", died(6)),
    Disturbance("kill-itself", "import os\nos.kill(os.getpid(), 9)", died(9)),
    Disturbance("stack-overflow", "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", survived, 0.5),
    Disturbance("close-everything", "import os\nos.closerange(0, 1000)", ended()),
    Disturbance(
        "swap-descriptors", "import os\nfor i in range(3, 30): os.dup2(1, i)\nos.dup2(2, 1)\nprint('a')", ended()
    ),
    Disturbance("closed-stdout", "import sys\nsys.stdout.close()\nprint('a')", ended(1)),
    Disturbance(
        "exit-handlers-that-raise", "import atexit\natexit.register(lambda: 1 / 0)\nprint('a')", ended(None, "a\n")
    ),
    Disturbance("no-modules", "import sys\nsys.modules.clear()\n1 / 0", survived),
    Disturbance(
        "no-builtins",
        "import builtins\nfor name in list(vars(builtins)):\n    if name != 'delattr': delattr(builtins, name)",
        survived,
    ),
    Disturbance(
        "forged-frames",
        _FORGED_FRAMES
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
    Disturbance("memory-that-is-not-there", "x = bytearray(10**15)", ended(1, "", "MemoryError")),
)

# code whose error can hardly be shown, and code that is hardly code
_ERRORS: Final = (
    Disturbance("deep-recursion", "def f(): f()\nf()", ended(1, "", "RecursionError")),
    Disturbance(
        "message-that-raises",
        "class A(Exception):\n    def __str__(self): raise ValueError\n    __repr__ = __str__\nraise A",
        ended(1),
    ),
    Disturbance(
        "message-that-exits", "import sys\nclass A(Exception):\n    def __str__(self): sys.exit(0)\nraise A", survived
    ),
    Disturbance("replaced-hook", "import sys\nsys.excepthook = lambda *a: print('b')\n1 / 0", ended(1, "b\n")),
    Disturbance(
        "cycle-of-causes",
        "a, b = ValueError('a'), ValueError('b')\na.__cause__, b.__cause__ = b, a\nraise a",
        ended(1, "", "ValueError"),
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
    Disturbance("carriage-returns", "print(1)\r\nprint(2)\rprint(3)", ended(stdout="1\n2\n3\n")),
    Disturbance("ten-megabytes", "x = '" + "x" * 10_000_000 + "'\nprint(len(x))", ended(stdout="10000000\n")),
    Disturbance("deep-parentheses", "(" * 100_000 + ")" * 100_000, survived),
    Disturbance("future-annotations", "from __future__ import annotations\nx: nothing = 1\nx", ended(stdout="1\n")),
)

_NAMED: Final = [
    pytest.param(each, id=each.name)
    for each in (*(replace(loop, timeout_s=0.15) for loop in _LOOPS), *_OUTPUTS, *_ENDS, *_ERRORS, *_CODES)
]
_TRUTH: str = "import random, sys\nprint(len(sys.argv), sys.gettrace(), isinstance(1, int), sorted([2, 1]))\n1 / 0"
_SPARE_S = 30.0  # only a hang takes longer


@pytest.mark.parametrize("disturbance", _NAMED)
async def test_local_executor_result_after_disturbance(disturbance: Disturbance, isolated: CodeExecutor) -> None:
    async with asyncio.timeout(disturbance.timeout_s + _SPARE_S):
        result = await isolated.run(disturbance.code, timeout_s=disturbance.timeout_s)
    assert disturbance.is_true(result), result
    after = await isolated.run(_TRUTH, timeout_s=30)
    assert (after.stdout, after.exit_code) == ("1 None True [1, 2]\n", 1)
    assert after.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.slow
@pytest.mark.parametrize("disturbance", _NAMED)
async def test_plain_backend_result_after_disturbance(disturbance: Disturbance, plain: CodeExecutor) -> None:
    result = await plain.run(disturbance.code, timeout_s=disturbance.timeout_s)
    assert disturbance.is_true(result), result
