"""Attacks on sessions and from sessions, whose processes live on and keep a connection to the executor."""

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from attack import PRELUDE
from attack_targets import shallow_paths
from attacks_on_other_runs import SEARCH_OWN_MEMORY
from host_view import Process, descendants

from strands_rollout.code_tool import CodeExecutor, ExecutionResult, LocalExecutor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the attacks need Linux")

_SEND_TO_ALL = """
import os, threading, time
def send(message):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, message)
        except OSError:
            pass
"""
_DONE = "b'D' + bytes(1)"


@contextlib.asynccontextmanager
async def victim_session(executor: CodeExecutor) -> AsyncIterator[str]:
    """Keep a session with a secret in a variable and a file; at the end, check that both are unchanged."""
    session, secret = f"victim-{secrets.token_hex(4)}", f"secret-{secrets.token_hex(16)}"
    started = await executor.run(f"mine = {secret!r}\nopen('mine.txt', 'w').write(mine)\nprint(mine)", session=session)
    assert started.stdout == f"{secret}\n", started
    try:
        yield secret
        after = await executor.run("print(mine, open('mine.txt').read())", session=session)
        assert (after.stdout, after.session_lost) == (f"{secret} {secret}\n", False)
    finally:
        await executor.close_session(session)


@pytest.mark.parametrize("attacker", [None, "mine"], ids=["from-a-run", "from-a-session"])
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(SEARCH_OWN_MEMORY, id="search-own-memory"),
        pytest.param("try_all(*[lambda p=p: open(p).read() for p in {paths}])", id="read-its-file"),
        pytest.param("try_all(*[lambda p=p: os.unlink(p) for p in {paths}])", id="delete-its-file"),
    ],
)
async def test_session_is_out_of_reach_of_other_code(isolated, make_stage, code, attacker) -> None:
    async with victim_session(isolated) as secret:
        root = make_stage(isolated).scratch_root
        paths = [str(path) for path in shallow_paths(root) if path.name == "mine.txt"]
        assert len(paths) == 1
        program = PRELUDE.format(facts="{}", hold_s=4) + code.replace(
            "{paths}", repr([*paths, f"../{paths[0].split('/')[-2]}/mine.txt"])
        )
        result = await isolated.run(program, session=attacker)
        await isolated.close_session("mine")
        assert result.infra_error is None
        assert secret not in result.stdout + result.stderr


@pytest.fixture
async def run_in_session(isolated: CodeExecutor) -> AsyncIterator[Callable[..., Awaitable[ExecutionResult]]]:
    """Function that runs code in the attacker's session; at the end, checks that other runs are unaffected."""
    session = f"mine-{secrets.token_hex(4)}"
    yield lambda code, timeout_s=2.0: isolated.run(_SEND_TO_ALL + code, session=session, timeout_s=timeout_s)
    await isolated.close_session(session)
    assert (await isolated.run("print(1)")).stdout == "1\n"
    assert (await isolated.run("print(2)", session=session)).stdout == "2\n"
    await isolated.close_session(session)


@pytest.mark.parametrize("message", ["b'R'", "b'S'", _DONE, "b'E{}'", "b'x' * 65536"])
async def test_forged_control_messages_end_no_other_run(isolated, run_in_session, message) -> None:
    async with victim_session(isolated):
        result = await run_in_session(f"send({message})\nprint('a', flush=True)\ntime.sleep(0.1)")
        assert result.infra_error is None or result.session_lost


@pytest.mark.parametrize(
    "code",
    [
        "os.closerange(3, 64)",
        "threading.Thread(target=lambda: (time.sleep(0.05), os._exit(0))).start()",
        "threading.Thread(target=lambda: [(time.sleep(0.02), os.kill(os.getpid(), 19)) for _ in range(9)]).start()",
        "os.kill(os.getpid(), 19)",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    ],
)
@pytest.mark.slow
async def test_session_that_breaks_itself_is_killed_in_time(run_in_session, code) -> None:
    async with asyncio.timeout(60):
        results = [await run_in_session(code, 0.5)]
        await asyncio.sleep(0.1)
        while results[-1].stdout != "back\n":
            results.append(await run_in_session("print('back')", 5.0))
    assert [result.infra_error for result in results if result.infra_error is not None] == []


async def test_executor_drops_descriptors_sent_by_code(attack_folder: Path) -> None:
    executor = LocalExecutor(
        scratch_dir=str(attack_folder / "isolated"), isolation="rlimits", disabled_layers=("syscalls",)
    )
    # one message only: the executor may end the session when it reads the message
    code = """
import os, socket
marked = open("marked", "w")
line = socket.socket(fileno=os.dup(3))
socket.send_fds(line, [b"S"], [marked.fileno()] * 9)
marked.close()
"""
    async with executor:
        result = await executor.run(code, session="mine")
        assert result.stderr == "", "the descriptors were not sent"
        held = [link for pid in descendants(os.getpid()) for link in Process(pid).handles().values()]
        assert [link for link in held if "/marked" in link] == []
