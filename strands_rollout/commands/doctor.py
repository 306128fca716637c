"""The command `strands-rollout doctor`: its arguments and its exit code."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    isolation: Annotated[
        str, typer.Option(help="What the code sandbox must enforce: full, seccomp or rlimits.")
    ] = "full",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
) -> None:
    """Show versions, and what the code sandbox enforces on this machine.

    Exits with 1 if the sandbox can't enforce what was asked for.
    """
    from rich.console import Console

    from strands_rollout import doctor as checks

    diagnosis = checks.examine(checks.to_isolation(isolation))
    if as_json:
        typer.echo(checks.to_json(diagnosis))
    else:
        checks.show(diagnosis, Console())
    raise typer.Exit(0 if diagnosis.ok else 1)
