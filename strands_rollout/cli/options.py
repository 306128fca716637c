"""The options that name an engine, for the commands that run episodes."""

from __future__ import annotations

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
