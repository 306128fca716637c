"""Runs the benchmark with a progress bar, and shows and writes what it found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from strands_rollout.bench.bench_options import BenchOptions
from strands_rollout.bench.bench_plot import draw
from strands_rollout.bench.bench_run import run_benchmark
from strands_rollout.bench.bench_table import result_tables
from strands_rollout.bench.engine_table import rows_as_json, rows_as_markdown
from strands_rollout.bench.engines import ComparedEngines, EngineBenchmark, run_engine_benchmark
from strands_rollout.errors import ConfigError


def run_and_report(options: BenchOptions, *, out: Path | None, plot: Path | None, json_only: bool) -> None:
    """Run it; tables on stdout, or the JSON.

    Args:
        options: What to measure.
        out: Where the JSON is written too.
        plot: Where a picture is drawn.
        json_only: Print the JSON in place of the tables.

    Raises:
        ConfigError: A file can't be written.
        RolloutError: Something can't be used, or a measurement failed.
    """
    for path in (out, plot):
        check_writable(path)
    result = _run(options)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    if plot is not None:
        draw(result, plot)
    print(json.dumps(result) if json_only else result_tables(result), flush=True)


def run_and_report_engines(
    plan: EngineBenchmark, engines: ComparedEngines, *, out: Path | None, json_only: bool
) -> None:
    """Compare engines; a table on stdout, or the JSON.

    Args:
        plan: What to measure.
        engines: On what.
        out: Where the JSON is written too.
        json_only: Print the JSON in place of the table.

    Raises:
        ConfigError: The file can't be written.
        RolloutError: An engine can't be used, or does not answer as it should.
    """
    check_writable(out)
    with _steps() as on_step:
        rows = run_engine_benchmark(plan, engines, on_step=lambda done, passes: on_step("engines", done, passes))
    if out is not None:
        out.write_text(rows_as_json(rows) + "\n")
    print(rows_as_json(rows) if json_only else rows_as_markdown(rows), flush=True)


def _run(options: BenchOptions) -> dict[str, Any]:
    with _steps() as on_step:
        return run_benchmark(options, on_step)


def check_writable(path: Path | None) -> None:
    """Make a file's folder, before minutes of measurements are lost.

    Raises:
        ConfigError: It can't be made, or nothing may be written to it.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"got the file {path}, whose folder can't be made: {e}") from e
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"got the file {path}; expected one that may be written")


@contextmanager
def _steps() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar; yields what moves it: a label, steps done, steps in all."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # drawn at each step only: a thread that draws would take its share of the measured core
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("starting", total=None)

        def on_step(label: str, done: int, total: int) -> None:
            bar.update(task, description=label, completed=done, total=total, refresh=True)

        yield on_step
