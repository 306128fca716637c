"""`StrandsSandboxExecutor`: Strands' local sandbox, and stand-ins for others that differ or fail."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from processes import exits_within
from strands.sandbox import ExecutionResult as StrandsResult
from strands.sandbox import PosixShellSandbox, StreamChunk
from strands.sandbox.errors import SandboxTimeoutError
from strands.sandbox.not_a_sandbox_local_environment import NotASandboxLocalEnvironment

from strands_rollout.code_tool import strands_sandbox
from strands_rollout.code_tool.strands_sandbox import StrandsSandboxExecutor
from strands_rollout.errors import ConfigError

LocalSandbox = NotASandboxLocalEnvironment
LOCAL_PATH = "strands.sandbox.not_a_sandbox_local_environment.NotASandboxLocalEnvironment"


class ScriptedSandbox(LocalSandbox):
    """The local sandbox; instead of running, it raises the error or yields the items that `act` returns, if any."""

    def __init__(self, act: Callable[[int], Any]) -> None:
        self.act = act
        self.calls = 0

    async def execute_streaming(self, command: str, **more: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        self.calls += 1
        replacement = self.act(self.calls)
        if isinstance(replacement, BaseException):
            raise replacement
        if isinstance(replacement, list):
            for item in replacement:
                yield item
            return
        async for item in super().execute_streaming(command, **more):
            yield item


@pytest.fixture
async def executor() -> AsyncIterator[StrandsSandboxExecutor]:
    async with StrandsSandboxExecutor(LocalSandbox(), timeout_s=20) as executor:
        yield executor


async def test_strands_executor_code_too_long_for_command_line(executor: StrandsSandboxExecutor) -> None:
    noise = os.urandom(100_000).hex()
    result = await executor.run(f"print({noise!r})")
    assert "too long for this sandbox" in result.stderr
    assert (result.exit_code, result.infra_error) == (1, None)


# ---- other and failing sandboxes


async def test_strands_executor_retries_once() -> None:
    sandbox = ScriptedSandbox(lambda call: ConnectionError("container is gone") if call == 1 else None)
    async with StrandsSandboxExecutor(sandbox) as executor:
        assert (await executor.run("1 + 1")).stdout == "2\n"
    assert sandbox.calls == 2


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (ConnectionError("container is gone"), "ScriptedSandbox: ConnectionError: container is gone"),
        ([StrandsResult(127, "", "docker is not installed or not on PATH")], "docker is not installed"),
        ([StreamChunk("Permission denied", "stderr"), StrandsResult(255, "", "")], "Permission denied"),
        (SandboxTimeoutError(3), "did not end in time"),
    ],
    ids=["raises", "no docker", "no access", "timeout before the start"],
)
async def test_strands_executor_failure_is_infra_error(found: Any, words: str) -> None:
    sandbox = ScriptedSandbox(lambda _: found)
    async with StrandsSandboxExecutor(sandbox) as executor:
        result = await executor.run("1")
    assert words in (result.infra_error or "")
    assert (result.stdout, result.stderr, result.exit_code) == ("", "", None)
    assert sandbox.calls == 2


@pytest.mark.slow
async def test_strands_executor_abandons_sandbox_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(PosixShellSandbox):
        async def execute_streaming(self, command: str, **more: Any) -> AsyncIterator[Any]:  # type: ignore[override]
            await asyncio.sleep(60)
            yield

    monkeypatch.setattr(strands_sandbox, "_GIVE_UP_MARGIN_S", 0.1)
    monkeypatch.setattr(strands_sandbox, "START_ALLOWANCE_S", 0.1)
    async with StrandsSandboxExecutor(Hanging()) as executor:
        assert "did not end in time" in ((await executor.run("1", timeout_s=0.1)).infra_error or "")


@pytest.mark.slow
async def test_strands_executor_code_that_stops_its_supervisor(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(strands_sandbox, "START_ALLOWANCE_S", 0.5)
    note = tmp_path / "pids"
    code = f"import os, signal\nopen({str(note)!r}, 'w').write(f'{{os.getpid()}} {{os.getppid()}}')\n"
    async with StrandsSandboxExecutor(LocalSandbox()) as executor:
        result = await executor.run(f"{code}os.kill(os.getppid(), signal.SIGSTOP)\nwhile True: pass", timeout_s=0.5)
    assert (result.timed_out, result.infra_error) == (True, None)
    assert all(exits_within(int(pid)) for pid in note.read_text().split())


# ---- slots, loops, closing


async def test_strands_executor_loads_sandbox_by_path() -> None:
    async with StrandsSandboxExecutor(LOCAL_PATH) as executor:
        assert (await executor.run("1 + 1")).stdout == "2\n"


@pytest.mark.parametrize("sandbox", [None, "nowhere.at_all", "os.getcwd", object()])
def test_strands_executor_rejects_other_objects(sandbox: Any) -> None:
    with pytest.raises(ConfigError, match="sandbox"):
        StrandsSandboxExecutor(sandbox)
