"""Asks another program, for a limited time: one that hangs, in the kernel even, must not hang us."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_END_S: Final = 1.0  # what a killed process gets to end before it is left alone


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program said.

    Attributes:
        exit_code: None where it did not end in time.
        stdout: Stripped.
        stderr: Stripped.
    """

    exit_code: int | None
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        """Whether it ended, and well."""
        return self.exit_code == 0

    @property
    def words(self) -> str:
        """What it printed, on one line, errors first; its exit code where it printed nothing."""
        text = " ".join(f"{self.stderr} {self.stdout}".split())
        return text[:300] or f"exit code {self.exit_code}"


def ask(*command: str, env: Mapping[str, str], limit_s: float) -> Answer | None:
    """Run a program of `env`'s PATH without input; None where there is none of that name.

    Args:
        command: Its name and arguments.
        env: Its environment.
        limit_s: Seconds after which it is killed, with all that it started.
    """
    program = shutil.which(command[0], path=env.get("PATH", ""))
    if program is None:
        return None
    process = subprocess.Popen(  # noqa: S603 - named by our checks
        [program, *command[1:]],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return Answer(None, "", "")
    return Answer(process.returncode, stdout.strip(), stderr.strip())


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # one that waits inside a driver can't be killed, and is left behind
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
