"""Ten thousand calls of all kinds on one executor: nothing is left behind, and nothing grows with their number."""

import asyncio
import itertools
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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
FIRST_CALLS, ALL_CALLS = 2_000, 10_000
Check = Callable[[ExecutionResult], bool]

SYMPY = "from sympy import *\nx = symbols('x')\nprint(solve(x**2 - 5*x + 6))"
FILES = "import os\nfor n in range(30): os.makedirs(f'd{n}/e'); open(f'd{n}/e/f', 'w').write('x' * 1000)\nprint(30)"
TEMPORARY = "import tempfile\nkept = [tempfile.NamedTemporaryFile(delete=False) for _ in range(5)]\nprint(len(kept))"
DETACHED = "import os\nf = open('f', 'wb'); os.unlink('f'); f.write(bytes(10**6)); f.flush(); print('gone')"
THREADS = """
import threading
done = []
threads = [threading.Thread(target=done.append, args=(n,)) for n in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(done))
"""
DAEMONS = """
import threading, time
for _ in range(8): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print('left')
"""
IPC = """
import ctypes, os, signal
libc = ctypes.CDLL(None)
print(libc.shmget(0, 4096, 0o1666), libc.semget(0, 1, 0o1666), libc.msgget(0, 0o1666))
for attempt in (lambda: open('/dev/shm/soak', 'w'), lambda: open('/tmp/soak', 'w'), os.fork, os.setsid):
    try:
        attempt()
    except OSError:
        print('refused')
"""
# what is run, with what limit in seconds, and what must come of it
CALLS: dict[str, tuple[int, str, float | None, Check]] = {
    "trivial": (30, "print(2 + 3)", None, lambda result: result.stdout == "5\n"),
    "sympy": (8, SYMPY, None, lambda result: result.stdout == "[2, 3]\n"),
    "exception": (6, "1 / 0", None, lambda result: "ZeroDivisionError" in result.stderr),
    "files": (6, FILES, None, lambda result: result.stdout == "30\n"),
    "temporary files": (3, TEMPORARY, None, lambda result: result.stdout == "5\n"),
    "detached file": (3, DETACHED, None, lambda result: result.stdout == "gone\n"),
    "threads": (4, THREADS, None, lambda result: result.stdout == "8\n"),
    "daemon threads": (3, DAEMONS, None, lambda result: result.stdout == "left\n"),
    "busy timeout": (3, "print(1)\nwhile True: pass", 0.1, lambda result: result.timed_out),
    "idle timeout": (3, "import time; time.sleep(60)", 0.1, lambda result: result.timed_out),
    "crash": (4, "import ctypes; ctypes.string_at(0)", None, lambda result: result.exit_code == -11),
    "exit": (3, "import os; os._exit(3)", None, lambda result: result.exit_code == 3),
    "suicide": (2, "import os; os.kill(os.getpid(), 9)", None, lambda result: result.exit_code == -9),
    "too much memory": (2, "bytearray(10**11)", None, lambda result: "MemoryError" in result.stderr),
    "output": (4, "print('x' * 10**6)", None, lambda result: result.truncated),
    "endless output": (
        1,
        "while True: print('x' * 10**5)",
        None,
        lambda result: (result.killed_by or "").startswith("output"),
    ),
    "timeout amid output": (2, "while True: print('x' * 10**5)", 0.05, lambda result: result.killed_by is not None),
    "much on disk": (1, "open('f', 'wb').write(bytes(10**7)); print(1)", None, lambda result: result.stdout == "1\n"),
    "ipc": (3, IPC, None, lambda result: result.stdout == "-1 -1 -1\n" + "refused\n" * 4),
}
SESSION_CALLS = (3, 5)
SHARE_OF_SESSIONS, SHARE_OF_CANCELLED = 0.04, 0.06


class Idle(NamedTuple):
    """What an executor holds when it has nothing to do; three numbers are of supervisor, template and this process."""

    children: int
    places: int
    scratch_files: list[str]
    descriptors: tuple[int, ...]
    threads: tuple[int, ...]
    rss_mb: tuple[float, ...]


class Soak:
    """Calls of all kinds, in an order that the seed decides."""

    def __init__(self, executor: LocalExecutor, seed: int) -> None:
        self._executor = executor
        self._random = random.Random(seed)
        self._names = itertools.count()
        self._calls_made = 0
        self.surprises: list[str] = []

    async def go_on(self, until_calls: int) -> None:
        """Make calls, 64 at a time, until there were so many in all; returns when all have ended."""

        async def caller() -> None:
            while self._calls_made < until_calls:
                await self._next()

        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(caller())

    async def _next(self) -> None:
        chance = self._random.random()
        if chance < SHARE_OF_SESSIONS:
            await self._session()
        elif chance < SHARE_OF_SESSIONS + SHARE_OF_CANCELLED:
            await self._cancelled(session=None)
        else:
            await self._whole()

    async def _whole(self) -> None:
        (kind,) = self._random.choices(list(CALLS), [weight for weight, *_ in CALLS.values()])
        _, code, timeout_s, is_right = CALLS[kind]
        result = await self._call(self._executor.run(code, timeout_s=timeout_s))
        if result.infra_error is not None or not is_right(result):
            self.surprises.append(f"{kind}: {shortened(result)}")

    async def _session(self) -> None:
        """A session that is closed, crashes, or is cancelled, after a few calls."""
        name = f"session {next(self._names)}"
        for number in range(1, self._random.randint(*SESSION_CALLS)):
            code = "n = 1; open('f', 'w').close()" if number == 1 else "n += 1"
            result = await self._call(self._executor.run(f"{code}\nn", session=name))
            if result.stdout != f"{number}\n":
                self.surprises.append(f"{name}: {shortened(result)}")
        end = self._random.choice(["close", "crash", "cancel"])
        if end == "close":
            await self._executor.close_session(name)
        elif end == "crash":
            result = await self._call(self._executor.run("import os; os.abort()", session=name))
            if not result.session_lost:
                self.surprises.append(f"{name}: {shortened(result)}")
        else:
            await self._cancelled(session=name)

    async def _cancelled(self, session: str | None) -> None:
        """Cancel a call at any moment: while it waits, starts, or runs."""
        call = asyncio.create_task(self._call(self._executor.run("import time; time.sleep(60)", session=session)))
        await asyncio.sleep(self._random.choice([0, 0.001, 0.01, 0.1, 0.3]))
        call.cancel()
        try:
            self.surprises.append(f"cancelled: {shortened(await call)}")
        except asyncio.CancelledError:
            if session is not None:  # it may have been cancelled before it reached the session
                await self._executor.close_session(session)

    async def _call(self, run: Coroutine[Any, Any, ExecutionResult]) -> ExecutionResult:
        self._calls_made += 1
        return await run


@pytest.fixture
def scratch_dir() -> Iterator[Path]:
    """A temporary directory that other users may pass; also where everything else goes that this process makes."""
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        Path(folder).chmod(0o755)
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def shortened(result: ExecutionResult) -> ExecutionResult:
    return replace(result, stdout=result.stdout[-100:], stderr=result.stderr[-300:])


def leftovers(scratch_dir: Path) -> dict[str, object]:
    """What may not be more than before."""
    own = Process(os.getpid())
    return {
        "processes": sorted(pid for pid in descendants(own.pid) if Process(pid).is_alive()),
        "descriptors": sorted(own.handles()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": sorted(scratch_dir.iterdir()),
        "shared memory files": sorted(Path("/dev/shm").iterdir()),
        "System V objects": [Path("/proc/sysvipc", kind).read_text().count("\n") for kind in ("shm", "msg", "sem")],
    }


async def idle_state(executor: LocalExecutor, scratch_dir: Path, children: int) -> Idle:
    """What it holds when there are so many children again, and nothing in their directories."""
    give_up_at = time.monotonic() + 30
    while True:
        state = _state(executor, scratch_dir)
        if time.monotonic() > give_up_at or (state.children == children and not state.scratch_files):
            return state
        await asyncio.sleep(0.1)


def _state(executor: LocalExecutor, scratch_dir: Path) -> Idle:
    supervisor = executor._supervisor.link._process.pid  # type: ignore[union-attr]
    (template,) = (pid for pid in descendants(supervisor) if Process(pid).number("PPid") == supervisor)
    kept = [Process(pid) for pid in (supervisor, template, os.getpid())]
    depths = {path: len(path.relative_to(scratch_dir).parts) for path in shallow_paths(scratch_dir, 3)}
    return Idle(
        children=len([pid for pid in descendants(template) if Process(pid).is_alive()]),
        places=sum(depth == 2 for depth in depths.values()),
        scratch_files=[str(path) for path, depth in depths.items() if depth == 3],
        # the template keeps one ruleset for each place
        descriptors=tuple(sum("landlock" not in what for what in process.handles().values()) for process in kept),
        threads=tuple(process.number("Threads") for process in kept),
        rss_mb=tuple(process.number("VmRSS") / 1024 for process in kept),
    )


def all_at_most(now: Sequence[float], then: Sequence[float], factor: float = 1.0, more: float = 0.0) -> bool:
    return all(a <= factor * b + more for a, b in zip(now, then, strict=True))


async def test_ten_thousand_calls_leave_nothing_behind_and_make_nothing_grow(
    scratch_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = leftovers(scratch_dir)
    async with LocalExecutor(
        max_concurrency=CALLERS, memory_mb=1024, max_output_mb=8, scratch_dir=str(scratch_dir)
    ) as executor:
        soak = Soak(executor, seed=1)
        started = time.monotonic()
        await soak.go_on(FIRST_CALLS)
        first = await idle_state(executor, scratch_dir, SPARES)
        await soak.go_on(ALL_CALLS)
        last = await idle_state(executor, scratch_dir, SPARES)
        with capsys.disabled():
            print(f"\n{time.monotonic() - started:.0f} s; after {FIRST_CALLS} and {ALL_CALLS} calls:\n{first}\n{last}")
    await asyncio.get_running_loop().shutdown_default_executor()
    assert soak.surprises == []
    assert last.children == first.children == SPARES
    assert last.scratch_files == first.scratch_files == []
    assert last.places <= 3 * CALLERS
    assert all_at_most(last.descriptors, first.descriptors)
    assert all_at_most(last.threads, first.threads, more=POOL_THREADS)
    assert all_at_most(last.rss_mb, first.rss_mb, 1.1, 4)
    assert leftovers(scratch_dir) == before
