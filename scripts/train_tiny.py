"""GRPO on this CPU: the command `strands-rollout train` as a script. See its --help."""

import sys

import typer

from strands_rollout.cli.commands import train
from strands_rollout.errors import ConfigError, RolloutError

if __name__ == "__main__":
    try:
        typer.run(train)
    except RolloutError as e:
        typer.echo(f"error: {e}", err=True)
        sys.exit(2 if isinstance(e, ConfigError) else 1)
