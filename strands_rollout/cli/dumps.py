"""The command `strands-rollout export`: its arguments and its exit code."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Target(StrEnum):
    """Where a dump may go."""

    OTEL = "otel"
    WANDB = "wandb"


def export(
    dump: Annotated[
        Path, typer.Argument(help="A dump, slime's debug file, results of eval, or a folder of them.", exists=True)
    ],
    to: Annotated[
        Target, typer.Option(help="otel: a trace per sample, to a collector; wandb: a table of the samples, in a run.")
    ],
    endpoint: Annotated[
        str | None,
        typer.Option(help="otel: the collector's URL, OTLP over HTTP; default: OTEL_EXPORTER_OTLP_ENDPOINT."),
    ] = None,
    start: Annotated[
        datetime | None,
        typer.Option(
            help="otel: when the episodes began, UTC without a zone; default: when the file was last written.",
            formats=["%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z"],
        ),
    ] = None,
    project: Annotated[str | None, typer.Option(help="wandb: the project; default: WANDB_PROJECT.")] = None,
    reward_key: Annotated[str, typer.Option(help="Where a reward that is a dict has its number.")] = "score",
    contents: Annotated[
        bool, typer.Option("--contents", help="Send texts too: prompts, responses, labels, errors.")
    ] = False,
) -> None:
    """Send the samples of a dump to where you look at traces or tables.

    Texts stay here unless --contents is given.
    """
    if to is Target.OTEL and project is not None:
        raise typer.BadParameter("got --project with --to otel; expected it with --to wandb")
    if to is Target.WANDB and (endpoint is not None or start is not None):
        raise typer.BadParameter("got --endpoint or --start with --to wandb; expected them with --to otel")
    if to is Target.OTEL:
        _to_otel(dump, endpoint, start, reward_key, with_contents=contents)
    else:
        _to_wandb(dump, project, reward_key, with_contents=contents)


def _to_otel(dump: Path, endpoint: str | None, start: datetime | None, reward_key: str, *, with_contents: bool) -> None:
    from strands_rollout.export.otlp import otlp_exporter, send_dump

    if start is not None and start.tzinfo is None:
        start = start.replace(tzinfo=UTC)
    exporter = otlp_exporter(endpoint)
    start_s = None if start is None else start.timestamp()
    try:
        sent = send_dump(dump, exporter, start_s=start_s, reward_key=reward_key, with_contents=with_contents)
    finally:
        exporter.shutdown()
    _refuse_none(sent.samples, dump)
    typer.echo(f"{sent.samples} samples, {sent.spans} spans")


def _to_wandb(dump: Path, project: str | None, reward_key: str, *, with_contents: bool) -> None:
    from strands_rollout.wandb_run import check_wandb

    check_wandb("--to wandb")
    from strands_rollout.export.dump_table import log_table, sample_table

    table = sample_table(dump, reward_key=reward_key, with_contents=with_contents)
    _refuse_none(len(table.rows), dump)
    log_table(table, project, dump.resolve().name)
    typer.echo(f"{len(table.rows)} samples")


def _refuse_none(samples: int, dump: Path) -> None:
    from strands_rollout.errors import DumpError

    if not samples:
        raise DumpError(f"{dump} holds no sample; expected one or more")
