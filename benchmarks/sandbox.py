"""The sandbox benchmark: LocalExecutor compared with camel-ai's interpreter, `python -c` and SubprocessExecutor.

Contenders take turns within each round, so that the machine's noise affects them equally. Each contender runs in its
own worker process (`sandbox_worker`), which may belong to another environment.
"""

import json
import os
import platform
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Self

from rich.table import Table

from benchmarks.measuring import percentile
from strands_rollout.errors import SandboxError

OWN: Final = "local"
CONTENDERS: Final = {
    OWN: "LocalExecutor",
    "camel": "camel-ai",
    "cold_python": "python -c",
    "subprocess": "SubprocessExecutor",
}
_COMPARED_WITH: Final = ("camel", "cold_python")
_WORKER_CODE: Final = "from benchmarks.sandbox_worker import main; main()"
_ANSWER_TIMEOUT_S: Final = 900.0
_EXIT_TIMEOUT_S: Final = 30.0

OnStep = Callable[[str, int, int], None]
"""Function that receives the next stage, the number of finished steps, and the number of all steps."""
Figures = dict[str, float | None]
"""Values by key; None if the contender lacks the feature, or the machine does not show the value."""


class WorkerLink:
    """A contender in a process of its own, in the environment of `python`.

    `slots` is the number of calls that the contender must run at once; None for its default. `keeps_sessions` is True
    if the contender keeps the state of a named session.

    Raises:
        SandboxError: The process or the contender did not start.
    """

    def __init__(self, name: str, python: str, slots: int | None = None) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has ended
        start = f"import sys; sys.path.append({str(Path(__file__).parents[1])!r}); {_WORKER_CODE}"
        self._process = subprocess.Popen(
            [python, "-c", start, name, json.dumps(slots)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(python),
            text=True,
        )
        try:
            self.keeps_sessions = bool(self._answer())
        except BaseException:  # the process must not outlive any failure
            self.close()
            raise

    def ask(self, do: str, **arguments: Any) -> Any:
        """Request a measurement and return its result.

        `do` is "one_at_a_time", "at_once", "memory" or "start": the function of this name in `sandbox_worker` takes the
        `arguments` and describes the result.

        Raises:
            SandboxError: The contender failed.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process. Safe to call twice."""
        if self._errors.closed:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        watchdog = threading.Timer(_ANSWER_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        answer = json.loads(line) if line else {"error": f"its process ended{self._output_tail()}"}
        if "error" in answer:
            raise SandboxError(f"the contender {self.name!r} failed: {answer['error']}")
        return answer["value"]

    def _output_tail(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        return f"; its output ends with: {text[-1500:]}" if text else ""


def _environment(python: str) -> dict[str, str]:
    """Return this process's environment, with the worker's Python first on the PATH: camel-ai starts `python`."""
    path = os.pathsep.join([str(Path(python).absolute().parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path}


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of the measurements.

    Attributes:
        repeats: Rounds.
        calls: Program -> sequential calls per round.
        callers: Number of concurrent callers.
        calls_each: Program -> calls of each concurrent caller per round.
        session_calls: Calls in a session per round.
        children: Number of children whose memory is measured while all of them sleep.
        sleep_s: How long the children sleep, in seconds; all children must start within this time.
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
    """Measurements of a contender, round by round; memory is measured once.

    `calls_ms` has the milliseconds of each call by program; calls in a session are under "session".
    """

    calls_ms: dict[str, list[list[float]]] = field(default_factory=dict)
    at_once: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    memory: dict[str, float] | None = None
    starts: list[dict[str, float]] = field(default_factory=list)


def measure(pythons: Mapping[str, str], plan: Plan, on_step: OnStep) -> dict[str, Any]:
    """Measure all contenders, each with the interpreter in `pythons`; see `summary` for the result.

    Raises:
        SandboxError: A contender did not start, or failed.
    """
    names = list(pythons)
    samples = {name: Samples() for name in names}
    load_before, total = os.getloadavg()[0], plan.repeats + 2
    with ExitStack() as stack:
        on_step("start and warm up", 0, total)
        workers = {name: stack.enter_context(WorkerLink(name, python)) for name, python in pythons.items()}
        for worker in workers.values():
            for program in plan.calls:
                worker.ask("one_at_a_time", program=program, calls=2)
        for number in range(plan.repeats):
            on_step(f"round {number + 1} of {plan.repeats}", number + 1, total)
            turn = number % len(names)
            _measure_round([workers[name] for name in names[turn:] + names[:turn]], plan, samples)
    on_step("memory", total - 1, total)
    for name, python in pythons.items():
        with WorkerLink(name, python, plan.children) as worker:
            samples[name].memory = worker.ask("memory", children=plan.children, sleep_s=plan.sleep_s)
    on_step("done", total, total)
    return summary(samples, plan, load_before)


def _measure_round(workers: Sequence[WorkerLink], plan: Plan, samples: Mapping[str, Samples]) -> None:
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
            # the first call opens the session
            samples[worker.name].calls_ms.setdefault("session", []).append(took_ms[1:])
            samples[worker.name].starts.append(worker.ask("start"))


def _figure_labels() -> dict[str, str]:
    found: dict[str, str] = {}
    for program in ("trivial", "numpy", "sympy"):
        found |= {f"{program}_{p}_ms": f"{program}, one at a time: {p}, ms" for p in ("p50", "p99")}
    for program in ("trivial", "sympy"):
        found[f"{program}_at_once_per_s"] = f"{program}, many at once: calls per s"
        found |= {f"{program}_lag_{p}_ms": f"  loop lag: {p}, ms" for p in ("p50", "p99", "max")}
        found[f"{program}_client_cpu_ms"] = "  CPU of the caller per call, ms"
        found[f"{program}_total_cpu_ms"] = "  CPU of all processes per call, ms"
    for name, label in (("child", "a child"), ("supervisor", "the supervisor"), ("fork_server", "the fork server")):
        found[f"{name}_uss_mb"] = f"memory of {label}: private, MiB"
        found[f"{name}_pss_mb"] = "  with its share of shared pages, MiB"
    found |= {"start_ms": "start, ms", "first_call_ms": "first call after the start, ms"}
    return found | {f"session_{p}_ms": f"trivial, in a session: {p}, ms" for p in ("p50", "p99")}


FIGURES: Final = _figure_labels()
"""Key of a figure in JSON, which contains the unit -> label of the figure in the table."""


def figures_of(samples: Samples) -> Figures:
    """Return all figures of a contender.

    The p50 of calls, and figures with one value per round, are medians over the rounds. Each p99, and all figures of
    the lag, are computed from the values of all rounds together. Memory is measured once.
    """
    found: Figures = dict.fromkeys(FIGURES)
    for program, rounds in samples.calls_ms.items():
        found[f"{program}_p50_ms"] = median(map(median, rounds))
        found[f"{program}_p99_ms"] = percentile([took_ms for calls in rounds for took_ms in calls], 0.99)
    for program, phases in samples.at_once.items():
        lags = [lag for phase in phases for lag in phase["lags_ms"]]
        found[f"{program}_at_once_per_s"] = median(phase["per_s"] for phase in phases)
        found[f"{program}_lag_p50_ms"] = percentile(lags, 0.5)
        found[f"{program}_lag_p99_ms"] = percentile(lags, 0.99)
        found[f"{program}_lag_max_ms"] = max(lags, default=None)
        for name in ("client_cpu_ms", "total_cpu_ms"):
            values = [phase[name] for phase in phases if phase[name] is not None]
            found[f"{program}_{name}"] = median(values) if values else None
    for name in ("start_ms", "first_call_ms"):
        found[name] = median(start[name] for start in samples.starts) if samples.starts else None
    return found | (samples.memory or {})


def summary(samples: Mapping[str, Samples], plan: Plan, load_before: float) -> dict[str, Any]:
    """Return the result in JSON's types, with figures of four significant digits.

    Returns:
        `machine`, `plan`, `contenders` (name -> its figures) and `ratios` (name -> LocalExecutor's figures as multiples
        of this contender's). For a contender left out of the run, `contenders` and `ratios` have None. The load
        after the run is mostly the benchmark's own.
    """
    figures = {name: figures_of(one) for name, one in samples.items()}

    def ratios(others: Figures) -> Figures:
        return {key: own / other if own is not None and (other := others[key]) else None for key, own in ours.items()}

    def rounded(values: Figures) -> Figures:
        return {key: None if value is None else float(f"{value:.4g}") for key, value in values.items()}

    ours = figures[OWN]
    return {
        "machine": {
            "cpus": os.cpu_count(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "load_before": round(load_before, 2),
            "load_after": round(os.getloadavg()[0], 2),
        },
        "plan": asdict(plan),
        "contenders": {name: rounded(figures[name]) if name in figures else None for name in CONTENDERS},
        "ratios": {name: rounded(ratios(figures[name])) if name in figures else None for name in _COMPARED_WITH},
    }


def table(result: dict[str, Any]) -> Table:
    """Return a table of the figures side by side, without lines that have no value."""
    measured = {name: figures for name, figures in result["contenders"].items() if figures is not None}
    compared = {name: figures for name, figures in result["ratios"].items() if figures is not None}
    machine = result["machine"]
    shown = Table(
        title=f"{machine['cpus']} CPUs, {machine['system']}, Python {machine['python']}, "
        f"load {machine['load_before']} before; {result['plan']['callers']} callers at once, "
        f"{result['plan']['repeats']} rounds",
        title_justify="left",
    )
    shown.add_column("", no_wrap=True)
    for name in measured:
        shown.add_column(CONTENDERS[name], justify="right")
    for name in compared:
        shown.add_column(f"Local / {CONTENDERS[name]}", justify="right")
    for key, label in FIGURES.items():
        values = [figures[key] for figures in measured.values()]
        if any(value is not None for value in values):
            multiples = [_shown(figures, key, "{:.2f}x") for figures in compared.values()]
            own = [_shown(figures, key, "{:.4g}") for figures in measured.values()]
            shown.add_row(label, *own, *multiples)
    return shown


def _shown(figures: Figures, key: str, form: str) -> str:
    value = figures[key]
    return "-" if value is None else form.format(value)
