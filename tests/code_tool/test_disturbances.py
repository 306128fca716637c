"""Code that disturbs its supervisor: the result is correct and in time, and the next run is unaffected."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import pytest

from strands_rollout.code_tool import CodeExecutor, ExecutionResult

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the expected results are Linux's")

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
    is_correct: Callable[[ExecutionResult], bool]
    timeout_s: float = _LONG_S


def ends(exit_code: int | None = 0, stdout: str | None = None, stderr: str = "") -> Callable[[ExecutionResult], bool]:
    """Return a check: the code ended by itself with this exit code and output; None accepts any."""

    def is_correct(result: ExecutionResult) -> bool:
        return (
            (exit_code is None or result.exit_code == exit_code)
            and not result.timed_out
            and result.infra_error is None
            and (result.killed_by is None or (result.exit_code or 0) < 0)
            and (stdout is None or result.stdout == stdout)
            and stderr in result.stderr
        )

    return is_correct


def timed_out(result: ExecutionResult) -> bool:
    return result.timed_out and result.exit_code == -9 and "time limit" in (result.killed_by or "")


def dies_of(number: int) -> Callable[[ExecutionResult], bool]:
    return lambda result: (
        (result.exit_code, result.timed_out, result.infra_error) == (-number, False, None) and bool(result.killed_by)
    )


def is_cut(result: ExecutionResult) -> bool:
    """Return whether output was dropped, without a fault of the executor."""
    return result.truncated and result.infra_error is None and len(result.stdout + result.stderr) < 50_000


def has_no_infra_error(result: ExecutionResult) -> bool:
    """Return whether the run has an exit code and no fault of the executor."""
    return result.infra_error is None and result.exit_code is not None


def is_caught_or_ended(result: ExecutionResult) -> bool:
    """Return whether the check, made every 50 ms, saw the write to the sandbox's descriptor, or came after the end."""
    detected = result.killed_by == "writing to the sandbox's own descriptor" and result.exit_code in (3, -9)
    return not result.timed_out and result.infra_error is None and (detected or ends(3, "a\n")(result))


# code that never ends, and code with unusual output
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
    Disturbance("endless-stdout", "while True: print('x' * 1000)", is_cut),
    Disturbance("invalid-text", "import os\n_ = os.write(1, b'\\xff\\xfe\\xc3')", ends(stdout="\ufffd\ufffd\ufffd")),
    Disturbance("zero-bytes", "print('\\0' * 3)", ends(stdout="\0\0\0\n")),
    Disturbance("lone-surrogates", "print('\\ud800')", ends(stdout="\\ud800\n")),
)

# code that ends in unusual ways, or breaks the interpreter's shutdown
_ENDS: Final = (
    Disturbance("hard-exit", "import os\nprint('a', flush=True)\nos._exit(7)", ends(7, "a\n")),
    Disturbance("exit-of-a-giant-number", "import sys\nsys.exit(10**30)", has_no_infra_error),
    Disturbance("abort", "import os; os.abort()", dies_of(6)),
    Disturbance("kill-itself", "import os\nos.kill(os.getpid(), 9)", dies_of(9)),
    Disturbance(
        "stack-overflow", "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", has_no_infra_error, 0.5
    ),
    Disturbance("close-everything", "import os\nos.closerange(0, 1000)", ends()),
    Disturbance(
        "swap-descriptors", "import os\nfor i in range(3, 30): os.dup2(1, i)\nos.dup2(2, 1)\nprint('a')", ends()
    ),
    Disturbance("closed-stdout", "import sys\nsys.stdout.close()\nprint('a')", ends(1)),
    Disturbance(
        "exit-handlers-that-raise", "import atexit\natexit.register(lambda: 1 / 0)\nprint('a')", ends(None, "a\n")
    ),
    Disturbance("no-modules", "import sys\nsys.modules.clear()\n1 / 0", has_no_infra_error),
    Disturbance(
        "no-builtins",
        "import builtins\nfor name in list(vars(builtins)):\n    if name != 'delattr': delattr(builtins, name)",
        has_no_infra_error,
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
        is_caught_or_ended,
    ),
    Disturbance("more-memory-than-exists", "x = bytearray(10**15)", ends(1, "", "MemoryError")),
)

# code whose error is hard to show, and unusual source text
_ERRORS: Final = (
    Disturbance("deep-recursion", "def f(): f()\nf()", ends(1, "", "RecursionError")),
    Disturbance(
        "message-that-raises",
        "class A(Exception):\n    def __str__(self): raise ValueError\n    __repr__ = __str__\nraise A",
        ends(1),
    ),
    Disturbance(
        "message-that-exits",
        "import sys\nclass A(Exception):\n    def __str__(self): sys.exit(0)\nraise A",
        has_no_infra_error,
    ),
    Disturbance("replaced-hook", "import sys\nsys.excepthook = lambda *a: print('b')\n1 / 0", ends(1, "b\n")),
    Disturbance(
        "cycle-of-causes",
        "a, b = ValueError('a'), ValueError('b')\na.__cause__, b.__cause__ = b, a\nraise a",
        ends(1, "", "ValueError"),
    ),
    Disturbance("keyboard-interrupt", "raise KeyboardInterrupt", has_no_infra_error),
    Disturbance(
        "value-without-repr",
        "class A:\n    def __repr__(self): raise ValueError('no')\nA()",
        ends(1, "", "ValueError"),
    ),
    Disturbance("value-of-endless-length", "class A:\n    def __repr__(self): return 'x' * 10**8\nA()", is_cut),
)

_CODES: Final = (
    Disturbance("empty", "", ends(stdout="")),
    Disturbance("zero-byte-in-the-code", "print(1)\0print(2)", ends(1, "")),
    Disturbance("surrogate-in-the-code", "print('\ud800')", has_no_infra_error),
    Disturbance("carriage-returns", "print(1)\r\nprint(2)\rprint(3)", ends(stdout="1\n2\n3\n")),
    Disturbance("ten-megabytes", "x = '" + "x" * 10_000_000 + "'\nprint(len(x))", ends(stdout="10000000\n")),
    Disturbance("deep-parentheses", "(" * 100_000 + ")" * 100_000, has_no_infra_error),
    Disturbance("future-annotations", "from __future__ import annotations\nx: nothing = 1\nx", ends(stdout="1\n")),
)

_DISTURBANCES: Final = [
    pytest.param(each, id=each.name)
    for each in (*(replace(loop, timeout_s=0.15) for loop in _LOOPS), *_OUTPUTS, *_ENDS, *_ERRORS, *_CODES)
]
_PROBE: str = "import random, sys\nprint(len(sys.argv), sys.gettrace(), isinstance(1, int), sorted([2, 1]))\n1 / 0"
_SPARE_S = 30.0  # longer means a hang


@pytest.mark.parametrize("disturbance", _DISTURBANCES)
async def test_local_executor_result_after_disturbance(disturbance: Disturbance, isolated: CodeExecutor) -> None:
    async with asyncio.timeout(disturbance.timeout_s + _SPARE_S):
        result = await isolated.run(disturbance.code, timeout_s=disturbance.timeout_s)
    assert disturbance.is_correct(result), result
    after = await isolated.run(_PROBE, timeout_s=30)
    assert (after.stdout, after.exit_code) == ("1 None True [1, 2]\n", 1)
    assert after.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.slow
@pytest.mark.parametrize("disturbance", _DISTURBANCES)
async def test_plain_backend_result_after_disturbance(disturbance: Disturbance, plain: CodeExecutor) -> None:
    result = await plain.run(disturbance.code, timeout_s=disturbance.timeout_s)
    assert disturbance.is_correct(result), result
