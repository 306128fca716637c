"""The order of the work: round by round, every contender in turn, so that the machine's noise hits all alike.

Knows workers and what they can be asked; nothing of figures or tables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from sandbox_benchmark.worker_link import WorkerLink


class Progress(Protocol):
    """Where a run says how far it is."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take the news: `done` of `total` steps are finished, and the stage's are next."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        repeats: Rounds.
        calls: Program -> calls one after the other, per round.
        callers: Callers at once.
        calls_each: Program -> calls of each of them, per round.
        session_calls: Calls in a session, per round.
        children: Children whose memory is measured, all asleep at the same time.
        sleep_s: For how long they sleep; all of them must have started in that time.
    """

    repeats: int = 5
    calls: Mapping[str, int] = field(default_factory=lambda: {"trivial": 40, "numpy": 20, "sympy": 20})
    callers: int = 64
    calls_each: Mapping[str, int] = field(default_factory=lambda: {"trivial": 4, "sympy": 1})
    session_calls: int = 40
    children: int = 8
    sleep_s: float = 8.0


QUICK_PLAN: Final = Plan(1, {"trivial": 2, "numpy": 1, "sympy": 1}, 4, {"trivial": 5, "sympy": 1}, 2, 1, 0.6)


@dataclass(slots=True)
class Samples:
    """What was measured of one contender; a list has one entry per round, except where it says otherwise.

    Attributes:
        calls_ms: Program -> rounds of the milliseconds of each call; "session" is a program here.
        at_once: Program -> what `measures.at_once` returns.
        memory: What `measures.memory` returns, once.
        starts: What `measures.start` returns.
    """

    calls_ms: dict[str, list[list[float]]] = field(default_factory=dict)
    at_once: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    memory: dict[str, float] | None = None
    starts: list[dict[str, float]] = field(default_factory=list)


@dataclass(slots=True)
class Measurement:
    """A run's samples, with the load that the machine had.

    Attributes:
        samples: Contender -> what was measured of it.
        load_before: Processes that wanted to run, averaged over the minute before the run.
        load_after: Likewise, in its last minute: of the benchmark itself for the most part.
    """

    samples: dict[str, Samples]
    load_before: float
    load_after: float = 0.0


def measure(pythons: Mapping[str, str], plan: Plan, progress: Progress) -> Measurement:
    """Measure all contenders.

    Args:
        pythons: Contender -> the interpreter of the environment that has it.
        plan: How much.
        progress: Told of each step.

    Raises:
        SandboxError: A contender did not start, or failed.
    """
    names = list(pythons)
    measurement = Measurement({name: Samples() for name in names}, os.getloadavg()[0])
    total = plan.repeats + 2
    with ExitStack() as stack:
        progress("start and warm up", 0, total)
        workers = {name: stack.enter_context(WorkerLink(name, python)) for name, python in pythons.items()}
        for worker in workers.values():
            for program in plan.calls:
                worker.ask("one_at_a_time", program=program, calls=2)
        for number in range(plan.repeats):
            progress(f"round {number + 1} of {plan.repeats}", number + 1, total)
            turn = number % len(names)
            _round([workers[name] for name in names[turn:] + names[:turn]], plan, measurement.samples)
    progress("memory", total - 1, total)
    for name, python in pythons.items():
        with WorkerLink(name, python, plan.children) as worker:
            measurement.samples[name].memory = worker.ask("memory", children=plan.children, sleep_s=plan.sleep_s)
    progress("done", total, total)
    measurement.load_after = os.getloadavg()[0]
    return measurement


def _round(workers: Sequence[WorkerLink], plan: Plan, samples: Mapping[str, Samples]) -> None:
    for program, calls in plan.calls.items():
        for worker in workers:
            took_ms = worker.ask("one_at_a_time", program=program, calls=calls)
            samples[worker.name].calls_ms.setdefault(program, []).append(took_ms)
    for program, calls_each in plan.calls_each.items():
        for worker in workers:
            found = worker.ask("at_once", program=program, callers=plan.callers, calls_each=calls_each)
            samples[worker.name].at_once.setdefault(program, []).append(found)
    for worker in workers:
        if worker.keeps_sessions:
            took_ms = worker.ask("one_at_a_time", program="trivial", calls=plan.session_calls + 1, session="session")
            samples[worker.name].calls_ms.setdefault("session", []).append(took_ms[1:])  # the first one opens it
            samples[worker.name].starts.append(worker.ask("start"))
