"""Make the model and the rows that the package ships: `python -m experiments.shipped_model --help`."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import strands_rollout
from strands_rollout.cli.options import run_command

PACKAGE: Final = Path(strands_rollout.__file__).parent
EXPECTED_ACCURACY: Final = (0.5, 0.8)
RESPELLED_STEPS: Final = 300
RESPELLED_LEARNING_RATE: Final = 1e-3


def main(
    out: Annotated[
        Path | None,
        typer.Option(help="Model folder to write, or to read with --eval-only.", show_default="the shipped one"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of the two files of rows.", show_default="the shipped one"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    steps: Annotated[
        int | None,
        typer.Option(help="Maximum optimizer steps.", min=1, show_default="the plan's"),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Validation accuracy at which training stops.", min=0, max=1, show_default="the plan's"),
    ] = None,
    samples_per_row: Annotated[int, typer.Option(help="Held-out episodes per row.", min=1)] = 4,
    respelled: Annotated[
        float,
        typer.Option(
            help="Make a variant of the shipped model, trained on turns in which this share of the tokens that can be "
            "split is split into two tokens. Needs --out; without --data, the rows are written there, too.",
            min=0,
            max=1,
        ),
    ] = 0.0,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 2,
    tiny: Annotated[bool, typer.Option("--tiny", help="Run every stage on a little data, in seconds.")] = False,
    eval_only: Annotated[bool, typer.Option("--eval-only", help="Only play the held-out rows with the model.")] = False,
) -> None:
    """Train the shipped model on this CPU, or evaluate it. The last line on stdout is the report as JSON.

    Example: python -m experiments.shipped_model --out /tmp/model --data /tmp/rows
    """
    if respelled and out in (None, PACKAGE / "engine/checkpoint"):
        raise typer.BadParameter(
            "--respelled makes a variant of the shipped model; name another folder for it", param_hint="--out"
        )
    console = Console(stderr=True)
    if importlib.util.find_spec("torch") is None:
        console.print("error: this command needs torch; run: pip install 'strands-rollout[train]'", markup=False)
        raise typer.Exit(1)
    import torch

    from experiments.shipped_model import run
    from experiments.shipped_model.task import tiny as tiny_plan
    from experiments.shipped_model.word_problems import WORD_PROBLEMS

    torch.set_num_threads(threads)
    chosen = WORD_PROBLEMS
    if respelled:
        plan = replace(chosen.plan, steps=RESPELLED_STEPS, learning_rate=RESPELLED_LEARNING_RATE)
        chosen = replace(chosen, plan=replace(plan, respelled_share=respelled), parent=chosen.out)
    data = data or (out if respelled and out else PACKAGE / "data")
    out = out or chosen.out
    plan = replace(
        chosen.plan,
        seed=seed,
        steps=steps or chosen.plan.steps,
        target=chosen.plan.target if target is None else target,
        samples_per_row=samples_per_row,
    )
    with _ProgressBar(console) as bar:
        if eval_only:
            report = asdict(run.report_on(chosen, out, data, plan, bar.show))
        else:
            report = run.train(chosen, tiny_plan(plan) if tiny else plan, out, data, bar.show)["held_out"]
    low, high = EXPECTED_ACCURACY
    if not low <= report["accuracy"] <= high:
        console.print(f"got an accuracy of {report['accuracy']}; expected {low} to {high}; change --target")
    print(json.dumps(report))


class _ProgressBar:
    """A progress bar per stage of the run."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def show(self, stage: str, done: int, total: int) -> None:
        """Show the progress of a stage, which is identified by the text up to the first comma."""
        key = stage.partition(",")[0]
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(stage)
        self._progress.update(self._tasks[key], description=stage, completed=done, total=total)


if __name__ == "__main__":
    run_command(main, "python -m experiments.shipped_model")
