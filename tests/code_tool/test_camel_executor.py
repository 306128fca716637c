"""`CamelExecutor` on real camel interpreters: a subprocess per call, and the interpreter in this process."""

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from strands_rollout.code_tool import camel as camel_executor
from strands_rollout.code_tool.camel import CamelExecutor
from strands_rollout.errors import ConfigError

interpreters = pytest.importorskip("camel.interpreters", reason="needs camel-ai: pip install 'strands-rollout[camel]'")


@pytest.fixture(autouse=True)
def _use_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
async def executor() -> AsyncIterator[CamelExecutor]:
    async with CamelExecutor(timeout_s=20) as executor:
        yield executor


def in_process(**more: Any) -> CamelExecutor:
    return CamelExecutor("InternalPythonInterpreter", max_concurrency=1, **more)


@pytest.mark.parametrize(
    ("code", "stdout"),
    [("print(1)", "1\n"), ("x = 2\nx + 3", "5\n"), ("'é'", "'é'\n"), ("print('(stderr')", "(stderr\n")],
)
async def test_camel_answer_is_stdout(executor: CamelExecutor, code: str, stdout: str) -> None:
    result = await executor.run(code)
    assert (result.stdout, result.stderr, result.exit_code) == (stdout, "", 0)
    assert (result.infra_error, result.killed_by, result.timed_out) == (None, None, False)


async def test_camel_ignores_return_code_printed_by_code(executor: CamelExecutor) -> None:
    result = await executor.run(f"print('(Execution failed with return code {'9' * 4301})', end='')")
    assert (result.exit_code, result.infra_error) == (0, None)


async def test_camel_parses_stderr_and_exit_code(executor: CamelExecutor) -> None:
    result = await executor.run("print('before')\n1/0")
    assert (result.stdout, result.exit_code, result.infra_error) == ("before\n", 1, None)
    assert result.stderr.startswith('Traceback (most recent call last):\n  File "<code>", line 2, in <module>\n')
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert tempfile.gettempdir() not in result.stderr


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1+", "SyntaxError"),
        ("match 1:\n    case 1: print(1)", "Match"),  # unknown to astor
        ("x = '\ud800'", "surrogates not allowed"),
        ("import sys; n = sys.stdout.buffer.write(b'\\xff')", "can't decode"),
    ],
)
async def test_camel_rewrite_errors_are_the_codes_fault(executor: CamelExecutor, code: str, words: str) -> None:
    result = await executor.run(code)
    assert words in result.stderr
    assert (result.exit_code, result.infra_error) == (1, None)


async def test_camel_own_time_limit_keeps_output(executor: CamelExecutor) -> None:
    for limit_s in (1, 5, 30):  # increased until the code prints, also on a busy machine
        result = await executor.run("print('before', flush=True)\nwhile True: pass", timeout_s=limit_s)
        if result.stdout:
            break
    assert (result.stdout, result.stderr, result.timed_out) == ("before\n", "", True)
    assert (result.killed_by, result.exit_code) == (f"time limit of {limit_s} s", -9)


async def test_camel_abandons_interpreter_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(camel_executor, "_OWN_LIMIT_MARGIN_S", 0.3)
    async with CamelExecutor() as executor:
        result = await executor.run("import subprocess; subprocess.Popen(['sleep', '40'])", timeout_s=0.5)
    assert (result.timed_out, result.killed_by) == (True, "time limit of 0.5 s")


async def test_camel_interpreter_error_is_infra_error() -> None:
    class Failing(interpreters.DockerInterpreter):  # type: ignore[misc, name-defined]
        def run(self, code: str, code_type: str) -> str:
            raise interpreters.InterpreterError("Docker daemon is not running.")

    async with CamelExecutor(Failing) as executor:
        assert "Docker daemon is not running" in ((await executor.run("1")).infra_error or "")


async def test_camel_factory_timeout_is_infra_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(camel_executor, "_START_TIMEOUT_S", 0.1)
    release = threading.Event()
    async with CamelExecutor(release.wait) as executor:
        assert "the interpreter did not start" in ((await executor.run("1", timeout_s=0.1)).infra_error or "")
    release.set()


async def test_camel_factory_that_exits_is_infra_error() -> None:
    async with CamelExecutor(sys.exit) as executor:
        assert "exit raised SystemExit" in ((await executor.run("1")).infra_error or "")


# ---- choice of the interpreter


@pytest.mark.parametrize("name", ["SubprocessInterpreter", "camel.interpreters.SubprocessInterpreter"])
async def test_camel_finds_interpreter_by_name(name: str) -> None:
    async with CamelExecutor(name, options={"execution_timeout": 5}) as executor:
        assert (await executor.run("1 + 1")).stdout == "2\n"


@pytest.mark.parametrize(
    ("interpreter", "options", "words"),
    [
        (
            "NoInterpreter",
            None,
            "interpreter is 'NoInterpreter'; expected the name of a class in camel.interpreters",
        ),
        ("SubprocessInterpreter", {"timeout": 3}, "takes no option 'timeout'"),
        ("SubprocessInterpreter", {"require_confirm": True}, "wait on stdin"),
        (3, {"api_key": "secret"}, "^got the options api_key and interpreter=3; expected"),
        (3, None, "expected a class of camel.interpreters or its name"),
    ],
)
def test_camel_rejects_invalid_interpreter(interpreter: Any, options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CamelExecutor(interpreter, options=options)


async def test_camel_rejects_require_confirm() -> None:
    with pytest.raises(ConfigError, match="require_confirm"):
        CamelExecutor(interpreters.SubprocessInterpreter())
    async with CamelExecutor(lambda: interpreters.SubprocessInterpreter()) as executor:
        with pytest.raises(ConfigError, match="require_confirm"):
            await executor.run("1")


# ---- the interpreter in this process


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "exit_code"),
    [
        ("x = 2\nx + 3", "5", "", 0),
        ("None", "", "", 0),
        ("foo()", "", "InterpreterError: Evaluation of the code stopped at node 0", 1),
        ("1/0", "", "ZeroDivisionError: division by zero", 1),
    ],
)
async def test_camel_in_process_errors_are_the_codes_fault(code: str, stdout: str, stderr: str, exit_code: int) -> None:
    async with in_process() as executor:
        result = await executor.run(code)
    assert (result.stdout, result.exit_code, result.infra_error) == (stdout, exit_code, None)
    assert result.stderr.startswith(stderr)


async def test_camel_in_process_sys_exit_ends_only_the_code() -> None:
    async with in_process(options={"unsafe_mode": True}) as executor:
        assert "SystemExit: 3" in (await executor.run("raise SystemExit(3)")).stderr
        assert (await executor.run("print(1)")).stdout == "1\n"


async def test_camel_keeps_state_only_with_reuse() -> None:
    async with in_process() as executor:
        await executor.run("x = 5")
        assert "not defined" in (await executor.run("x")).stderr
    async with in_process(reuse=True) as executor:
        await executor.run("x = 5")
        assert (await executor.run("x")).stdout == "5"


async def test_camel_abandoned_threads_become_infra_error(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    options = {"action_space": {"wait": release.wait}}
    async with in_process(options=options) as executor:
        result = await executor.run("wait()", timeout_s=0.3)
        assert (result.timed_out, result.killed_by) == (True, "time limit of 0.3 s")
        assert "1 threads are occupied by code that does not end" in ((await executor.run("1")).infra_error or "")
        release.set()
        for future, _ in executor._abandoned:
            await asyncio.to_thread(future.result)
        assert (await executor.run("1 + 1")).stdout == "2"


async def test_camel_in_process_runs_one_call_at_a_time() -> None:
    with pytest.raises(ConfigError, match="max_concurrency=8, expected 1"):
        CamelExecutor("InternalPythonInterpreter")
    async with CamelExecutor(lambda: interpreters.InternalPythonInterpreter()) as executor:
        with pytest.raises(ConfigError, match="max_concurrency=8, expected 1"):
            await executor.run("1")
