"""Compares the code sandbox with other ways to run Python: `python scripts/bench_sandbox.py --help`.

Knows the command line alone; the work is in `sandbox_benchmark`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from sandbox_benchmark.result import CONTENDERS, summary, table
from sandbox_benchmark.rounds import QUICK_PLAN, Measurement, Plan, measure

from strands_rollout.errors import SandboxError

_HOW_TO_GET_CAMEL: Final = (
    "camel-ai is left out. To compare with it, make an environment for it: python -m venv .venv-camel && "
    ".venv-camel/bin/pip install camel-ai numpy sympy; then add --camel-python .venv-camel/bin/python"
)


def main(
    camel_python: Annotated[
        Path | None,
        typer.Option(help="Python of an environment with camel-ai, numpy and sympy.", exists=True, dir_okay=False),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Rounds; figures are medians over them.", min=1, show_default="5, or 1 if quick")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the JSON to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few calls: shows that it works, not how fast.")] = False,  # noqa: FBT002
) -> None:
    """Measure LocalExecutor beside camel-ai's interpreter, `python -c` and SubprocessExecutor. Last line: JSON.

    Takes about ten minutes on two idle CPUs. Memory and the CPU time of all processes are shown where /proc tells
    them. Exit code 1: a contender failed; 2: wrong usage.

    Example: python scripts/bench_sandbox.py --camel-python .venv-camel/bin/python --json bench.json
    """
    console = Console(stderr=True)
    plan = QUICK_PLAN if quick else Plan()
    plan = plan if repeats is None else replace(plan, repeats=repeats)
    pythons = dict.fromkeys(CONTENDERS, sys.executable)
    if camel_python is None:
        del pythons["camel"]
        console.print(_HOW_TO_GET_CAMEL, markup=False, soft_wrap=True)
    else:
        pythons["camel"] = str(camel_python)
    try:
        measurement = _measure(pythons, plan, console)
    except SandboxError as e:
        console.print(f"error: {e}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from e
    result = summary(measurement, plan)
    Console(width=None if sys.stdout.isatty() else 160).print(table(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def _measure(pythons: dict[str, str], plan: Plan, console: Console) -> Measurement:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("")
        return measure(
            pythons,
            plan,
            lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total),
        )


if __name__ == "__main__":
    typer.run(main)
