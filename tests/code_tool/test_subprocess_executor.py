"""`SubprocessExecutor`: limits, escaped processes, forged reports, and faults of the machine."""

import asyncio
import base64
import json
import sys
import tempfile
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from strands_rollout.code_tool import SubprocessExecutor
from strands_rollout.code_tool.remote import RemoteProgram

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limit or check")


@pytest.fixture
async def executor() -> AsyncIterator[SubprocessExecutor]:
    async with SubprocessExecutor(timeout_s=20) as executor:
        yield executor


async def test_subprocess_executor_ignores_escaped_process(executor: SubprocessExecutor) -> None:
    code = "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(40)\nelse: print('done')"
    result = await asyncio.wait_for(executor.run(code), 30)
    assert result.stdout == "done\n"


_TRUE: dict[str, Any] = {
    "stdout": "true\n",
    "stderr": "",
    "exit_code": 0,
    "timed_out": False,
    "truncated": False,
    "duration_s": 0.5,
    "killed_by": None,
}


@pytest.mark.parametrize(
    "forged",
    [
        *({"exit_code": value} for value in (10**30, -(10**30), 2**32, "1" * 4301, "x", None, [], float("inf"))),
        *({"duration_s": value} for value in (float("nan"), float("inf"), -1, "x", None)),
        *({name: ()} for name in ("exit_code", "duration_s")),
        {"exit_code": 10**4000},
    ],
)
def test_remote_program_ignores_forged_report(forged: dict[str, Any]) -> None:
    program = RemoteProgram("1", 5.0, 100, 1 << 20)

    def line(report: object) -> str:
        return f"{program.token} report {base64.b64encode(zlib.compress(json.dumps(report).encode())).decode()}\n"

    printed = f"{program.token} start\n{line(_TRUE)}{line(_TRUE | forged)}{line([1])}{line('x')}"
    result = program.result(printed, "", 0)
    assert (result.stdout, result.exit_code, result.duration_s) == ("true\n", 0, 0.5)
    alone = program.result(f"{program.token} start\n{line(_TRUE | forged)}", "", 0)
    assert (alone.infra_error, alone.killed_by) == (None, "the end of its supervisor")
    long = program.result(f"{program.token} start\n{line(_TRUE | {'killed_by': 'x' * 9999})}", "", 0)
    assert len(long.killed_by or "") < 1000


@LINUX
async def test_subprocess_executor_limits_memory() -> None:
    async with SubprocessExecutor(memory_mb=256) as executor:
        result = await executor.run("keep = []\nwhile True: keep.append('x' * 10**6)")
        assert result.stderr.endswith("MemoryError\n"), result
        assert result.exit_code == 1


async def test_subprocess_executor_limits_file_size() -> None:
    async with SubprocessExecutor(file_mb=1) as executor:
        result = await executor.run("open('f', 'wb').write(b'0' * (2 << 20))")
        assert "File too large" in result.stderr


async def test_subprocess_executor_stops_endless_output() -> None:
    async with SubprocessExecutor(max_output_chars=100, max_output_mb=2) as executor:
        result = await executor.run("print('head')\nwhile True: print('y' * 99)")
    assert (result.killed_by, result.truncated) == ("output limit of 2 MiB", True)
    head, marker, _ = result.stdout.split("\n... ", 1)[0], *result.stdout.split(" characters dropped] ...\n")
    assert head.startswith("head\nyyy")
    assert int(marker.rpartition("[")[2]) > 2_000_000
    assert len(result.stdout) < 200


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
async def test_subprocess_executor_start_failure_is_infra_error(executor, monkeypatch, python) -> None:
    monkeypatch.setattr(sys, "executable", python)
    result = await executor.run("1")
    assert result.infra_error
    assert (result.stdout, result.timed_out) == ("", False)


async def test_subprocess_executor_full_disk_is_infra_error(executor, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/tmp")
    assert "/nowhere/tmp" in ((await executor.run("1")).infra_error or "")
