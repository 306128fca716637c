"""The command `strands-rollout`: its commands, and exit codes of errors.

Exit codes: 0 ok, 1 failed, 2 usage. Imports nothing heavy before a command runs, so that --help answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from strands_rollout import __version__
from strands_rollout.commands.bench import bench
from strands_rollout.commands.compare import compare
from strands_rollout.commands.config import config
from strands_rollout.commands.demo import demo
from strands_rollout.commands.doctor import doctor
from strands_rollout.commands.evaluate import evaluate
from strands_rollout.commands.serve import serve
from strands_rollout.commands.train import train
from strands_rollout.errors import ConfigError, RolloutError

app = typer.Typer(
    name="strands-rollout",
    help="Train Strands agents with slime: token-in/token-out rollouts on SGLang.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line; never returns."""
    try:
        app(prog_name="strands-rollout")
    except RolloutError as e:
        typer.echo(f"error: {e}", err=True)
        sys.exit(2 if isinstance(e, ConfigError) else 1)


def _print_version(*, value: bool) -> None:
    if value:
        typer.echo(f"strands-rollout {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The group's own options."""


app.command(epilog="Example: strands-rollout demo --samples 8 --seed 1")(demo)
app.command(epilog="Example: strands-rollout serve --port 30000")(serve)
app.command(
    "eval", epilog="Example: strands-rollout eval --base-url http://127.0.0.1:30000 --data aime.jsonl --out aime"
)(evaluate)
app.command(epilog="Example: strands-rollout doctor --training")(doctor)
app.command(epilog="Example: strands-rollout bench --turns 5,20 --out bench.json")(bench)
app.command(epilog="Example: strands-rollout train --steps 60 --seed 0 --out run")(train)
app.command(epilog="Example: strands-rollout compare runs/tito-* runs/retokenised-* --plot curves.png")(compare)
app.command(epilog="Example: strands-rollout config configs/math_code.yaml")(config)


if __name__ == "__main__":
    main()
