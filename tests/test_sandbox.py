"""The subprocess backend: what code sees, what it prints, how it is limited, and what is left of it."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from strands_rollout.errors import ConfigError, SandboxError
from strands_rollout.sandbox import CodeExecutor, ExecutionResult, SubprocessExecutor

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the limit or the check is Linux's")


@pytest.fixture
async def executor() -> AsyncIterator[SubprocessExecutor]:
    async with SubprocessExecutor(timeout_s=20) as executor:
        yield executor


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat")
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def ends(pid: int, within_s: float = 3.0) -> bool:
    give_up_at = time.monotonic() + within_s
    while is_running(pid) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    return not is_running(pid)


def test_the_backend_is_a_code_executor() -> None:
    assert isinstance(SubprocessExecutor(), CodeExecutor)


@pytest.mark.parametrize(
    ("code", "stdout"),
    [
        ("print(1)", "1\n"),
        ("2 + 3", "5\n"),
        ("x = 2\nx", "2\n"),
        ("print(1)\n'a'", "1\n'a'\n"),
        ("None", ""),
        ("print('x')", "x\n"),
        ("x = 3", ""),
        ("", ""),
        ("print(len(str(7 ** 20000)))", "16902\n"),
        ("import numpy, sympy; numpy.arange(3).sum() + 0", None),
        ("__name__", "'__main__'\n"),
        ("import sys; sys.stdin.read()", "''\n"),
        ("import os, stat; stat.S_ISCHR(os.fstat(0).st_mode)", "True\n"),
        ("print('é', '\\ud800')", "é \\ud800\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    b: int\nA(1)", "A(b=1)\n"),
        ("import pickle\nclass A: pass\npickle.loads(pickle.dumps(A)) is A", "True\n"),
        ("import multiprocessing\nwith multiprocessing.Pool(2) as p: print(p.map(abs, [-1, -2]))", "[1, 2]\n"),
    ],
)
async def test_code_runs_as_a_script_whose_last_expression_is_shown(
    executor: SubprocessExecutor, code: str, stdout: str | None
) -> None:
    result = await executor.run(code)
    assert (result.exit_code, result.killed_by, result.infra_error) == (0, None, None), result
    assert stdout is None or (result.stdout, result.stderr) == (stdout, "")


@pytest.mark.parametrize(
    ("code", "stderr"),
    [
        (
            "def f(x):\n    return 1/x\nf(0)",
            'Traceback (most recent call last):\n  File "<code>", line 3, in <module>\n    f(0)\n'
            '  File "<code>", line 2, in f\n    return 1/x\nZeroDivisionError: division by zero\n',
        ),
        ("1+", '  File "<code>", line 1\n    1+\nSyntaxError: invalid syntax\n'),
        (
            "import json\njson.loads('[')",
            "Traceback (most recent call last):\n  File \"<code>\", line 2, in <module>\n    json.loads('[')\n"
            "json.decoder.JSONDecodeError: Expecting value: line 1 column 2 (char 1)\n",
        ),
        (
            "from json import nothing",
            'Traceback (most recent call last):\n  File "<code>", line 1, in <module>\n    from json import nothing\n'
            "ImportError: cannot import name 'nothing' from 'json'\n",
        ),
        ("import warnings; warnings.warn('old')", "UserWarning: old (line 1)\n"),
        ("import sys; sys.exit('bad')", "bad\n"),
    ],
)
async def test_errors_show_the_codes_own_frames_and_no_machine_paths(
    executor: SubprocessExecutor, code: str, stderr: str
) -> None:
    lines = (await executor.run(code)).stderr.splitlines(keepends=True)
    assert "".join(line for line in lines if set(line.strip()) - set("~^")) == stderr  # anchors differ between Pythons


async def test_a_chain_of_errors_is_trimmed_throughout(executor: SubprocessExecutor) -> None:
    code = "import json\ntry:\n    json.loads('{')\nexcept ValueError as e:\n    raise KeyError('k') from e"
    result = await executor.run(code)
    assert result.exit_code == 1
    assert "direct cause" in result.stderr
    assert result.stderr.count('File "<code>"') == result.stderr.count("File ") == 2


async def test_an_error_in_a_thread_is_trimmed_too(executor: SubprocessExecutor) -> None:
    result = await executor.run("import threading\nthreading.Thread(target=lambda: 1/0).start()")
    assert "ZeroDivisionError" in result.stderr
    assert result.stderr.count("File ") == result.stderr.count('File "<code>"') == 1


async def test_nothing_is_kept_between_calls(executor: SubprocessExecutor) -> None:
    await executor.run("x = 1; open('file', 'w').close()")
    assert "NameError" in (await executor.run("x")).stderr
    assert (await executor.run("import os; os.listdir()")).stdout == "[]\n"


async def test_the_environment_is_clean(executor: SubprocessExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    result = await executor.run("import os, tempfile; print(sorted(os.environ)); os.environ['HOME'] == os.getcwd()")
    names, at_home = result.stdout.splitlines()
    assert "WANDB_API_KEY" not in names
    assert "PYTHONPATH" not in names
    assert {"PATH", "HOME", "LANG"} <= set(ast.literal_eval(names))
    assert at_home == "True"


async def test_a_timeout_keeps_what_was_printed(executor: SubprocessExecutor) -> None:
    result = await executor.run("print('before')\nwhile True: pass", timeout_s=0.3)
    assert (result.timed_out, result.exit_code, result.stdout) == (True, -signal.SIGKILL, "before\n")
    assert result.killed_by == "time limit of 0.3 s"
    assert 0.25 < result.duration_s < 5


async def test_a_timeout_kills_the_whole_process_group(executor: SubprocessExecutor) -> None:
    code = "import subprocess, time\nprint(subprocess.Popen(['sleep', '60']).pid)\ntime.sleep(60)"
    result = await executor.run(code, timeout_s=0.5)
    assert result.timed_out
    assert ends(int(result.stdout))


async def test_a_child_of_the_code_does_not_survive_it(executor: SubprocessExecutor) -> None:
    code = "import subprocess\nprint(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    assert ends(int((await executor.run(code)).stdout))


async def test_an_escaped_process_that_holds_the_pipes_is_not_waited_for(executor: SubprocessExecutor) -> None:
    started = time.monotonic()
    result = await executor.run(
        "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(8)\nelse: print('done')"
    )
    assert result.stdout == "done\n"
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("code", "killed_by"),
    [
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL (probably out of memory)"),
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV (crash)"),
        ("import os; os.abort()", "SIGABRT (abort)"),
        ("import os; os.kill(os.getpid(), 35)", "signal 35"),
    ],
)
async def test_signals_become_words(executor: SubprocessExecutor, code: str, killed_by: str) -> None:
    result = await executor.run(code)
    assert (result.killed_by, result.timed_out, result.infra_error) == (killed_by, False, None)


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


async def test_an_exit_code_of_the_code_is_never_an_infrastructure_error(executor: SubprocessExecutor) -> None:
    for code in ("import os; os._exit(120)", "raise SystemExit(3)", "import os; os.closerange(0, 100); os._exit(7)"):
        result = await executor.run(code)
        assert result.infra_error is None
        assert result.exit_code in {3, 7, 120}


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
    assert max(result.duration_s for result in results) < 5


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


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "5"])
async def test_a_limit_must_be_a_positive_number(executor: SubprocessExecutor, timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        await executor.run("1", timeout_s=timeout_s)
    with pytest.raises(ConfigError, match="max_concurrency"):
        SubprocessExecutor(max_concurrency=0)


async def test_sessions_are_refused_by_name(executor: SubprocessExecutor) -> None:
    with pytest.raises(ConfigError, match="keeps no sessions"):
        await executor.run("1", session="episode-1")
