"""Strands' sandboxes as a code executor: the local one for real, others for the ways in which they differ and fail."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from processes import ends
from strands.sandbox import ExecutionResult as StrandsResult
from strands.sandbox import PosixShellSandbox, StreamChunk
from strands.sandbox.errors import SandboxTimeoutError
from strands.sandbox.not_a_sandbox_local_environment import NotASandboxLocalEnvironment

from strands_rollout.code_tool import strands_sandbox
from strands_rollout.code_tool.executors import CodeExecutor, ExecutionResult
from strands_rollout.code_tool.strands_sandbox import StrandsSandboxExecutor
from strands_rollout.errors import ConfigError, SandboxError

LocalSandbox = NotASandboxLocalEnvironment
LOCAL_PATH = "strands.sandbox.not_a_sandbox_local_environment.NotASandboxLocalEnvironment"


class Scripted(LocalSandbox):
    """The local one, with something done before or instead of each run."""

    def __init__(self, act: Callable[[int], Any]) -> None:
        self.act = act
        self.calls = 0
        self.threads: set[int] = set()

    async def execute_streaming(self, command: str, **more: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        self.calls += 1
        self.threads.add(threading.get_ident())
        found = self.act(self.calls)
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, list):
            for item in found:
                yield item
            return
        async for item in super().execute_streaming(command, **more):
            if not (found == "only the end" and isinstance(item, StreamChunk)):
                yield item


@pytest.fixture
async def executor() -> AsyncIterator[StrandsSandboxExecutor]:
    async with StrandsSandboxExecutor(LocalSandbox(), timeout_s=20) as executor:
        yield executor


def test_the_backend_is_a_code_executor() -> None:
    assert isinstance(StrandsSandboxExecutor(LocalSandbox()), CodeExecutor)


@pytest.mark.parametrize(
    ("code", "stdout"),
    [
        ("print(1)", "1\n"),
        ("x = 2\nx + 3", "5\n"),
        ("None", ""),
        ("__name__", "'__main__'\n"),
        ("import sys; sys.stdin.read()", "''\n"),
        ("print('é', '\\ud800', \"'; $HOME `ls`\")", "é \\ud800 '; $HOME `ls`\n"),
        ("import os; print(os.listdir()); os.getcwd() == os.environ['HOME']", "[]\nTrue\n"),
    ],
)
async def test_code_runs_as_a_script_whose_last_expression_is_shown(
    executor: StrandsSandboxExecutor, code: str, stdout: str
) -> None:
    result = await executor.run(code)
    assert (result.stdout, result.stderr, result.exit_code) == (stdout, "", 0)
    assert (result.infra_error, result.killed_by) == (None, None)


async def test_errors_show_the_codes_own_frames_and_no_machine_paths(executor: StrandsSandboxExecutor) -> None:
    result = await executor.run("import json\njson.loads('[')")
    assert result.stderr.startswith('Traceback (most recent call last):\n  File "<code>", line 2, in <module>\n')
    assert result.stderr.count("File ") == 1
    assert (result.exit_code, result.infra_error) == (1, None)
    assert "SyntaxError" in (await executor.run("1+")).stderr


async def test_the_callers_environment_is_not_visible(
    executor: StrandsSandboxExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert "secret" not in (await executor.run("import os; print(os.environ); os.system('env')")).stdout


async def test_a_timeout_keeps_what_was_printed(executor: StrandsSandboxExecutor) -> None:
    result = await executor.run("print('before')\nwhile True: pass", timeout_s=0.4)
    assert (result.timed_out, result.exit_code, result.stdout) == (True, -signal.SIGKILL, "before\n")
    assert result.killed_by == "time limit of 0.4 s"
    assert result.duration_s > 0.35


async def test_a_signal_becomes_words(executor: StrandsSandboxExecutor) -> None:
    result = await executor.run("import os; os.abort()")
    assert (result.exit_code, result.killed_by) == (-signal.SIGABRT, "SIGABRT (abort)")


async def test_long_output_is_cut_in_the_middle() -> None:
    async with StrandsSandboxExecutor(LocalSandbox(), max_output_chars=100) as executor:
        result = await executor.run("print('head' + 'x' * 10**6 + 'tail')")
    assert result.truncated
    assert (result.stdout[:7], result.stdout[-8:]) == ("headxxx", "xxxtail\n")
    assert len(result.stdout) < 160


async def test_code_longer_than_a_command_line_is_the_codes_fault(executor: StrandsSandboxExecutor) -> None:
    noise = os.urandom(100_000).hex()
    result = await executor.run(f"print({noise!r})")
    assert "too long for this sandbox" in result.stderr
    assert (result.exit_code, result.infra_error) == (1, None)


async def test_cancelling_ends_the_code_where_the_sandbox_ends_its_processes(
    executor: StrandsSandboxExecutor, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    code = f"import os, time\nopen({str(note)!r}, 'w').write(f'{{os.getpid()}}\\n')\ntime.sleep(60)"
    running = asyncio.create_task(executor.run(code))
    pid = await asyncio.to_thread(written_number, note)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ends(pid)


def written_number(note: Path) -> int:
    while not (note.exists() and note.read_text().endswith("\n")):
        time.sleep(0.02)
    return int(note.read_text())


@pytest.mark.parametrize(
    "code",
    [
        "1",
        "import os; os.makedirs('a/b'); open('a/b/c', 'w').close()",
        "open('f', 'w').write('x')\nwhile True: pass",
        "import os; open('f', 'w').close(); os.kill(os.getppid(), 9)",
    ],
    ids=["nothing", "folders", "timeout", "no supervisor"],
)
async def test_the_scratch_directory_is_removed(
    executor: StrandsSandboxExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert str(tmp_path) in (await executor.run("import os; os.getcwd()")).stdout
    await executor.run(code, timeout_s=0.3)
    assert os.listdir(tmp_path) == []  # noqa: PTH208


# ---- sandboxes that differ, and that fail


async def test_a_sandbox_that_streams_nothing_will_do() -> None:
    async with StrandsSandboxExecutor(Scripted(lambda _: "only the end")) as executor:
        assert (await executor.run("1 + 1")).stdout == "2\n"


async def test_a_sandbox_that_fails_once_is_asked_again() -> None:
    sandbox = Scripted(lambda call: ConnectionError("container is gone") if call == 1 else None)
    async with StrandsSandboxExecutor(sandbox) as executor:
        assert (await executor.run("1 + 1")).stdout == "2\n"
    assert sandbox.calls == 2


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (ConnectionError("container is gone"), "Scripted: ConnectionError: container is gone"),
        ([StrandsResult(127, "", "docker is not installed or not on PATH")], "docker is not installed"),
        ([StreamChunk("Permission denied", "stderr"), StrandsResult(255, "", "")], "Permission denied"),
        ([], "exit code None"),
        (SandboxTimeoutError(3), "did not end in time"),
    ],
    ids=["raises", "no docker", "no access", "silent", "timeout before the start"],
)
async def test_a_sandbox_that_fails_is_an_infrastructure_error(found: Any, words: str) -> None:
    sandbox = Scripted(lambda _: found)
    async with StrandsSandboxExecutor(sandbox) as executor:
        result = await executor.run("1")
    assert words in (result.infra_error or "")
    assert (result.stdout, result.stderr, result.exit_code) == ("", "", None)
    assert sandbox.calls == 2


async def test_a_missing_python_is_an_infrastructure_error() -> None:
    async with StrandsSandboxExecutor(LocalSandbox(), language="python_is_not_here") as executor:
        assert "python_is_not_here" in ((await executor.run("1")).infra_error or "")


@pytest.mark.slow
async def test_a_sandbox_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(PosixShellSandbox):
        async def execute_streaming(self, command: str, **more: Any) -> AsyncIterator[Any]:  # type: ignore[override]
            await asyncio.sleep(60)
            yield

    monkeypatch.setattr(strands_sandbox, "_GIVE_UP_MARGIN_S", 0.1)
    monkeypatch.setattr(strands_sandbox, "START_ALLOWANCE_S", 0.1)
    async with StrandsSandboxExecutor(Hanging()) as executor:
        assert "did not end in time" in ((await executor.run("1", timeout_s=0.1)).infra_error or "")


@pytest.mark.slow
async def test_a_supervisor_that_the_code_stopped_is_the_codes_time_limit_and_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(strands_sandbox, "START_ALLOWANCE_S", 0.5)
    note = tmp_path / "pids"
    code = f"import os, signal\nopen({str(note)!r}, 'w').write(f'{{os.getpid()}} {{os.getppid()}}')\n"
    async with StrandsSandboxExecutor(LocalSandbox()) as executor:
        result = await executor.run(f"{code}os.kill(os.getppid(), signal.SIGSTOP)\nwhile True: pass", timeout_s=0.5)
    assert (result.timed_out, result.infra_error) == (True, None)
    assert all(ends(int(pid)) for pid in note.read_text().split())


# ---- places, loops, closing


@pytest.mark.slow
async def test_no_more_run_at_once_than_allowed_and_waiting_costs_no_time_limit() -> None:
    code = "import time; print(time.time()); time.sleep(0.3); time.time()"
    async with StrandsSandboxExecutor(LocalSandbox(), max_concurrency=2) as executor:
        results = await asyncio.gather(*(executor.run(code, timeout_s=3) for _ in range(6)))
    spans = [tuple(map(float, result.stdout.split())) for result in results]
    for start, _ in spans:
        assert sum(other_start <= start < other_end for other_start, other_end in spans) <= 2
    assert max(result.queued_s for result in results) > 0.5


async def test_processes_are_never_started_on_the_callers_loop() -> None:
    sandbox = Scripted(lambda _: None)
    async with StrandsSandboxExecutor(sandbox) as executor:
        await asyncio.gather(*(executor.run("1") for _ in range(3)))
    assert threading.get_ident() not in sandbox.threads


def test_loops_of_several_threads_share_one_executor() -> None:
    executor = StrandsSandboxExecutor(LocalSandbox())
    results: list[ExecutionResult] = []
    threads = [threading.Thread(target=lambda: results.append(asyncio.run(executor.run("1 + 1")))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(executor.aclose())
    assert [result.stdout for result in results] == ["2\n"] * 3


async def test_a_closed_executor_refuses() -> None:
    executor = StrandsSandboxExecutor(LocalSandbox())
    await executor.run("1")
    await executor.aclose()
    await executor.aclose()
    with pytest.raises(SandboxError, match="after aclose"):
        await executor.run("1")


async def test_a_sandbox_is_found_by_its_path_and_made() -> None:
    async with StrandsSandboxExecutor(LOCAL_PATH) as executor:
        assert (await executor.run("1 + 1")).stdout == "2\n"


@pytest.mark.parametrize("sandbox", [None, "nowhere.at_all", "os.getcwd", object()])
def test_what_is_no_sandbox_is_refused(sandbox: Any) -> None:
    with pytest.raises(ConfigError, match="sandbox"):
        StrandsSandboxExecutor(sandbox)


async def test_sessions_and_bad_limits_are_refused(executor: StrandsSandboxExecutor) -> None:
    with pytest.raises(ConfigError, match="keeps no sessions"):
        await executor.run("1", session="episode-1")
    with pytest.raises(ConfigError, match="timeout_s"):
        StrandsSandboxExecutor(LocalSandbox(), timeout_s=-1)
    await executor.close_session("episode-1")
