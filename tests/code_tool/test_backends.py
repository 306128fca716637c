"""The contract of every backend: environment and output of code, results, concurrency.

Camel's interpreters print and end in ways of their own, so their backend is tested only for what does not depend on the
interpreter.
"""

import ast
import asyncio
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_sandbox_fusion import served
from processes import exits_within, wait_for_number
from strands.sandbox.not_a_sandbox_local_environment import NotASandboxLocalEnvironment

from strands_rollout.code_tool import (
    CamelExecutor,
    CodeExecutor,
    ExecutionResult,
    LocalExecutor,
    SandboxFusionExecutor,
    StrandsSandboxExecutor,
    SubprocessExecutor,
)
from strands_rollout.errors import ConfigError, SandboxError

HAS_LOCALE = Path("/usr/lib/locale/C.utf8").is_dir()
HERE = ["local", "subprocess"]
REMOTE = ["strands", "sandbox_fusion"]
CAMEL = pytest.param("camel", marks=pytest.mark.skipif(not importlib.util.find_spec("camel"), reason="needs camel-ai"))
# remote backends send one program; the slow suite shows that it behaves like the local backends
SEEN = [*HERE, *(pytest.param(name, marks=pytest.mark.slow) for name in REMOTE)]
PLAIN = [*HERE, *REMOTE]
STATELESS = ["subprocess", *REMOTE, CAMEL]
ALL = [*PLAIN, CAMEL]


@pytest.fixture(scope="module")
def make_backend() -> Iterator[Callable[..., Any]]:
    with served() as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # camel's `python`
        backends: dict[str, Callable[..., CodeExecutor]] = {
            "local": LocalExecutor,
            "subprocess": SubprocessExecutor,
            "strands": lambda **options: StrandsSandboxExecutor(NotASandboxLocalEnvironment(), **options),
            "sandbox_fusion": lambda **options: SandboxFusionExecutor(url, **options),
            "camel": CamelExecutor,
        }
        yield lambda name, **options: backends[name](**{"timeout_s": 20} | options)


@pytest.fixture(scope="module")
def shared_executors(make_backend: Callable[..., CodeExecutor]) -> Iterator[dict[str, CodeExecutor]]:
    """Executors by backend, created on demand and shared by tests, although each test has an event loop of its own."""

    class OnDemand(dict[str, CodeExecutor]):
        def __missing__(self, name: str) -> CodeExecutor:
            self[name] = make_backend(name)
            return self[name]

    executors = OnDemand()
    yield executors
    for executor in executors.values():
        asyncio.run(executor.aclose())


@pytest.fixture
def executor(request: pytest.FixtureRequest, shared_executors: dict[str, CodeExecutor]) -> CodeExecutor:
    return shared_executors[request.param]


def on_backends(backends: list[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("executor", backends, indirect=True)


@on_backends(ALL)
async def test_code_executor_rejects_invalid_calls(executor: CodeExecutor) -> None:
    assert isinstance(executor, CodeExecutor)
    for timeout_s in (0, -1, float("nan"), float("inf"), "5"):
        with pytest.raises(ConfigError, match="timeout_s"):
            await executor.run("1", timeout_s=timeout_s)  # type: ignore[arg-type]
    for code in (b"1", None, 1):
        with pytest.raises(ConfigError, match="expected a string"):
            await executor.run(code)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("limit", ["timeout_s", "max_output_chars", "max_concurrency"])
def test_executor_rejects_limits_that_are_not_positive(
    make_backend: Callable[..., CodeExecutor], name: str, limit: str
) -> None:
    with pytest.raises(ConfigError, match=limit):
        make_backend(name, **{limit: 0})


def test_camel_executor_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "camel", None)
    monkeypatch.delitem(sys.modules, "camel.interpreters", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'strands-rollout\[camel\]'"):
        CamelExecutor()


@on_backends(STATELESS)
async def test_stateless_executor_rejects_session(executor: CodeExecutor) -> None:
    with pytest.raises(ConfigError, match="keeps no sessions"):
        await executor.run("1", session="episode-1")
    await executor.close_session("episode-1")


@pytest.mark.parametrize(
    ("code", "stdout"),
    [
        ("x = 2\nx", "2\n"),
        ("print(1)\n'a'", "1\n'a'\n"),
        ("None", ""),
        ("", ""),
        ("print(len(str(7 ** 20000)))", "16902\n"),
        ("import numpy, sympy; numpy.arange(3).sum() + 0", None),
        ("__name__", "'__main__'\n"),
        ("import sys; sys.stdin.read()", "''\n"),
        ("print('é', '\\ud800')", "é \\ud800\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    b: int\nA(1)", "A(b=1)\n"),
        ("import pickle\nclass A: pass\npickle.loads(pickle.dumps(A)) is A", "True\n"),
        ("print(1)\nexit()\nprint(2)", "1\n"),
        ("help(len)", None),
        (
            "import shelve\nwith shelve.open('s') as s: s['a'] = 1\nwith shelve.open('s') as s: print(dict(s))",
            "{'a': 1}\n",
        ),
        (
            "open('m.py', 'w').write('def f(): return 3')\nimport m\nopen('m.py', 'w').write('def f(): return 4')\n"
            "first = m.f()\nimport importlib\nfirst, importlib.reload(m).f(), __import__('os').listdir()",
            "(3, 4, ['m.py'])\n",
        ),
        (
            "from multiprocessing.pool import ThreadPool\nwith ThreadPool(2) as p: print(p.map(abs, [-1, 2]))",
            "[1, 2]\n",
        ),
        ("import multiprocessing as m\nq = m.Queue()\nq.put(1)\nwith m.Lock(): print(q.get(timeout=9))", "1\n"),
        *[("import locale; locale.setlocale(locale.LC_ALL, '')", "'C.UTF-8'\n")] * HAS_LOCALE,
    ],
)
@on_backends(SEEN)
async def test_run_prints_last_expression(executor, code, stdout) -> None:
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
        (
            "open('m.py', 'w').write('def f():\\n    return 1/0\\n')\nimport m\nm.f()",
            'Traceback (most recent call last):\n  File "<code>", line 3, in <module>\n    m.f()\n'
            '  File "m.py", line 2, in f\n    return 1/0\nZeroDivisionError: division by zero\n',
        ),
        (
            "open('m.py', 'w').write('1+')\nimport m",
            'Traceback (most recent call last):\n  File "<code>", line 2, in <module>\n    import m\n'
            '  File "m.py", line 1\n    1+\nSyntaxError: invalid syntax\n',
        ),
        ("1+", '  File "<code>", line 1\n    1+\nSyntaxError: invalid syntax\n'),
        (
            "import json\njson.loads('[')",
            "Traceback (most recent call last):\n  File \"<code>\", line 2, in <module>\n    json.loads('[')\n"
            "json.decoder.JSONDecodeError: Expecting value: line 1 column 2 (char 1)\n",
        ),
        ("import warnings; warnings.warn('old')", "UserWarning: old (line 1)\n"),
        ("import sys; sys.exit('bad')", "bad\n"),
    ],
)
@on_backends(SEEN)
async def test_run_traceback_shows_only_own_frames(executor, code, stderr) -> None:
    lines = (await executor.run(code)).stderr.splitlines(keepends=True)
    without_anchors = [line for line in lines if set(line.strip()) - set("~^")]  # they differ between Python versions
    assert "".join(without_anchors) == stderr


@on_backends(PLAIN)
async def test_run_starts_fresh_in_a_clean_environment(executor, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    await executor.run("x = 1; open('file', 'w').close()")
    assert "NameError" in (await executor.run("x")).stderr
    code = "import os; print(os.listdir(), os.environ['HOME'] == os.getcwd()); print(sorted(os.environ)); os.environ"
    fresh, names, everything = (await executor.run(code)).stdout.splitlines()
    assert fresh == "[] True"
    assert {"PATH", "HOME", "PYTHONPATH"} & set(ast.literal_eval(names)) == {"PATH", "HOME"}
    assert "secret" not in everything


@on_backends(PLAIN)
async def test_run_timeout_keeps_output_and_starts_with_the_code(executor: CodeExecutor) -> None:
    for limit_s in (0.3, 3.0, 30.0):  # increased until the code prints, also on a busy machine
        result = await executor.run("print('before')\nwhile True: pass", timeout_s=limit_s)
        if result.stdout:
            break
    assert (result.timed_out, result.exit_code, result.stdout) == (True, -signal.SIGKILL, "before\n")
    assert result.killed_by == f"time limit of {limit_s:g} s"
    assert result.duration_s > limit_s - 0.05


@on_backends(ALL)
@pytest.mark.parametrize(
    ("code", "exit_code", "killed_by"),
    [
        ("raise SystemExit(3)", 3, None),
        ("import os; os._exit(127)", 127, None),
        ("import os; os.closerange(0, 100); os._exit(7)", 7, None),
        ("import os; os.kill(os.getpid(), 9)", -9, "SIGKILL (probably out of memory)"),
        ("import os; os.kill(os.getpid(), 11)", -11, "SIGSEGV (crash)"),
        ("import os; os.kill(os.getpid(), 35)", -35, "signal 35"),
    ],
)
async def test_run_reports_how_the_code_ended(executor, code, exit_code, killed_by):
    result = await executor.run(code)
    assert (result.exit_code, result.killed_by, result.infra_error) == (exit_code, killed_by, None)
    assert not result.timed_out


@pytest.mark.parametrize("name", ALL)
async def test_run_cuts_long_output_in_the_middle(make_backend: Callable[..., CodeExecutor], name: str) -> None:
    async with make_backend(name, max_output_chars=100) as executor:
        result = await executor.run("print('head' + 'x' * 10**6 + 'tail')")
    assert result.truncated
    assert (result.stdout[:7], result.stdout[-8:]) == ("headxxx", "xxxtail\n")
    assert result.stdout.count("characters dropped") == 1
    assert len(result.stdout) < 160


@on_backends(ALL)
def test_executor_is_shared_by_loops_of_several_threads(executor: CodeExecutor) -> None:
    results: list[ExecutionResult] = []

    async def calls() -> None:
        results.extend(await asyncio.gather(*(executor.run("1 + 1") for _ in range(2))))

    threads = [threading.Thread(target=lambda: asyncio.run(calls())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.stdout for result in results] == ["2\n"] * 6


@pytest.mark.parametrize("name", ["subprocess", *REMOTE, CAMEL])
async def test_max_concurrency_and_waiting_outside_time_limit(make_backend, name) -> None:
    code = "import time; print(time.time()); time.sleep(0.3); time.time()"
    async with make_backend(name, max_concurrency=2) as executor:
        results = await asyncio.gather(*(executor.run(code, timeout_s=20) for _ in range(4)))
    assert not any(result.timed_out for result in results), results
    spans = [tuple(map(float, result.stdout.split())) for result in results]
    for start, _ in spans:
        assert sum(other_start <= start < other_end for other_start, other_end in spans) <= 2
    assert name == "subprocess" or max(result.queued_s for result in results) > 0.25


@pytest.mark.parametrize(("name", "last_to_end"), [("subprocess", "os.getpid()"), ("strands", "os.getppid()")])
async def test_cancelling_run_ends_the_code(make_backend, name, last_to_end, tmp_path) -> None:
    code = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(f'{{{last_to_end}}}\\n')\ntime.sleep(60)"
    async with make_backend(name) as executor:
        running = asyncio.create_task(executor.run(code))
        pid = await asyncio.to_thread(wait_for_number, tmp_path / "pid")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await asyncio.to_thread(exits_within, pid)


@on_backends(["subprocess", *REMOTE])
async def test_child_process_does_not_survive_the_code(executor: CodeExecutor) -> None:
    code = "import subprocess\nprint(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    assert exits_within(int((await executor.run(code)).stdout))


@pytest.mark.parametrize("name", STATELESS)
async def test_aclose_waits_and_then_rejects_calls(make_backend, name, tmp_path) -> None:
    executor, note = make_backend(name), tmp_path / "note"
    code = f"import os, time\nopen({str(note)!r}, 'w').write('1\\n')\ntime.sleep(0.2)\nprint('done')"
    running = asyncio.create_task(executor.run(code))
    await asyncio.to_thread(wait_for_number, note)
    await executor.aclose()
    assert (await running).stdout == "done\n"
    await executor.aclose()
    with pytest.raises(SandboxError, match="after aclose"):
        await executor.run("1")


@pytest.mark.parametrize("name", ["subprocess", "strands"])
async def test_scratch_directory_is_always_removed(make_backend, name, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with make_backend(name) as executor:
        assert str(tmp_path) in (await executor.run("import os; os.getcwd()")).stdout
        for code in (
            "import os; os.makedirs('a/b'); open('a/b/c', 'w').close(); os.chmod('a', 0)",
            "open('f', 'w').write('x')\nwhile True: pass",
            "import os; open('f', 'w').close(); os.abort()",
            f"import os; open('f', 'w').close(); os.getppid() != {os.getpid()} and os.kill(os.getppid(), 9)",
        ):
            await executor.run(code, timeout_s=0.3)
    assert os.listdir(tmp_path) == []  # noqa: PTH208
