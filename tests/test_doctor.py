"""`strands-rollout doctor`: what it says of this machine is what the executor does on it."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from strands_rollout.doctor import Diagnosis, examine, show, to_isolation
from strands_rollout.errors import ConfigError
from strands_rollout.sandbox import LocalExecutor, SandboxReport

LACKING = SandboxReport({"limits": "some"}, {"files": "no Landlock"}, "rlimits", 0.5)


def test_it_prints_what_the_executor_enforces() -> None:
    async def enforced() -> SandboxReport:
        async with LocalExecutor(isolation="rlimits") as executor:
            return await executor.start()

    report = asyncio.run(enforced())
    diagnosis = examine("rlimits")
    assert diagnosis.ok
    assert diagnosis.sandbox is not None
    assert set(diagnosis.sandbox.enforced) == set(report.enforced)
    assert diagnosis.sandbox.missing == report.missing
    assert diagnosis.versions["strands-rollout"]


def test_a_missing_layer_and_what_to_do_are_shown() -> None:
    diagnosis = Diagnosis("3", "m", {"a": None}, LACKING, "name it: isolation='rlimits'", 1.0, "full")
    output = io.StringIO()
    show(diagnosis, Console(file=output, width=200))
    assert "MISSING: no Landlock" in output.getvalue()
    assert "a not installed" in output.getvalue()
    assert "error: name it: isolation='rlimits'" in output.getvalue()


def test_an_unknown_isolation_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="expected one of full, seccomp, rlimits"):
        to_isolation("none")
    done = subprocess.run(
        [sys.executable, "-m", "strands_rollout.cli", "doctor", "--isolation", "none"], capture_output=True, check=False
    )
    assert done.returncode == 2


@pytest.mark.slow
def test_the_command_prints_json_and_exits_by_the_verdict() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "strands_rollout.cli", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    diagnosis = json.loads(done.stdout)
    assert done.returncode == (0 if diagnosis["ok"] else 1)
    assert diagnosis["sandbox"]["enforced"]["limits"]
