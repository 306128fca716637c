"""About ten thousand calls of all kinds on one executor leave nothing behind, and no usage grows with their number."""

import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attack_targets import shallow_paths
from host_view import Process, descendants

from strands_rollout.code_tool import ExecutionResult, LocalExecutor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="reads processes in /proc"),
]
CALLERS = 64
SPARES = 8  # children waiting for code
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)  # threads of asyncio.to_thread, started on demand
FIRST_CALLS, MORE_CALLS = 2_000, 8_000
FILES = "import os\nfor n in range(30): os.makedirs(f'd{n}/e'); open(f'd{n}/e/f', 'w').write('x' * 1000)"
TEMPORARY = "import tempfile\nkept = [tempfile.NamedTemporaryFile(delete=False) for _ in range(5)]"
DETACHED = "import os\nf = open('f', 'wb'); os.unlink('f'); f.write(bytes(10**6)); f.flush()"
DAEMONS = (
    "import threading, time\nfor _ in range(8): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
)
# code, its time limit in seconds, and expected text of the result
CALLS: list[tuple[str, float | None, str]] = [
    *[("print(2 + 3)", None, "stdout='5\\n'")] * 8,
    ("from sympy import *\nsolve(symbols('x')**2 - 4)", None, "stdout='[-2, 2]\\n'"),
    ("1 / 0", None, "ZeroDivisionError"),
    *[(code, None, "exit_code=0") for code in (FILES, TEMPORARY, DETACHED, DAEMONS)],
    ("print(1)\nwhile True: pass", 0.1, "timed_out=True"),
    ("import ctypes; ctypes.string_at(0)", None, "exit_code=-11"),
    ("import os; os._exit(3)", None, "exit_code=3"),
    ("bytearray(10**11)", None, "MemoryError"),
    ("print('x' * 10**6)", None, "truncated=True"),
    ("while True: print('x' * 10**5)", 5, "killed_by='"),
]


async def check_call(executor: LocalExecutor, chance: random.Random) -> str:
    """Make a random call; return its result if it is unexpected, else an empty text."""
    code, timeout_s, expected = chance.choice(CALLS)
    result = str(await executor.run(code, timeout_s=timeout_s))
    return "" if expected in result and "infra_error=None" in result else f"{code}: {result[-500:]}"


async def check_interrupted_call(executor: LocalExecutor, chance: random.Random) -> str:
    """Cancel a session's call while it waits, starts or runs, or let it crash; return its result like `check_call`."""
    name, end = str(chance.random()), chance.choice([0, 0.01, 0.3, None])
    code = "import time; time.sleep(60)" if end is not None else "import os; os.abort()"
    await executor.run("n = 1; open('f', 'w').close()", session=name)
    call: asyncio.Task[ExecutionResult] = asyncio.create_task(executor.run(code, session=name))
    await asyncio.wait([call], timeout=end)
    call.cancel()
    (outcome,) = await asyncio.gather(call, return_exceptions=True)
    await executor.close_session(name)
    is_expected = (
        isinstance(outcome, asyncio.CancelledError) if end is not None else "session_lost=True" in str(outcome)
    )
    return "" if is_expected else str(outcome)


async def soak(executor: LocalExecutor, chance: random.Random, calls: int) -> list[str]:
    """Make `calls` calls, 64 concurrently; return the unexpected results."""

    async def caller() -> list[str]:
        kinds = chance.choices([check_call, check_interrupted_call], [92, 8], k=calls // CALLERS)
        return [await kind(executor, chance) for kind in kinds]

    return [result for found in await asyncio.gather(*(caller() for _ in range(CALLERS))) for result in found if result]


def usage_when_idle(executor: LocalExecutor, scratch_dir: Path) -> dict[str, list[float]]:
    """Return descriptors, threads and memory of supervisor, fork server and this process, once all runs have ended."""
    deadline = time.monotonic() + 60
    supervisor = executor._supervisor.link._process.pid  # type: ignore[union-attr]
    (fork_server,) = (pid for pid in descendants(supervisor) if Process(pid).number("PPid") == supervisor)
    while sum(Process(pid).is_alive() for pid in descendants(fork_server)) != SPARES or any(
        len(path.relative_to(scratch_dir).parts) == 3 for path in shallow_paths(scratch_dir, 3)
    ):
        assert time.monotonic() < deadline, sorted(shallow_paths(scratch_dir, 3))
        time.sleep(0.1)
    processes = [Process(pid) for pid in (supervisor, fork_server, os.getpid())]
    return {
        # the fork server keeps a ruleset for each slot
        "descriptors": [
            sum("landlock" not in handle for handle in process.handles().values()) for process in processes
        ],
        "threads": [process.number("Threads") for process in processes],
        "rss_mb": [process.number("VmRSS") / 1024 for process in processes],
    }


@pytest.fixture
def scratch_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


async def test_ten_thousand_calls_leave_nothing_behind(scratch_dir: Path) -> None:
    chance = random.Random(1)
    async with LocalExecutor(
        max_concurrency=CALLERS, memory_mb=1024, max_output_mb=8, scratch_dir=str(scratch_dir)
    ) as executor:
        unexpected = await soak(executor, chance, FIRST_CALLS)
        first = await asyncio.to_thread(usage_when_idle, executor, scratch_dir)
        unexpected += await soak(executor, chance, MORE_CALLS)
        last = await asyncio.to_thread(usage_when_idle, executor, scratch_dir)
    assert unexpected == []
    assert all(now <= then for then, now in zip(first["descriptors"], last["descriptors"], strict=True))
    assert all(now <= then + POOL_THREADS for then, now in zip(first["threads"], last["threads"], strict=True))
    assert all(now <= 1.1 * then + 4 for then, now in zip(first["rss_mb"], last["rss_mb"], strict=True))
    assert os.listdir(scratch_dir) == []  # noqa: PTH208
    assert not any(Process(pid).is_alive() for pid in descendants(os.getpid()))
