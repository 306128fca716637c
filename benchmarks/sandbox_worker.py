"""A measured process of the sandbox benchmark, with the contenders, their programs and the measurements.

Reads orders from stdin and writes answers to stdout, a line of JSON each. An order is `{"do": NAME, ...arguments}`;
NAME is the function `one_at_a_time`, `at_once`, `memory` or `start`. An answer is `{"value": ...}` or `{"error":
"..."}`. The first answer needs no order: the contender has started, and the value is its `keeps_sessions`. The process
exits when its stdin closes.

Imports only the standard library and a contender's own package, because a worker may run in another environment. Every
answer of a contender is checked: a contender that fails fast must not look fast.
"""

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TextIO

from benchmarks.measuring import LoopLag, memory_mb, oldest_children, tree_cpu_s

_SNAPSHOT_INTERVAL_S: Final = 0.3


_NUMPY: Final = """\
import numpy as np

A = np.array([[2.0, 1.0, -1.0], [-3.0, -1.0, 2.0], [-2.0, 1.0, 2.0]])
b = np.array([8.0, -11.0, -3.0])
x = np.linalg.solve(A, b)
print([round(float(value), 6) for value in x])
"""
_SYMPY: Final = """\
from sympy import Eq, solve, symbols

a, b = symbols("a b", real=True)
solutions = solve([Eq(a**2 + b**2, 25), Eq(a + b, 7)], [a, b])
print(solutions)
"""
_SLEEPING: Final = """\
import os, time
from sympy import solve, symbols

x = symbols("x")
assert solve(x**2 - 5 * x + 6, x) == [2, 3]
time.sleep({sleep_s})
print(os.getpid())
"""

PROGRAMS: Final = {
    "trivial": ("print(2 + 3)", "5"),
    "numpy": (_NUMPY, "[2.0, 3.0, -1.0]"),
    "sympy": (_SYMPY, "[(3, 4), (4, 3)]"),
}
"""Programs by name, each with its expected output."""


class Contender:
    """A way to run programs; subclasses implement `run`. By default, `start` and `stop` do nothing.

    Attributes:
        helpers: Names of the contender's permanent processes: the first is a child of the caller, each further process
            a child of the previous process.
        keeps_sessions: True if `run` keeps the state of a named session.
    """

    helpers: tuple[str, ...] = ()
    keeps_sessions = False

    async def start(self) -> None: ...

    async def run(self, code: str, session: str | None = None) -> str:
        """Run code to its end and return what it printed, errors included."""
        raise NotImplementedError

    async def stop(self) -> None: ...


class ColdPython(Contender):
    """A new `python -c` for each call, started from the event loop, without a limit on concurrent calls."""

    async def run(self, code: str, session: str | None = None) -> str:
        del session
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=pipe, stderr=pipe)
        stdout, stderr = await process.communicate()
        return (stdout + stderr).decode()


class CamelInterpreter(Contender):
    """A new SubprocessInterpreter of camel-ai for each call, in a thread.

    slime's example does the same: Strands runs a synchronous tool with `asyncio.to_thread`.
    """

    def __init__(self, slots: int | None) -> None:
        self._slots = slots

    async def start(self) -> None:
        """Limit concurrent calls to the slots, and check that camel-ai starts this environment's `python`.

        Raises:
            RuntimeError: camel-ai starts another Python.
        """
        if self._slots is not None:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(self._slots))
        printed = await self.run("import sys; print(sys.prefix)")
        if printed.strip() != sys.prefix:
            raise RuntimeError(
                f"camel-ai starts the first 'python' on the PATH, which belongs to {printed.strip()!r}; expected "
                f"{sys.prefix!r}. With --camel-python, name the python of a virtual environment"
            )

    async def run(self, code: str, session: str | None = None) -> str:
        del session
        return await asyncio.to_thread(self._run, code)

    def _run(self, code: str) -> str:
        from camel.interpreters import SubprocessInterpreter  # type: ignore[import-not-found,unused-ignore]

        interpreter = SubprocessInterpreter(require_confirm=False, print_stdout=False, print_stderr=False)
        return str(interpreter.run(code, "python"))

    async def stop(self) -> None:
        await asyncio.get_running_loop().shutdown_default_executor()


class OwnExecutor(Contender):
    """An executor of strands_rollout, with default settings except for `max_concurrency`, which is `slots` if given."""

    def __init__(self, name: str, slots: int | None) -> None:
        import strands_rollout.code_tool

        options: dict[str, Any] = {} if slots is None else {"max_concurrency": slots}
        self._executor = getattr(strands_rollout.code_tool, name)(**options)
        self.keeps_sessions = self._executor.facts.keeps_sessions
        if name == "LocalExecutor":
            self.helpers = ("supervisor", "fork_server")

    async def start(self) -> None:
        if hasattr(self._executor, "start"):
            await self._executor.start()

    async def run(self, code: str, session: str | None = None) -> str:
        result = await self._executor.run(code, session=session)
        return str(result.stdout + result.stderr) + (f"infra_error: {result.infra_error}" if result.infra_error else "")

    async def stop(self) -> None:
        await self._executor.aclose()


def make_contender(name: str, slots: int | None = None) -> Contender:
    """Return a contender that can run `slots` calls at once, or its default number if `slots` is None."""
    if name == "cold_python":
        return ColdPython()
    if name == "camel":
        return CamelInterpreter(slots)
    return OwnExecutor({"local": "LocalExecutor", "subprocess": "SubprocessExecutor"}[name], slots)


async def one_at_a_time(contender: Contender, program: str, calls: int, session: str | None = None) -> list[float]:
    """Make calls one after the other, and measure the milliseconds of each."""
    return [await _call_ms(contender, program, session) for _ in range(calls)]


async def at_once(contender: Contender, program: str, callers: int, calls_each: int) -> dict[str, Any]:
    """Measure many callers, each with sequential calls: calls per second, the loop's lag, CPU time per call."""

    async def caller() -> None:
        await one_at_a_time(contender, program, calls_each)

    calls = callers * calls_each
    client_before_s, tree_before_s, started = _own_cpu_s(), tree_cpu_s(os.getpid()), time.perf_counter()
    with LoopLag() as watch:
        await asyncio.gather(*(caller() for _ in range(callers)))
        wall_s = time.perf_counter() - started
    client_s, tree_s = _own_cpu_s() - client_before_s, tree_cpu_s(os.getpid())
    total_ms = None if tree_s is None or tree_before_s is None else (tree_s - tree_before_s) / calls * 1e3
    return {
        "per_s": calls / wall_s,
        "lags_ms": watch.lags_ms,
        "client_cpu_ms": client_s / calls * 1e3,
        "total_cpu_ms": total_ms,
    }


async def memory(contender: Contender, children: int, sleep_s: float) -> dict[str, float] | None:
    """Measure the mean memory of sleeping children and the memory of each helper, in MiB.

    The contender must run `children` programs at once, and start all of them within `sleep_s`. The result is None if
    the memory of all children was never read at the same time, for example because there is no /proc.
    """
    code = _SLEEPING.format(sleep_s=sleep_s)
    runs = asyncio.gather(*(contender.run(code) for _ in range(children)))
    snapshots, helpers = [], oldest_children(os.getpid(), len(contender.helpers))
    while not runs.done():
        snapshots.append(memory_mb(os.getpid()))
        await asyncio.wait([runs], timeout=_SNAPSHOT_INTERVAL_S)
    pids = [int(printed) for printed in await runs]
    complete = [snapshot for snapshot in snapshots if snapshot.keys() >= set(pids)]
    if not complete:
        return None
    fullest = max(complete, key=lambda snapshot: sum(snapshot[pid][0] for pid in pids))
    found = {}
    for i, kind in enumerate(("uss", "pss")):
        found[f"child_{kind}_mb"] = sum(fullest[pid][i] for pid in pids) / children
        for name, pid in zip(contender.helpers, helpers, strict=False):
            if pid in fullest:
                found[f"{name}_{kind}_mb"] = fullest[pid][i]
    return found


async def start(name: str) -> dict[str, float]:
    """Measure how long a new contender of this name takes to start, and how long its first call takes."""
    started = time.perf_counter()
    contender = make_contender(name)
    await contender.start()
    start_ms = (time.perf_counter() - started) * 1e3
    first_call_ms = await _call_ms(contender, "trivial", None)
    await contender.stop()
    return {"start_ms": start_ms, "first_call_ms": first_call_ms}


async def _call_ms(contender: Contender, program: str, session: str | None) -> float:
    code, expected = PROGRAMS[program]
    started = time.perf_counter()
    printed = await contender.run(code, session)
    took_ms = (time.perf_counter() - started) * 1e3
    if printed.strip() != expected:
        raise RuntimeError(f"a program printed {printed[-500:]!r}; expected {expected!r}")
    return took_ms


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def _run_order(name: str, contender: Contender, order: dict[str, Any]) -> Any:
    measures: dict[str, Any] = {"one_at_a_time": one_at_a_time, "at_once": at_once, "memory": memory}
    do = order.pop("do")
    return await (start(name) if do == "start" else measures[do](contender, **order))


def main() -> None:
    name, slots = sys.argv[1], json.loads(sys.argv[2])
    orders, answers = _reserve_streams()
    with asyncio.Runner() as runner:

        def answer(work: Coroutine[Any, Any, Any]) -> bool:
            """Answer with the result of the work, or its error; return whether it succeeded."""
            try:
                found = {"value": runner.run(work)}
            except Exception as e:  # any error is the answer
                found = {"error": f"{type(e).__name__}: {e}"}
            answers.write(json.dumps(found) + "\n")
            answers.flush()
            return "value" in found

        contender = make_contender(name, slots)
        if answer(_start(contender)):
            for line in orders:
                answer(_run_order(name, contender, json.loads(line)))
            runner.run(contender.stop())


async def _start(contender: Contender) -> bool:
    await contender.start()
    return contender.keeps_sessions


def _reserve_streams() -> tuple[TextIO, TextIO]:
    """Reserve stdin and stdout for orders and answers; programs that run here may use the descriptors 0 and 1."""
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return orders, answers
