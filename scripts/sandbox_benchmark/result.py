"""What the benchmark shows: a table for people, and the same figures as JSON."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from typing import Any, Final

from rich.table import Table

from sandbox_benchmark.figures import FIGURES, Figures, figures_of, ratios, rounded
from sandbox_benchmark.rounds import Measurement, Plan

OWN: Final = "local"
CONTENDERS: Final = {
    OWN: "LocalExecutor",
    "camel": "camel-ai",
    "cold_python": "python -c",
    "subprocess": "SubprocessExecutor",
}
_COMPARED_WITH: Final = ("camel", "cold_python")


def summary(measurement: Measurement, plan: Plan) -> dict[str, Any]:
    """The whole result in JSON's types.

    Returns:
        `machine`, `plan`, `contenders` (name -> figures; None for one that was skipped) and `ratios` (name -> how many
        times its figure LocalExecutor's is).
    """
    figures = {name: figures_of(samples) for name, samples in measurement.samples.items()}
    return {
        "machine": {
            "cpus": os.cpu_count(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "load_before": round(measurement.load_before, 2),
            "load_after": round(measurement.load_after, 2),
        },
        "plan": asdict(plan),
        "contenders": {name: rounded(figures[name]) if name in figures else None for name in CONTENDERS},
        "ratios": {
            name: rounded(ratios(figures[OWN], figures[name])) if name in figures else None for name in _COMPARED_WITH
        },
    }


def table(result: dict[str, Any]) -> Table:
    """The figures side by side; lines that nobody has a value for are left out."""
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
    for figure in FIGURES:
        values = [figures[figure.key] for figures in measured.values()]
        if any(value is not None for value in values):
            multiples = [_shown(figures, figure.key, "{:.2f}x") for figures in compared.values()]
            own = [_shown(figures, figure.key, "{:.4g}") for figures in measured.values()]
            shown.add_row(figure.label, *own, *multiples)
    return shown


def _shown(figures: Figures, key: str, form: str) -> str:
    value = figures[key]
    return "-" if value is None else form.format(value)
