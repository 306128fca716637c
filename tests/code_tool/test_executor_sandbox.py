"""`CodeExecutorSandbox`, an executor as a Strands sandbox: code, refusals, session files, a real agent."""

import errno
import importlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, TOOL_CALL, ids_of
from processes import exits_within
from strands import Agent
from strands.sandbox import FileInfo, Sandbox, StreamChunk
from strands.sandbox.errors import SandboxPathNotFoundError, SandboxTimeoutError

from strands_rollout import SGLangModel
from strands_rollout.code_tool import ExecutionResult, LocalExecutor, SubprocessExecutor
from strands_rollout.code_tool.sandbox.kernel import landlock_abi
from strands_rollout.code_tool.strands_sandbox import _TIMEOUT_TAKES_OUTPUT, CodeExecutorSandbox
from strands_rollout.errors import ConfigError, SandboxError


@pytest.fixture
async def stateless_sandbox() -> AsyncIterator[CodeExecutorSandbox]:
    async with SubprocessExecutor(timeout_s=20) as executor:
        yield CodeExecutorSandbox(executor)


def local_executor(**more: Any) -> LocalExecutor:
    return LocalExecutor(isolation="rlimits", libraries=(), **more)


@pytest.fixture
async def session_sandbox() -> AsyncIterator[CodeExecutorSandbox]:
    async with local_executor() as executor:
        yield CodeExecutorSandbox(executor)


async def collect(stream: Any) -> list[Any]:
    return [item async for item in stream]


async def test_execute_code_streams_stdout_and_stderr(stateless_sandbox: CodeExecutorSandbox) -> None:
    assert isinstance(stateless_sandbox, Sandbox)
    out, err, result = await collect(
        stateless_sandbox.execute_code_streaming("import sys; print('bad', file=sys.stderr); 1 + 1", "python3")
    )
    assert (out, err) == (StreamChunk("2\n", "stdout"), StreamChunk("bad\n", "stderr"))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "2\n", "bad\n")


@pytest.mark.parametrize(
    ("code", "exit_code", "stderr"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("import os; os.abort()", 134, "The code was ended by: SIGABRT (abort).\n"),
        ("1/0", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
async def test_execute_code_exit_codes_are_a_shells(stateless_sandbox, code, exit_code, stderr) -> None:
    result = await stateless_sandbox.execute_code(code, "python")
    assert result.exit_code == exit_code
    assert result.stderr.endswith(stderr)


async def test_execute_code_timeout_raises_sandbox_timeout_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def time_out(*_: object, **__: object) -> ExecutionResult:
        return ExecutionResult("before\n", "", -9, timed_out=True, killed_by="time limit of 2.5 s")

    executor = SubprocessExecutor()
    monkeypatch.setattr(executor, "run", time_out)
    stream = CodeExecutorSandbox(executor).execute_code_streaming("while True: pass", "python3", timeout=2.5)
    assert await anext(stream) == StreamChunk("before\n", "stdout")
    with pytest.raises(SandboxTimeoutError, match=r"2\.5 seconds") as caught:
        await anext(stream)
    if _TIMEOUT_TAKES_OUTPUT:
        assert caught.value.stdout == "before\n"


@pytest.mark.slow
async def test_max_timeout_s_bounds_each_call() -> None:
    async with SubprocessExecutor() as executor:
        sandbox = CodeExecutorSandbox(executor, max_timeout_s=0.5)
        for timeout in (None, 50):
            with pytest.raises(SandboxTimeoutError, match=r"0\.5 seconds"):
                await sandbox.execute_code("while True: pass", "python3", timeout=timeout)
        with pytest.raises(ConfigError, match="max_timeout_s"):
            CodeExecutorSandbox(executor, max_timeout_s=0)


async def test_execute_code_rejects_unsupported_requests(stateless_sandbox: CodeExecutorSandbox) -> None:
    node = await stateless_sandbox.execute_code("1", "node")
    assert (node.exit_code, "no interpreter 'node'" in node.stderr) == (127, True)
    moved = await stateless_sandbox.execute_code("1", "python3", cwd="/")
    assert (moved.exit_code, "can't set a working directory" in moved.stderr) == (127, True)
    assert (await stateless_sandbox.execute_code("1", "python3", env={"A": "b"})).exit_code == 127
    assert stateless_sandbox.get_tools() == []


async def test_file_operations_need_sessions(stateless_sandbox: CodeExecutorSandbox) -> None:
    for call in (
        stateless_sandbox.read_file("f"),
        stateless_sandbox.write_file("f", b""),
        stateless_sandbox.remove_file("f"),
        stateless_sandbox.list_files("."),
    ):
        with pytest.raises(OSError, match="keeps no files between calls"):
            await call
    await stateless_sandbox.aclose()


async def test_executor_fault_raises_sandbox_error(stateless_sandbox, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SandboxError, match="nowhere"):
        await stateless_sandbox.execute_code("1", "python3")


# ---- a shell, if code may start programs


@pytest.fixture
async def shell() -> AsyncIterator[CodeExecutorSandbox]:
    async with local_executor(programs=True) as executor, CodeExecutorSandbox(executor, max_timeout_s=20) as sandbox:
        yield sandbox


async def test_commands_and_file_operations_share_a_folder(shell: CodeExecutorSandbox) -> None:
    await shell.write_text("sub/in.txt", "a\nb\n")
    found = await shell.execute(
        "pwd; wc -l < in.txt; echo $X > out.txt; cat nowhere; exit 3", cwd="sub", env={"X": "1"}
    )
    folder, count = found.stdout.split()
    assert (count, found.exit_code, "nowhere" in found.stderr) == ("2", 3, True)
    assert await shell.read_text(f"{folder}/out.txt") == "1\n"
    assert (await shell.execute("kill -9 $$")).exit_code == 137
    await shell.aclose()
    assert not Path(folder).exists()  # noqa: ASYNC240


async def test_command_timeout_kills_processes_and_keeps_files(shell: CodeExecutorSandbox) -> None:
    await shell.write_text("kept", "x")
    stream = shell.execute_streaming("sleep 100 & echo $$ $!; sleep 100", timeout=0.5)
    printed = await anext(stream)
    with pytest.raises(SandboxTimeoutError, match=r"0\.5 seconds"):
        await anext(stream)
    assert all(exits_within(int(pid)) for pid in printed.data.split())
    assert await shell.read_text("kept") == "x"


@pytest.mark.skipif(not landlock_abi(), reason="this kernel has no Landlock")
@pytest.mark.parametrize(
    "command",
    [
        "cat {outside}",
        "cat ../../../../../../../../{outside}",
        "ln -s {outside} link && cat link",
        "echo x > {outside}.new",
        "cp /bin/sh . && ./sh -c 'cat {outside}'",
        "python3 -c 'print(open(\"{outside}\").read())'",
        "ls $(dirname {outside})",
    ],
)
async def test_commands_reach_no_files_outside(shell: CodeExecutorSandbox, tmp_path: Path, command: str) -> None:
    outside = tmp_path / "secret"
    outside.write_text("the-label")
    found = await shell.execute(command.format(outside=outside))
    assert found.exit_code != 0
    assert "the-label" not in found.stdout + found.stderr
    assert not Path(f"{outside}.new").exists()  # noqa: ASYNC240


async def test_execute_without_programs_has_no_shell() -> None:
    async with local_executor() as executor:
        if (await executor.start()).isolation != "full":
            pytest.skip("this machine does not refuse programs")
        answers = [await CodeExecutorSandbox(each).execute("ls") for each in (executor, without_facts(executor))]
    for answer in answers:
        assert (answer.exit_code, answer.stdout) == (127, "")
        assert answer.stderr.startswith("this sandbox has no shell; it runs Python code only")


def without_facts(executor: LocalExecutor) -> Any:
    """Return the executor without `facts`, so that its limits are unknown."""
    return SimpleNamespace(run=executor.run, close_session=executor.close_session)


# ---- files of a session


async def test_code_and_files_share_the_session(session_sandbox: CodeExecutorSandbox) -> None:
    await session_sandbox.write_file("sub/data.txt", "é\n".encode())
    await session_sandbox.execute_code("text = open('sub/data.txt', encoding='utf-8').read()", "python3")
    assert (
        await session_sandbox.execute_code("print(text)\nopen('out', 'w').write('x' * 5) and None", "python3")
    ).stdout == ("é\n\n")
    assert await session_sandbox.read_text("out") == "xxxxx"
    assert await session_sandbox.list_files(".") == [FileInfo("out", False, 5), FileInfo("sub", True, ANY)]
    await session_sandbox.remove_file("out")
    with pytest.raises(FileNotFoundError):
        await session_sandbox.read_file("out")
    with pytest.raises(FileNotFoundError):
        await session_sandbox.remove_file("out")


@pytest.mark.parametrize("size", [0, 12_000, 150_000])
@pytest.mark.slow
async def test_write_file_and_read_file_keep_any_bytes(session_sandbox: CodeExecutorSandbox, size: int) -> None:
    content = os.urandom(size)
    await session_sandbox.write_file("data", b"what was there before")
    await session_sandbox.write_file("data", content)
    assert await session_sandbox.read_file("data") == content


async def test_file_operations_raise_pythons_errors(session_sandbox: CodeExecutorSandbox) -> None:
    await session_sandbox.write_file("file", b"")
    with pytest.raises(SandboxPathNotFoundError):
        await session_sandbox.list_files("nowhere")
    with pytest.raises(IsADirectoryError):
        await session_sandbox.read_file(".")
    with pytest.raises(OSError, match="null") as caught:
        await session_sandbox.read_file("a\0b")
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(OSError, match="file/below"):
        await session_sandbox.write_file("file/below", b"")


@pytest.mark.parametrize(
    "answer",
    [
        *("5", "[]", '{"found": 5}', '{"found": [[1]]}', '{"found": "a"}', '{"errno": "x", "words": 3}', "{"),
        *('{"errno": 1}', '{"errno": ' + "9" * 5000 + ', "words": ""}', "[" * 5000),
    ],
)
async def test_forged_answers_of_file_operations_are_errors(session_sandbox: CodeExecutorSandbox, answer: str) -> None:
    await session_sandbox.execute_code(f"import json\njson.dumps = lambda *_: {answer!r}", "python3")
    for call in (session_sandbox.read_file("f"), session_sandbox.list_files(".")):
        with pytest.raises(OSError, match="in the sandbox|the sandbox's answer can't be read") as caught:
            await call
        assert caught.value.errno == errno.EINVAL


async def test_read_file_rejects_endless_file(
    session_sandbox: CodeExecutorSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strands_rollout.code_tool.strands_sandbox._MAX_FILE_BYTES", 30_000)
    with pytest.raises(OSError, match="more than 30000 bytes, or without end") as caught:
        await session_sandbox.read_file("/dev/urandom")
    assert caught.value.errno == errno.EFBIG


async def test_sandboxes_have_own_sessions_unless_named() -> None:
    async with local_executor() as executor:
        one, other = CodeExecutorSandbox(executor), CodeExecutorSandbox(executor, session="named")
        await one.execute_code("x = 1", "python3")
        assert "NameError" in (await other.execute_code("x", "python3")).stderr
        assert (await executor.run("print(2)", session="named")).stdout == "2\n"
        await one.aclose()
        await one.aclose()
        assert "NameError" in (await one.execute_code("x", "python3")).stderr


async def test_lost_session_is_reported() -> None:
    async with local_executor() as executor:
        sandbox = CodeExecutorSandbox(executor)
        result = await sandbox.execute_code("import os; os._exit(1)", "python3")
        assert result.stderr.endswith("Its variables and files are gone.\n")
        with pytest.raises(OSError, match="f"):
            await sandbox.read_file("f")


# ---- a real agent


async def test_strands_file_editor_edits_session_files(shipped_tokenizer, session_sandbox) -> None:
    file_editor = importlib.import_module("strands.vended_tools").file_editor
    path = (
        await session_sandbox.execute_code("import os; print(os.path.abspath('notes.txt'))", "python3")
    ).stdout.strip()
    create = TOOL_CALL.format(
        name="file_editor", arguments=f'{{"command": "create", "path": "{path}", "file_text": "one\\ntwo"}}'
    )
    change = TOOL_CALL.format(
        name="file_editor",
        arguments=f'{{"command": "str_replace", "path": "{path}", "old_str": "two", "new_str": "three"}}',
    )
    replies = [Reply.tokens(ids_of(shipped_tokenizer, text)) for text in (create, change, ANSWER)]
    async with FakeSGLang(replies, context_length=8192) as fake:
        model = SGLangModel(tokenizer=shipped_tokenizer, base_url=fake.base_url)
        agent = Agent(model=model, tools=[file_editor], sandbox=session_sandbox, callback_handler=None)
        await agent.invoke_async("go")
    blocks: list[Any] = [block for message in agent.messages for block in message["content"]]
    assert [block["toolResult"]["status"] for block in blocks if "toolResult" in block] == ["success", "success"]
    assert await session_sandbox.read_text(path) == "one\nthree"
