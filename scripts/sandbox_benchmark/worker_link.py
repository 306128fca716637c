"""The benchmark's side of a worker process: starts it, gives it orders, ends it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any, Final, Self

from strands_rollout.errors import SandboxError

_START: Final = "from sandbox_benchmark.worker import main; main()"
_ANSWER_LIMIT_S: Final = 900.0
_END_LIMIT_S: Final = 30.0


class WorkerLink:
    """One contender in a process of its own.

    Args:
        name: The contender's.
        python: The interpreter of the environment that has it.
        places: Calls that it must be able to run at once; None for its default.

    Attributes:
        name: As given.
        keeps_sessions: Whether the contender does.

    Raises:
        SandboxError: It did not start.
    """

    def __init__(self, name: str, python: str, places: int | None = None) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has ended
        start = f"import sys; sys.path.append({str(Path(__file__).parents[1])!r}); {_START}"
        self._process = subprocess.Popen(  # noqa: S603 - a fixed command
            [python, "-c", start, name, json.dumps(places)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(python),
            text=True,
        )
        try:
            self.keeps_sessions = bool(self._answer())
        except BaseException:  # whatever it was, the process must not be left
            self.close()
            raise

    def ask(self, do: str, **arguments: Any) -> Any:  # noqa: ANN401 - JSON
        """Have something measured; see `measures`.

        Raises:
            SandboxError: The contender failed.
        """
        assert self._process.stdin is not None  # noqa: S101 - asked for above
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process. Safe to call twice."""
        if self._errors.closed:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None  # noqa: S101 - asked for above
            pipe.close()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _answer(self) -> Any:  # noqa: ANN401 - JSON
        assert self._process.stdout is not None  # noqa: S101 - asked for above
        watchdog = threading.Timer(_ANSWER_LIMIT_S, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        answer = json.loads(line) if line else {"error": f"its process ended{self._last_words()}"}
        if "error" in answer:
            raise SandboxError(f"the contender {self.name!r} failed: {answer['error']}")
        return answer["value"]

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        return f"; its last words were: {text[-1500:]}" if text else ""


def _environment(python: str) -> dict[str, str]:
    """Ours, with the worker's own `python` first on the PATH: camel-ai starts that."""
    path = os.pathsep.join([str(Path(python).absolute().parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path}
