"""The experiments' command line: `python -m experiments --help`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from experiments.comparison import compare_runs, comparison_table, read_run
from experiments.methods import Ablation, Experiment, RolloutKind
from strands_rollout.cli.commands import train
from strands_rollout.cli.options import run
from strands_rollout.errors import ConfigError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command(epilog="Example: python -m experiments --rollout retokenised train --steps 60 --out run")(train)


@app.callback()
def _root(
    context: typer.Context,
    rollout: Annotated[
        RolloutKind,
        typer.Option(
            help="Which tokens are trained on: tito, as they were sampled; retokenised, the same episodes' text "
            "encoded again; openai, Strands' own OpenAI model on the engine's chat endpoint, and its messages encoded."
        ),
    ] = "tito",
    ablation: Annotated[Ablation, typer.Option(help="A fault to put in.")] = "none",
) -> None:
    """Compare training on sampled tokens with text pipelines, and with faults put in on purpose.

    The options before the command are of `train`; all others of it are those of `strands-rollout train`.
    """
    if context.invoked_subcommand == "train":
        context.obj = Experiment(rollout, ablation)


@app.command(epilog="Example: python -m experiments compare runs/tito-* runs/retokenised-* --plot curves.png")
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of training runs.", metavar="RUN...", show_default=False)],
    plot: Annotated[Path | None, typer.Option(help="Draw the curves to this PNG; needs matplotlib.")] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print the JSON in place of the table.")] = False,
) -> None:
    """Compare training runs: a Markdown table with mean and spread over seeds, and curves.

    Runs that differ in their seed alone are one variant; its label has the options in which the given runs differ.
    What runs still is compared as far as it is.
    """
    _check_plot(plot)
    comparison = compare_runs([read_run(folder) for folder in runs])
    if plot is not None:
        from experiments.curves import draw_comparison

        by_label = {variant.label: [run.points for run in variant.runs] for variant in comparison.variants}
        try:
            draw_comparison(by_label, plot)
        except OSError as e:
            raise ConfigError(f"can't write {plot}: {e.strerror}; choose another --plot") from e
    typer.echo(json.dumps(comparison.to_dict()) if json_only else comparison_table(comparison))


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    from strands_rollout.train.run_folder import NO_MATPLOTLIB_NOTE, can_draw

    if plot.suffix != ".png":
        raise ConfigError(f"got --plot {plot}; expected a file that ends in .png")
    if not can_draw():
        raise ConfigError(NO_MATPLOTLIB_NOTE)


if __name__ == "__main__":
    run(app, "python -m experiments")
