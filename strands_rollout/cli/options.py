"""Options that several commands share, and the command `config`, which prints settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

BaseUrl: TypeAlias = Annotated[
    str | None, typer.Option(help="An SGLang server or router; default: the embedded engine is started.")
]
Model: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="What the embedded engine serves; default: the shipped model.", exists=True, file_okay=False),
]
Tokenizer: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="The served model's tokenizer; default: as the server names it.", exists=True, file_okay=False),
]


def check_engine(base_url: str | None, model: Path | None) -> None:
    """Refuse to name both an engine and what another one would serve.

    Raises:
        BadParameter: Both are given.
    """
    if base_url is not None and model is not None:
        raise typer.BadParameter("--model is what the embedded engine serves; it can't be used with --base-url")


Config: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="slime's --custom-config-path YAML, whose settings the reward is given.", exists=True, dir_okay=False
    ),
]
RewardPath: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Dotted path of a reward with slime's signature, sync or async; default: this package's."),
]
RewardKey: TypeAlias = Annotated[str | None, typer.Option(help="Where a reward that is a dict has its number.")]
GroupRm: TypeAlias = Annotated[
    bool, typer.Option("--group-rm", help="The reward takes a list, all samples of a group, as slime's --group-rm.")
]


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
    from strands_rollout.settings import (
        MASK_NOTE,
        RolloutSettings,
        documented,
        is_masked,
        masked_values,
        read_config_file,
    )

    settings = RolloutSettings() if file is None else read_config_file(file)
    if as_json and is_masked(settings):
        typer.echo(f"note: {MASK_NOTE}", err=True)
    typer.echo(
        json.dumps(masked_values(settings), separators=(",", ":")) if as_json else documented(settings), nl=as_json
    )
