"""CPU per trajectory by tool turns, as a picture. Needs matplotlib, which nothing else here needs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from strands_rollout.errors import ConfigError


def check_plot(path: Path) -> None:
    """Refuse to draw before anything is measured.

    Raises:
        ConfigError: matplotlib is not installed, or draws no such files.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; pip install 'strands-rollout[bench]'")
    from matplotlib.backend_bases import FigureCanvasBase

    endings = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in endings:
        raise ConfigError(f"got --plot {path}; expected a file that ends in one of {', '.join(sorted(endings))}")


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw a line per variant and number of episodes at once, on logarithmic axes.

    Args:
        result: As `run_benchmark` returns it.
        path: The picture's file; its ending names the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    rows = [row for row in result["medians"] if row["kind"] == "cpu"]
    for variant, at_once in dict.fromkeys((row["variant"], row["concurrency"]) for row in rows):
        line = sorted(
            (row["turns"], row["cpu_ms_per_trajectory"])
            for row in rows
            if (row["variant"], row["concurrency"]) == (variant, at_once)
        )
        axes.plot(
            [turns for turns, _ in line], [ms for _, ms in line], marker="o", label=f"{variant}, {at_once} at once"
        )
    axes.set(xscale="log", yscale="log", xlabel="tool turns of an episode", ylabel="client CPU per trajectory, ms")
    turns = sorted({row["turns"] for row in rows})
    axes.set_xticks(turns, labels=[str(count) for count in turns])
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
