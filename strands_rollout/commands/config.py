"""The command `strands-rollout config`: its arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def config(
    file: Annotated[
        Path | None,
        typer.Argument(help="A YAML for slime's --custom-config-path; default: none, which shows the defaults."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
) -> None:
    """Check a configuration, and print every setting with its meaning and its value.

    What is printed is itself a valid configuration, with secrets masked. Exits with 2 if the file can't be used.
    """
    from strands_rollout.config import RolloutSettings
    from strands_rollout.config_file import MASK_NOTE, documented, is_masked, masked_values, read_config_file

    settings = RolloutSettings() if file is None else read_config_file(file)
    if as_json and is_masked(settings):
        typer.echo(f"note: {MASK_NOTE}", err=True)
    typer.echo(
        json.dumps(masked_values(settings), separators=(",", ":"), ensure_ascii=False)
        if as_json
        else documented(settings),
        nl=as_json,
    )
