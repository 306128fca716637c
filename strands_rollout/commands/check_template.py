"""The command `strands-rollout check-template`: its arguments and its exit code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def check_template(
    tokenizer: Annotated[str, typer.Argument(help="A folder with a tokenizer, or a model's id on the hub.")],
    chat_template: Annotated[
        Path | None,
        typer.Option(help="A template to look at in place of the tokenizer's own.", exists=True, dir_okay=False),
    ] = None,
    tool_parser: Annotated[
        str, typer.Option(help="The format in which the template's calls must be read; auto: whichever fits.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
) -> None:
    """Look at a chat template: where it appends, where it rewrites, who reads its calls, what ends a turn.

    Exits with 1 if a rule is broken; then it shows the tokens around the first difference.
    """
    # transformers would advise to install torch, which nothing here needs
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from rich.console import Console

    from strands_rollout.doctor.diagnosis import Diagnosis
    from strands_rollout.inspection import template_check

    source = None if chat_template is None else chat_template.read_text(encoding="utf-8")
    loaded = template_check.read_tokenizer(tokenizer)
    found = template_check.check_template(tokenizer, loaded, chat_template=source, tool_parser=tool_parser)
    diagnosis = Diagnosis(tuple(found))
    if as_json:
        typer.echo(diagnosis.to_json())
    else:
        diagnosis.show(Console())
    raise typer.Exit(0 if diagnosis.ok() else 1)
