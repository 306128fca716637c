"""The table of docs/performance.md, measured in one run: relative costs of episodes, memory, lag and start.

A row is measured once in each round, or only in the first rounds if its measurement is slow. Within a round, steps with
the same numbers of turns and of concurrent episodes follow each other. The table has the medians and quartiles over the
rounds.
"""

import itertools
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.client import BenchProcessError, Figures, OnStep, missing_reason, run_facts, stage
from benchmarks.measuring import quartiles
from benchmarks.peer import PEER, MissingPeerError, peer_versions
from benchmarks.report import format_number, heading, markdown
from benchmarks.variants import FLOOR, FLOOR_WITH_ORJSON, WITH_IMAGES, Step
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer

_AT_ONCE: Final = 64
_TURNS_PER_ROUND: Final = 640
_WORKERS: Final = "ours-2-workers"
_WORKERS_AT_ONCE: Final = 256
_TIMED_IMPORT: Final = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
_START: Final = Step("start", "ours", turns=0, concurrency=0, episodes=0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of episodes: concurrent for memory and lag, in total for the growth of memory."""

    memory: int = 256
    lag: int = 2_048
    growth: int = 20_000


QUICK_SIZES: Final = Sizes(memory=16, lag=64, growth=400)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table.

    Attributes:
        group: Name of the row's group, to select it.
        name: Meaning of the figure, with its unit.
        steps: The measurements that the figure needs.
        figure: Function that computes the row's figure from the figures of each step.
        goal: The largest figure that meets the goal; None if there is no goal.
        rounds: Maximum number of rounds that measure the row; None for all.
    """

    group: str
    name: str
    steps: tuple[Step, ...]
    figure: Callable[..., float]
    goal: float | None = None
    rounds: int | None = None


def all_rows(sizes: Sizes) -> list[Row]:
    """Return the rows of the table, in its order."""
    ours = {turns: _cpu_step("ours", turns) for turns in (5, 20, 80)}
    agents = {
        "ours-hook": "a hook on every event",
        "ours-plugin": "a factory and a plugin",
        "ours-factory": "a factory",
    }
    memory = Step("rss", "ours", 20, sizes.memory, sizes.memory)
    growth = Step("growth", "ours", 5, _AT_ONCE, sizes.growth)
    lag = Step("lag", WITH_IMAGES, 5, sizes.lag, sizes.lag, runs_code=True)
    found = [
        _cpu_ratio("peer", f"{PEER}, 5 tool turns", ours[5], _cpu_step(PEER, 5), 0.45),
        _cpu_ratio("peer", f"{PEER}, 20 tool turns", ours[20], _cpu_step(PEER, 20), 0.22),
        _cpu_ratio("floor", "the requests alone, 20 tool turns", ours[20], _cpu_step(FLOOR, 20), 1.0),
        _cpu_ratio("floor", "the requests alone, 80 tool turns", ours[80], _cpu_step(FLOOR, 80), 0.8),
        _cpu_ratio("floor", "the requests with orjson, 20 tool turns", ours[20], _cpu_step(FLOOR_WITH_ORJSON, 20)),
        _cpu_ratio("floor", "the requests with orjson, 80 tool turns", ours[80], _cpu_step(FLOOR_WITH_ORJSON, 80)),
        _cpu_ratio("growth", "80 tool turns / 20 tool turns", ours[80], ours[20], 4.3),
    ]
    for turns, (variant, label) in itertools.product((5, 20), agents.items()):
        name = f"with {label} / a plain agent, {turns} tool turns"
        found.append(_cpu_ratio("agents", name, _cpu_step(variant, turns), ours[turns], 1.2))
    for turns, goal in ((20, 1.1), (128, 1.0)):
        name = f"a turn at the gateway / in process, {turns} tool turns"
        played = (_turns_step("gateway-chat", turns), _turns_step("ours", turns))
        found.append(Row("gateway", name, played, _ratio_of("cpu_ms_per_turn"), goal))
    return [
        *found,
        _cpu_ratio(
            "workers",
            "driver of 2 workers / in process, 20 tool turns",
            _cpu_step(_WORKERS, 20, _WORKERS_AT_ONCE),
            _cpu_step("ours", 20, _WORKERS_AT_ONCE),
            0.1,
        ),
        Row(
            "memory",
            f"resident memory per episode, 20 tool turns, {sizes.memory} at once, kB",
            (memory,),
            lambda one: float(one["peak_rss_bytes_per_episode"]) / 1e3,
        ),
        Row(
            "memory",
            f"Python's memory per episode, 20 tool turns, {sizes.memory} at once, kB",
            (replace(memory, kind="traced"),),
            lambda one: float(one["peak_traced_bytes_per_episode"]) / 1e3,
            rounds=3,
        ),
        Row(
            "memory",
            f"growth of resident memory over {sizes.growth:,} episodes, 5 tool turns, MB",
            (growth,),
            lambda one: float(one["growth_bytes"]) / 1e6,
            rounds=1,
        ),
        Row(
            "lag",
            f"event-loop lag at p99, {sizes.lag:,} at once with code, images and reward, ms",
            (lag,),
            lambda one: float(one["lag_p99_ms"]),
            goal=20,
            rounds=3,
        ),
        Row("start", "import strands_rollout, ms", (_START,), lambda one: float(one["import_ms"])),
        Row("start", "import strands_rollout.generate, ms", (_START,), lambda one: float(one["import_generate_ms"])),
        Row("start", "strands-rollout --help, CPU, ms", (_START,), lambda one: float(one["help_cpu_ms"]), goal=300),
    ]


def _cpu_step(variant: str, turns: int, at_once: int = _AT_ONCE) -> Step:
    return Step("cpu", variant, turns, at_once, max(at_once, _TURNS_PER_ROUND // turns))


def _turns_step(variant: str, turns: int) -> Step:
    return Step("turns", variant, turns, _AT_ONCE, _AT_ONCE)


def _cpu_ratio(group: str, name: str, step: Step, base: Step, goal: float | None = None) -> Row:
    name = name if " / " in name else f"strands-rollout / {name}"
    return Row(group, name, (step, base), _ratio_of("cpu_ms_per_trajectory"), goal)


def _ratio_of(name: str) -> Callable[[Figures, Figures], float]:
    return lambda one, base: float(one[name]) / float(base[name])


GROUPS: Final = tuple(dict.fromkeys(row.group for row in all_rows(Sizes())))


@dataclass(slots=True)
class Run:
    """A run of the table's measurements, with the figures measured so far.

    Attributes:
        facts: Versions, machine, command and tokenizer.
        rows: The rows to measure.
        rounds: The number of rounds.
        skipped: Reasons why steps can't be measured here.
        failed: Errors of steps whose measurement failed.
        measured: Figures of each step in each round.
    """

    facts: dict[str, Any]
    rows: Sequence[Row]
    rounds: int
    skipped: dict[Step, str]
    failed: dict[Step, str] = field(default_factory=dict)
    measured: list[dict[Step, Figures]] = field(default_factory=list)

    def plan(self, number: int) -> Iterator[Step]:
        """Yield the steps of a round; comparable steps follow each other, and each round begins with another one."""
        rows = [row for row in self.rows if number < (row.rounds or self.rounds)]
        steps = dict.fromkeys(step for row in rows for step in row.steps)
        possible = (step for step in steps if step not in self.skipped)
        for _, group in itertools.groupby(sorted(possible, key=_compared_by), _compared_by):
            compared = list(group)
            first = number % len(compared)
            yield from (*compared[first:], *compared[:first])

    def result(self) -> dict[str, Any]:
        """Return the facts, the rows and each measurement, in JSON's types."""
        return {
            **self.facts,
            "rounds": self.rounds,
            "rows": [self._row_result(row) for row in self.rows],
            "measurements": [
                {**asdict(replace(step, round=number)), "figures": figures}
                for number, measured in enumerate(self.measured)
                for step, figures in measured.items()
            ],
        }

    def _row_result(self, row: Row) -> dict[str, Any]:
        """Return the row's figures: one of each round, their median and quartiles; or the reason why it has none."""
        found: dict[str, Any] = {"group": row.group, "name": row.name, "goal": row.goal}
        for steps, word in ((self.skipped, "skipped"), (self.failed, "failed")):
            for step in row.steps:
                if step in steps:
                    return {**found, word: steps[step]}
        complete = (measured for measured in self.measured if measured.keys() >= set(row.steps))
        values = [row.figure(*(measured[step] for step in row.steps)) for measured in complete]
        if not values:
            return {**found, "skipped": "the run ended before this row was measured"}
        return {**found, "median": median(values), "quartiles": quartiles(values), "values": values}


def _compared_by(step: Step) -> tuple[str, int, int]:
    return step.kind, step.turns, step.concurrency


def start_run(groups: Sequence[str], *, sizes: Sizes, rounds: int, tokenizer_dir: Path) -> Run:
    """Return a run of the rows of these groups; install strands-sglang if a row needs it and it is missing."""
    rows = [row for row in all_rows(sizes) if row.group in groups]
    steps = dict.fromkeys(step for row in rows for step in row.steps)
    reasons = {variant: missing_reason(variant) for variant in dict.fromkeys(step.variant for step in steps)}
    facts = run_facts(tokenizer_dir, len(load_tokenizer(str(tokenizer_dir))))
    if "peer" in groups:
        with suppress(MissingPeerError):
            facts["peer"] = peer_versions()
    return Run(facts, rows, rounds, {step: reason for step in steps if (reason := reasons[step.variant])})


def measure_all(run: Run, tokenizer_dir: Path, on_step: OnStep, on_round: Callable[[], None]) -> None:
    """Measure all rounds, and call `on_round` after each; a failed step is left out of the later rounds."""
    total = sum(len(list(run.plan(number))) for number in range(run.rounds))
    done = 0
    with stage(load_tokenizer(str(tokenizer_dir)), tokenizer_dir) as measure:
        for number in range(run.rounds):
            run.measured.append({})
            for step in run.plan(number):
                on_step(f"round {number + 1}: {step.label}", done, total)
                done += 1
                if step in run.failed:
                    continue
                try:
                    run.measured[-1][step] = _measure_start() if step == _START else measure(step)
                except (BenchProcessError, subprocess.CalledProcessError) as e:
                    run.failed[step] = str(e)
            on_round()
    on_step("done", total, total)


def as_markdown(result: Mapping[str, Any]) -> str:
    """Return the result of a run as a Markdown table with a caption."""
    lines = []
    for row in result["rows"]:
        goal = "" if row["goal"] is None else format_number(row["goal"])
        if "median" in row:
            low, high = row["quartiles"]
            interval = f"{format_number(low)} to {format_number(high)}"
            lines.append([row["name"], format_number(row["median"]), interval, str(len(row["values"])), goal])
        else:
            word = "failed" if "failed" in row else "skipped"
            # an error may contain a process's output, whose last line is the reason
            lines.append([row["name"], f"{word}: {row[word].strip().splitlines()[-1]}", "", "", goal])
    return f"{heading(result)}\n\n{markdown(['', 'median', 'quartiles', 'rounds', 'goal'], lines)}"


def _measure_start() -> Figures:
    """Measure the package's import and the start of its command line, each in a fresh process."""
    help_command = [sys.executable, "-m", "strands_rollout.cli", "--help"]
    before = _children_cpu_s()
    subprocess.run(help_command, capture_output=True, check=True)
    return {
        "help_cpu_ms": (_children_cpu_s() - before) * 1e3,
        "import_ms": _import_ms("import strands_rollout"),
        "import_generate_ms": _import_ms("from strands_rollout import generate"),
    }


def _import_ms(statement: str) -> float:
    command = [sys.executable, "-c", _TIMED_IMPORT.format(statement)]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    return float(done.stdout) * 1e3


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
