"""What is measured of one contender, inside its worker. Raw values leave here; figures are made of them elsewhere.

Every answer of a contender is checked: one that fails fast must not look fast.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from typing import Any

from sandbox_benchmark import process_tree
from sandbox_benchmark.contenders import Contender, make_contender
from sandbox_benchmark.loop_lag import LagWatch
from sandbox_benchmark.programs import PROGRAMS, Program, sleepy_program

_SNAPSHOT_S = 0.3


async def one_at_a_time(contender: Contender, program: str, calls: int, session: str | None = None) -> list[float]:
    """Milliseconds of each call, one after the other."""
    return [await _timed(contender, PROGRAMS[program], session) for _ in range(calls)]


async def at_once(contender: Contender, program: str, callers: int, calls_each: int) -> dict[str, Any]:
    """Many callers, each with one call after the other: calls per second, the loop's lag, time on CPUs per call."""

    async def caller() -> None:
        await one_at_a_time(contender, program, calls_each)

    calls = callers * calls_each
    client_before_s, tree_before_s, started = _own_cpu_s(), process_tree.cpu_s(os.getpid()), time.perf_counter()
    async with LagWatch() as watch:
        await asyncio.gather(*(caller() for _ in range(callers)))
        wall_s = time.perf_counter() - started
    client_s, tree_s = _own_cpu_s() - client_before_s, process_tree.cpu_s(os.getpid())
    total_ms = None if tree_s is None or tree_before_s is None else (tree_s - tree_before_s) / calls * 1e3
    return {
        "per_s": calls / wall_s,
        "lags_ms": watch.lags_ms,
        "client_cpu_ms": client_s / calls * 1e3,
        "total_cpu_ms": total_ms,
    }


async def memory(contender: Contender, children: int, sleep_s: float) -> dict[str, float] | None:
    """Mebibytes of each of some sleeping children on average, and of each helper; None where it can't be read.

    The contender must be able to run that many at once, and they must all be up within `sleep_s`.
    """
    code = sleepy_program(sleep_s)
    runs = asyncio.gather(*(contender.run(code) for _ in range(children)))
    snapshots, helpers = [], process_tree.chain(os.getpid(), len(contender.helpers))
    while not runs.done():
        snapshots.append(process_tree.memory_mb(os.getpid()))
        await asyncio.wait([runs], timeout=_SNAPSHOT_S)
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
    """Milliseconds until a new contender of the same kind has started, and those of its first call."""
    started = time.perf_counter()
    contender = make_contender(name)
    await contender.start()
    start_ms = (time.perf_counter() - started) * 1e3
    first_call_ms = await _timed(contender, PROGRAMS["trivial"], None)
    await contender.stop()
    return {"start_ms": start_ms, "first_call_ms": first_call_ms}


async def _timed(contender: Contender, program: Program, session: str | None) -> float:
    started = time.perf_counter()
    printed = await contender.run(program.code, session)
    took_ms = (time.perf_counter() - started) * 1e3
    if printed.strip() != program.expected:
        raise RuntimeError(f"a program printed {printed[-500:]!r}; expected {program.expected!r}")
    return took_ms


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
