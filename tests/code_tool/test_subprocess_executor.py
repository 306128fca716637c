"""The subprocess backend: what code sees, what it prints, how it is limited, and what is left of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from processes import ends

from strands_rollout.code_tool import CodeExecutor, ExecutionResult, SubprocessExecutor
from strands_rollout.errors import ConfigError, SandboxError

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the limit or the check is Linux's")


@pytest.fixture
async def executor() -> AsyncIterator[SubprocessExecutor]:
    async with SubprocessExecutor(timeout_s=20) as executor:
        yield executor


def test_the_backend_is_a_code_executor() -> None:
    assert isinstance(SubprocessExecutor(), CodeExecutor)


async def test_code_may_start_processes(executor: SubprocessExecutor) -> None:
    result = await executor.run(
        "import multiprocessing\nwith multiprocessing.Pool(2) as p: print(p.map(abs, [-1, -2]))"
    )
    assert result.stdout == "[1, 2]\n"


async def test_a_timeout_kills_the_whole_process_group(executor: SubprocessExecutor) -> None:
    code = "import subprocess, time\nprint(subprocess.Popen(['sleep', '60']).pid)\ntime.sleep(60)"
    result = await executor.run(code, timeout_s=0.5)
    assert result.timed_out
    assert ends(int(result.stdout))


async def test_a_child_of_the_code_does_not_survive_it(executor: SubprocessExecutor) -> None:
    code = "import subprocess\nprint(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    assert ends(int((await executor.run(code)).stdout))


async def test_an_escaped_process_that_holds_the_pipes_is_not_waited_for(executor: SubprocessExecutor) -> None:
    code = "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(40)\nelse: print('done')"
    result = await asyncio.wait_for(executor.run(code), 30)
    assert result.stdout == "done\n"


@LINUX
async def test_memory_is_limited() -> None:
    async with SubprocessExecutor(memory_mb=256) as executor:
        result = await executor.run("keep = []\nwhile True: keep.append('x' * 10**6)")
        assert result.stderr.endswith("MemoryError\n"), result
        assert result.exit_code == 1


async def test_files_are_limited_in_size() -> None:
    async with SubprocessExecutor(file_mb=1) as executor:
        result = await executor.run("open('f', 'wb').write(b'0' * (2 << 20))")
        assert "File too large" in result.stderr


async def test_endless_output_is_cut_and_stopped() -> None:
    async with SubprocessExecutor(max_output_chars=100, max_output_mb=2) as executor:
        result = await executor.run("print('head')\nwhile True: print('y' * 99)")
    assert (result.killed_by, result.truncated) == ("output limit of 2 MiB", True)
    head, marker, _ = result.stdout.split("\n... ", 1)[0], *result.stdout.split(" characters dropped] ...\n")
    assert head.startswith("head\nyyy")
    assert int(marker.rpartition("[")[2]) > 2_000_000
    assert len(result.stdout) < 200


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
async def test_an_interpreter_that_does_not_start_is_an_infrastructure_error(
    executor: SubprocessExecutor, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    monkeypatch.setattr(sys, "executable", python)
    result = await executor.run("1")
    assert result.infra_error
    assert (result.stdout, result.timed_out) == ("", False)


async def test_a_full_disk_is_an_infrastructure_error(
    executor: SubprocessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/tmp")
    assert "/nowhere/tmp" in ((await executor.run("1")).infra_error or "")


async def test_the_scratch_directory_is_always_removed(
    executor: SubprocessExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    await executor.run("import os; os.makedirs('a/b'); open('a/b/c', 'w').close(); os.chmod('a', 0)")
    await executor.run("open('f', 'w').write('x')\nwhile True: pass", timeout_s=0.2)
    await executor.run("import os; os.abort()")
    assert os.listdir(scratch) == []  # noqa: PTH208


def written_number(note: Path) -> int:
    while not (note.exists() and note.read_text().endswith("\n")):
        time.sleep(0.02)
    return int(note.read_text())


async def test_cancelling_kills_the_child(executor: SubprocessExecutor, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"import os, time\nopen({str(note)!r}, 'w').write(f'{{os.getpid()}}\\n')\ntime.sleep(60)"
    running = asyncio.create_task(executor.run(code))
    pid = await asyncio.to_thread(written_number, note)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ends(pid)


async def test_no_more_run_at_once_than_allowed_and_waiting_costs_no_time_limit() -> None:
    code = "import time; print(time.time()); time.sleep(0.3); time.time()"
    async with SubprocessExecutor(max_concurrency=2, timeout_s=5) as executor:
        results = await asyncio.gather(*(executor.run(code, timeout_s=5) for _ in range(6)))
    spans = [tuple(map(float, result.stdout.split())) for result in results]
    for start, _ in spans:
        assert sum(other_start <= start < other_end for other_start, other_end in spans) <= 2
    assert not any(result.timed_out for result in results)


async def test_children_are_never_started_on_the_loops_thread(
    executor: SubprocessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    starters: list[int] = []

    class RecordingPopen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            starters.append(threading.get_ident())
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", RecordingPopen)
    results = await asyncio.gather(*(executor.run("1 + 1") for _ in range(4)))
    assert [result.stdout for result in results] == ["2\n"] * 4
    assert len(starters) == 4
    assert threading.get_ident() not in starters


def test_loops_of_several_threads_share_one_executor() -> None:
    executor = SubprocessExecutor()
    results: list[ExecutionResult] = []
    threads = [threading.Thread(target=lambda: results.append(asyncio.run(executor.run("1 + 1")))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(executor.aclose())
    assert [result.stdout for result in results] == ["2\n"] * 3


async def test_a_closed_executor_refuses() -> None:
    executor = SubprocessExecutor()
    assert (await executor.run("1")).stdout == "1\n"
    await executor.aclose()
    await executor.aclose()
    with pytest.raises(SandboxError, match="after aclose"):
        await executor.run("1")


async def test_sessions_are_refused_by_name(executor: SubprocessExecutor) -> None:
    with pytest.raises(ConfigError, match="keeps no sessions"):
        await executor.run("1", session="episode-1")
