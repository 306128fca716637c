"""Code as a program for a sandbox that runs plain Python scripts elsewhere, and that program's answer as a result.

The program brings its own supervisor (`remote_supervisor.py`), so that the value of a last expression is printed,
tracebacks show only the code's own frames, the time limit starts with the code, and what was printed before it is kept,
whatever the sandbox makes of its scripts' output.

Knows nothing of transports: the backends send the program and bring back what it printed.
"""

from __future__ import annotations

import base64
import functools
import json
import re
import secrets
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from strands_rollout.sandbox.capped_output import shorten
from strands_rollout.sandbox.executor import ExecutionResult
from strands_rollout.sandbox.signal_words import signal_words

START_ALLOWANCE_S: Final = 10.0  # for the interpreter to start and, after the time limit, for the report
MAX_OUTPUT_MB: Final = 64
_SENT: Final = ("remote_supervisor", "bootstrap", "capped_output")
_MAX_REPORT_BYTES: Final = 16 << 20  # unpacked; no honest report comes near it
_UNREADABLE: Final = "[DecodeError]"  # what SandboxFusion puts in the place of output that is not UTF-8
_SHOWN_CHARS: Final = 300


@dataclass(frozen=True, slots=True)
class RemoteProgram:
    """One piece of code to be run once.

    Attributes:
        code: As for `CodeExecutor.run`.
        timeout_s: Wall-clock limit in seconds from the first instruction.
        max_output_chars: Characters kept of stdout and of stderr.
        max_report_bytes: Most bytes that the sandbox can carry on stdout; the output is cut further to fit.
        memory_mb: Address space in mebibytes; None for no limit.
        token: Marks the program's own lines; a new one for each call.
    """

    code: str
    timeout_s: float
    max_output_chars: int
    max_report_bytes: int
    memory_mb: int | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def text(self) -> str:
        """The script, in ASCII; it reads no argument, no file and no stdin."""
        job = {
            "code": self.code,
            "token": self.token,
            "timeout_s": self.timeout_s,
            "max_output_chars": self.max_output_chars,
            "max_output_mb": MAX_OUTPUT_MB,
            "max_report_bytes": self.max_report_bytes,
            "memory_mb": self.memory_mb,
        }
        return (
            "import base64, json, sys, types, zlib\n"
            f"sources, job = (json.loads(zlib.decompress(base64.b64decode(part))) for part in "
            f"({_packed_sources()!r}, {_packed(job)!r}))\n"
            "supervisor = sys.modules['remote_supervisor'] = types.ModuleType('remote_supervisor')\n"
            "exec(compile(sources['remote_supervisor'], '<supervisor>', 'exec'), supervisor.__dict__)\n"
            "supervisor.run(job, sources)\n"
        )

    def result(self, stdout: str, stderr: str, exit_code: int | None, *, gave_up: bool = False) -> ExecutionResult:
        """Read what the program printed.

        Args:
            stdout: All of it; lines that others printed are skipped.
            stderr: For the words of an infrastructure error.
            exit_code: As the sandbox reports it.
            gave_up: The sandbox stopped waiting for the program.
        """
        report = self._report(stdout)
        if report is not None:
            return report
        if f"{self.token} start" not in stdout and not stdout.startswith(_UNREADABLE):
            return ExecutionResult("", "", None, infra_error=_not_started(stdout, stderr, exit_code, gave_up=gave_up))
        # The code started, and nothing reported its end: it ended or stopped its supervisor, or wrote in its name.
        killed_by = f"time limit of {self.timeout_s:g} s" if gave_up else "the end of its supervisor"
        return ExecutionResult("", "", exit_code or -9, timed_out=gave_up, killed_by=killed_by)

    def _report(self, stdout: str) -> ExecutionResult | None:
        """The last report that can be read; None where there is none."""
        lines = re.findall(rf"^{self.token} report ([A-Za-z0-9+/=]+)$", stdout, re.MULTILINE)
        for line in reversed(lines):
            try:
                raw = zlib.decompressobj().decompress(base64.b64decode(line), _MAX_REPORT_BYTES)
                return self._result_of(json.loads(raw))
            except (ValueError, TypeError, KeyError, zlib.error):  # the code wrote a line of its own
                continue
        return None

    def _result_of(self, report: dict[str, Any]) -> ExecutionResult:
        exit_code = int(report["exit_code"])
        killed_by = report["killed_by"]
        return ExecutionResult(
            stdout=shorten(str(report["stdout"]), self.max_output_chars + 50),  # 50: it may hold one marker
            stderr=shorten(str(report["stderr"]), self.max_output_chars + 50),
            exit_code=exit_code,
            timed_out=bool(report["timed_out"]),
            truncated=bool(report["truncated"]),
            duration_s=max(0.0, float(report["duration_s"])),
            killed_by=signal_words(exit_code) if killed_by is None else str(killed_by),
        )


def _not_started(stdout: str, stderr: str, exit_code: int | None, *, gave_up: bool) -> str:
    end = "it did not end in time" if gave_up else f"exit code {exit_code}"
    said = (stderr.strip() or stdout.strip())[-_SHOWN_CHARS:]
    return f"the program did not start in the sandbox ({end}): {said!r}"


def _packed(value: Any) -> str:  # noqa: ANN401 - anything JSON
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


@functools.cache
def _packed_sources() -> str:
    here = Path(__file__)
    return _packed({name: here.with_name(f"{name}.py").read_text("utf-8") for name in _SENT})
