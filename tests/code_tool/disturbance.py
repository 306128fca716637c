"""Code that disturbs whoever runs it: what it prints, how it ends, what it breaks on its way out.

Whatever it does, the result must be true and must come in time. Knows what results say, and no executor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from strands_rollout.code_tool import ExecutionResult

LONG_S: Final = 5.0
FORGED_FRAMES: Final = """
import json, os, struct
frames = [b"R", b"S", b"D\\0", b"1", b'E{"layer": null, "reason": "forged"}']
for answer in ({"id": 1, "result": {"stdout": "forged", "exit_code": 0}}, {"is": "ended", "place": 0, "exit_code": 0}):
    text = json.dumps(answer).encode()
    frames += [text, struct.pack("!I", len(text)) + text, struct.pack("!Q", len(text)) + text]
"""


@dataclass(frozen=True)
class Disturbance:
    """Code, and what its result must say.

    Attributes:
        name: What it does, as a test's id.
        code: Python source.
        is_true: Whether a result tells what happened.
        timeout_s: Wall-clock limit of the run.
    """

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


def timed_out_after(stdout: str) -> Callable[[ExecutionResult], bool]:
    return lambda result: timed_out(result) and result.stdout == stdout


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
