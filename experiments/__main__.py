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
            help="Tokens to train on: tito, the sampled tokens; retokenised, the same episodes' text encoded again; "
            "openai, the encoded messages of Strands' OpenAI model on the engine's chat endpoint."
        ),
    ] = "tito",
    ablation: Annotated[Ablation, typer.Option(help="Fault to inject.")] = "none",
) -> None:
    """Compare training on sampled tokens with training on text and with injected faults.

    The options before the command apply to `train`, which has the options of `strands-rollout train` too.
    """
    if context.invoked_subcommand == "train":
        context.obj = Experiment(rollout, ablation)


@app.command(epilog="Example: python -m experiments compare runs/tito-* runs/retokenised-* --plot curves.png")
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of training runs.", metavar="RUN...", show_default=False)],
    plot: Annotated[Path | None, typer.Option(help="PNG to draw the curves to; needs matplotlib.")] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Compare training runs: print a Markdown table with mean and spread over seeds, and with --plot draw curves.

    Runs that differ only in their seed are one variant. Its label shows the options in which the compared runs differ.
    An unfinished run is compared up to its last finished step.
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
