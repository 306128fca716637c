"""The options that name a reward, for the commands that ask one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

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
