"""The command `strands-rollout compare`: its arguments and its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from strands_rollout.errors import ConfigError


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of `strands-rollout train`.", metavar="RUN...", show_default=False)
    ],
    plot: Annotated[Path | None, typer.Option(help="Draw the curves to this PNG; needs matplotlib.")] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print the JSON in place of the table.")] = False,
) -> None:
    """Compare training runs: a Markdown table with mean and spread over seeds, and curves.

    Runs that differ in their seed alone are one variant; its label has the options in which the given runs differ.
    What runs still is compared as far as it is.
    """
    from strands_rollout.train.comparison import compare_runs
    from strands_rollout.train.comparison_table import comparison_table
    from strands_rollout.train.recorded_run import read_run

    _check_plot(plot)
    comparison = compare_runs([read_run(folder) for folder in runs])
    if plot is not None:
        from strands_rollout.train.curves import draw_comparison

        by_label = {variant.label: [run.points for run in variant.runs] for variant in comparison.variants}
        try:
            draw_comparison(by_label, plot)
        except OSError as e:
            raise ConfigError(f"can't write {plot}: {e.strerror}; choose another --plot") from e
    typer.echo(json.dumps(comparison.to_dict()) if json_only else comparison_table(comparison))


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    from strands_rollout.train.curves import NOT_DRAWN, can_draw

    if plot.suffix != ".png":
        raise ConfigError(f"got --plot {plot}; expected a file that ends in .png")
    if not can_draw():
        raise ConfigError(NOT_DRAWN)
