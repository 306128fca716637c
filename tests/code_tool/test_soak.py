"""Ten thousand calls of all kinds on one executor: nothing is left behind, and nothing grows with their number."""

import asyncio
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from attack_targets import shallow_paths
from host_view import Process, descendants

from strands_rollout.code_tool import ExecutionResult, LocalExecutor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc"),
]
CALLERS = 64
SPARES = 8  # children that wait for code
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)  # of asyncio.to_thread, started when they are needed
FIRST_CALLS, MORE_CALLS = 2_000, 8_000
FILES = "import os\nfor n in range(30): os.makedirs(f'd{n}/e'); open(f'd{n}/e/f', 'w').write('x' * 1000)"
TEMPORARY = "import tempfile\nkept = [tempfile.NamedTemporaryFile(delete=False) for _ in range(5)]"
DETACHED = "import os\nf = open('f', 'wb'); os.unlink('f'); f.write(bytes(10**6)); f.flush()"
DAEMONS = (
    "import threading, time\nfor _ in range(8): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
)
# what is run, with what limit in seconds, and what must be told of it
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


async def whole_call(executor: LocalExecutor, chance: random.Random) -> str:
    """What was told, where something else had to be."""
    code, timeout_s, expected = chance.choice(CALLS)
    told = str(await executor.run(code, timeout_s=timeout_s))
    return "" if expected in told and "infra_error=None" in told else f"{code}: {told[-500:]}"


async def session(executor: LocalExecutor, chance: random.Random) -> str:
    """One of two calls, the second of which may crash it, and which is closed."""
    name, crashes = str(chance.random()), chance.random() < 0.5
    await executor.run("n = 1; open('f', 'w').close()", session=name)
    last = await executor.run("import os; os.abort()" if crashes else "n + 1", session=name)
    await executor.close_session(name)
    return "" if (last.session_lost, last.stdout) == (crashes, "" if crashes else "2\n") else str(last)


async def cancelled_call(executor: LocalExecutor, chance: random.Random) -> str:
    """Cancelled at any moment: while it waits, starts, or runs."""
    call: asyncio.Task[ExecutionResult] = asyncio.create_task(executor.run("import time; time.sleep(60)"))
    await asyncio.sleep(chance.choice([0, 0.001, 0.01, 0.1, 0.3]))
    call.cancel()
    (outcome,) = await asyncio.gather(call, return_exceptions=True)
    return "" if isinstance(outcome, asyncio.CancelledError) else str(outcome)


async def soak(executor: LocalExecutor, chance: random.Random, calls: int) -> list[str]:
    """Make so many calls, 64 at a time; returns what was not as it must be."""

    async def caller() -> list[str]:
        kinds = chance.choices([whole_call, session, cancelled_call], [90, 4, 6], k=calls // CALLERS)
        return [await kind(executor, chance) for kind in kinds]

    return [words for found in await asyncio.gather(*(caller() for _ in range(CALLERS))) for words in found if words]


class Idle(NamedTuple):
    """What an executor holds when it has nothing to do; three numbers are of supervisor, template and this process."""

    children: int
    places: int
    scratch_files: list[str]
    descriptors: list[float]
    threads: list[float]
    rss_mb: list[float]


async def idle_state(executor: LocalExecutor, scratch_dir: Path) -> Idle:
    """What it holds when there are so many children again, and nothing in their directories."""
    give_up_at = time.monotonic() + 30
    while True:
        supervisor = executor._supervisor.link._process.pid  # type: ignore[union-attr]
        (template,) = (pid for pid in descendants(supervisor) if Process(pid).number("PPid") == supervisor)
        kept = [Process(pid) for pid in (supervisor, template, os.getpid())]
        depths = {path: len(path.relative_to(scratch_dir).parts) for path in shallow_paths(scratch_dir, 3)}
        state = Idle(
            children=len([pid for pid in descendants(template) if Process(pid).is_alive()]),
            places=sum(depth == 2 for depth in depths.values()),
            scratch_files=[str(path) for path, depth in depths.items() if depth == 3],
            # the template keeps one ruleset for each place
            descriptors=[sum("landlock" not in what for what in process.handles().values()) for process in kept],
            threads=[process.number("Threads") for process in kept],
            rss_mb=[process.number("VmRSS") / 1024 for process in kept],
        )
        if time.monotonic() > give_up_at or (state.children == SPARES and not state.scratch_files):
            return state
        await asyncio.sleep(0.1)


def leftovers(scratch_dir: Path) -> dict[str, object]:
    """What may not be more than before."""
    return {
        "processes": sorted(pid for pid in descendants(os.getpid()) if Process(pid).is_alive()),
        "descriptors": sorted(Process(os.getpid()).handles()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": sorted([*scratch_dir.iterdir(), *Path("/dev/shm").iterdir()]),
        "System V objects": [Path("/proc/sysvipc", kind).read_text().count("\n") for kind in ("shm", "msg", "sem")],
    }


@pytest.fixture
def scratch_dir() -> Iterator[Path]:
    """A temporary directory that other users may pass; also where everything else goes that this process makes."""
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        Path(folder).chmod(0o755)
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def all_at_most(now: list[float], then: list[float], factor: float = 1.0, more: float = 0.0) -> bool:
    return all(a <= factor * b + more for a, b in zip(now, then, strict=True))


async def test_ten_thousand_calls_leave_nothing_behind_and_make_nothing_grow(scratch_dir: Path) -> None:
    before, chance = leftovers(scratch_dir), random.Random(1)
    async with LocalExecutor(
        max_concurrency=CALLERS, memory_mb=1024, max_output_mb=8, scratch_dir=str(scratch_dir)
    ) as executor:
        surprises = await soak(executor, chance, FIRST_CALLS)
        first = await idle_state(executor, scratch_dir)
        surprises += await soak(executor, chance, MORE_CALLS)
        last = await idle_state(executor, scratch_dir)
    await asyncio.get_running_loop().shutdown_default_executor()
    assert surprises == []
    assert last.children == first.children == SPARES
    assert last.scratch_files == first.scratch_files == []
    assert last.places <= 3 * CALLERS
    assert all_at_most(last.descriptors, first.descriptors)
    assert all_at_most(last.threads, first.threads, more=POOL_THREADS)
    assert all_at_most(last.rss_mb, first.rss_mb, 1.1, 4)
    assert leftovers(scratch_dir) == before
