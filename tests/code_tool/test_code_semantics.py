"""What code means, whichever executor runs it here: what it sees, what it prints, what is shown of its end."""

from __future__ import annotations

import ast
import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from strands_rollout.code_tool import CodeExecutor, LocalExecutor, SubprocessExecutor
from strands_rollout.errors import ConfigError

HAS_LOCALE = Path("/usr/lib/locale/C.utf8").is_dir()


@pytest.fixture(scope="module", params=[LocalExecutor, SubprocessExecutor])
def executor(request: pytest.FixtureRequest) -> Iterator[CodeExecutor]:
    executor = request.param(timeout_s=20)
    yield executor
    asyncio.run(executor.aclose())


def test_it_is_a_code_executor(executor: CodeExecutor) -> None:
    assert isinstance(executor, CodeExecutor)


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
        ("print(1)\nexit()\nprint(2)", "1\n"),
        ("help(len)", None),
        (
            "import shelve\nwith shelve.open('s') as s: s['a'] = 1\nwith shelve.open('s') as s: print(dict(s))",
            "{'a': 1}\n",
        ),
        (
            "from multiprocessing.pool import ThreadPool\nwith ThreadPool(2) as p: print(p.map(abs, [-1, 2]))",
            "[1, 2]\n",
        ),
        ("import multiprocessing as m\nq = m.Queue()\nq.put(1)\nwith m.Lock(): print(q.get(timeout=9))", "1\n"),
        *[("import locale; locale.setlocale(locale.LC_ALL, '')", "'C.UTF-8'\n")] * HAS_LOCALE,
    ],
)
async def test_code_runs_as_a_script_whose_last_expression_is_shown(
    executor: CodeExecutor, code: str, stdout: str | None
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
    executor: CodeExecutor, code: str, stderr: str
) -> None:
    lines = (await executor.run(code)).stderr.splitlines(keepends=True)
    assert "".join(line for line in lines if set(line.strip()) - set("~^")) == stderr  # anchors differ between Pythons


async def test_a_chain_of_errors_is_trimmed_throughout(executor: CodeExecutor) -> None:
    code = "import json\ntry:\n    json.loads('{')\nexcept ValueError as e:\n    raise KeyError('k') from e"
    result = await executor.run(code)
    assert result.exit_code == 1
    assert "direct cause" in result.stderr
    assert result.stderr.count('File "<code>"') == result.stderr.count("File ") == 2


async def test_an_error_in_a_thread_is_trimmed_too(executor: CodeExecutor) -> None:
    result = await executor.run("import threading\nthreading.Thread(target=lambda: 1/0).start()")
    assert "ZeroDivisionError" in result.stderr
    assert result.stderr.count("File ") == result.stderr.count('File "<code>"') == 1


async def test_nothing_is_kept_between_calls(executor: CodeExecutor) -> None:
    await executor.run("x = 1; open('file', 'w').close()")
    assert "NameError" in (await executor.run("x")).stderr
    assert (await executor.run("import os; os.listdir()")).stdout == "[]\n"


async def test_the_environment_is_clean(executor: CodeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    result = await executor.run("import os, tempfile; print(sorted(os.environ)); os.environ['HOME'] == os.getcwd()")
    names, at_home = result.stdout.splitlines()
    assert "WANDB_API_KEY" not in names
    assert "PYTHONPATH" not in names
    assert {"PATH", "HOME", "LANG"} <= set(ast.literal_eval(names))
    assert at_home == "True"


async def test_a_timeout_keeps_what_was_printed(executor: CodeExecutor) -> None:
    result = await executor.run("print('before')\nwhile True: pass", timeout_s=0.3)
    assert (result.timed_out, result.exit_code, result.stdout) == (True, -signal.SIGKILL, "before\n")
    assert result.killed_by == "time limit of 0.3 s"
    assert result.duration_s > 0.25


@pytest.mark.parametrize(
    ("code", "killed_by"),
    [
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL (probably out of memory)"),
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV (crash)"),
        ("import os; os.abort()", "SIGABRT (abort)"),
        ("import os; os.kill(os.getpid(), 35)", "signal 35"),
    ],
)
async def test_signals_become_words(executor: CodeExecutor, code: str, killed_by: str) -> None:
    result = await executor.run(code)
    assert (result.killed_by, result.timed_out, result.infra_error) == (killed_by, False, None)


async def test_an_exit_code_of_the_code_is_never_an_infrastructure_error(executor: CodeExecutor) -> None:
    for code in ("import os; os._exit(120)", "raise SystemExit(3)", "import os; os.closerange(0, 100); os._exit(7)"):
        result = await executor.run(code)
        assert result.infra_error is None
        assert result.exit_code in {3, 7, 120}


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "5"])
async def test_a_limit_must_be_a_positive_number(executor: CodeExecutor, timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        await executor.run("1", timeout_s=timeout_s)
    with pytest.raises(ConfigError, match="max_concurrency"):
        type(executor)(max_concurrency=0)
