"""The commands that show and export dumps: `view` and `export`."""

from __future__ import annotations

import asyncio
import webbrowser
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from strands_rollout.cli.options import Dump, DumpTokenizer
from strands_rollout.errors import ConfigError, DumpError

if TYPE_CHECKING:
    from strands_rollout.view.sample import Retokeniser


def view(
    dumps: Annotated[
        list[Path],
        typer.Argument(
            help="A dump, slime's debug file, results of eval, or a folder of them; two or more are compared.",
            metavar="DUMP",
            exists=True,
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Write the page to this file, in place of opening it.")] = None,
    tokenizer: DumpTokenizer = None,
    text: Annotated[bool, typer.Option("--text", help="Print the list and the samples to the terminal.")] = False,
    sample: Annotated[
        list[int] | None, typer.Option(help="With --text: print these samples only, from 0.", metavar="N", min=0)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Serve the page at this port and open no browser; 0 for a free one.", min=0, max=65535),
    ] = None,
) -> None:
    """Look at samples, in the browser or the terminal.

    Several runs are shown side by side. The page follows a run that writes. It needs no network. The server listens on
    127.0.0.1 until Ctrl-C.
    """
    if out is not None and (text or port is not None):
        raise typer.BadParameter("got --out beside --text or --port; expected one of them")
    if sample and not text:
        raise typer.BadParameter("got --sample without --text; expected both")
    retokeniser = _retokeniser(tokenizer, dumps)
    if text:
        _print(_named(dumps), set(sample or ()), retokeniser)
    elif out is not None:
        _write(_named(dumps), out, retokeniser)
    else:
        _serve(_named(dumps), port, retokeniser)


def _print(dumps: Mapping[str, Path], samples: Collection[int], retokeniser: Retokeniser | None) -> None:
    from strands_rollout.dump.terminal import make_console
    from strands_rollout.view.text import print_dump

    console = make_console()
    for name, dump in dumps.items():
        if len(dumps) > 1:
            console.rule(name)
        print_dump(console, dump, retokeniser, samples)


def _named(dumps: Sequence[Path]) -> dict[str, Path]:
    from strands_rollout.view.page import MOST_RUNS, run_names

    named = dict(zip(run_names(dumps), dumps, strict=True))
    if len(named) < len(dumps) or len(dumps) > MOST_RUNS:
        raise typer.BadParameter(f"got {', '.join(map(str, dumps))}; expected at most {MOST_RUNS} runs, each once")
    return named


def _retokeniser(folder: Path | None, dumps: Sequence[Path]) -> Retokeniser | None:
    """What marks drift, with the recorded tokenizer where it is here; refuses another policy's."""
    from strands_rollout.dump import read_dump, recorded_tokenizer
    from strands_rollout.dump.record import check_tokenizer
    from strands_rollout.slime_plugin.slime_adapter import load_tokenizer
    from strands_rollout.view.sample import Retokeniser

    first = {dump: [record for record in islice(read_dump(dump), 16) if record.has_tokens] for dump in dumps}
    sampled = [dump for dump, records in first.items() if records]
    if folder is None and not sampled:
        return None
    try:
        chosen = folder or recorded_tokenizer(sampled[0])
        retokeniser = Retokeniser(load_tokenizer(str(chosen)))
        for record in chain.from_iterable(first.values()):
            check_tokenizer(record, retokeniser.texts, str(chosen))
    except ConfigError as e:
        if folder is not None:
            raise
        typer.echo(f"note: no drift is shown: {e}", err=True)
        return None
    return retokeniser


def _write(dumps: Mapping[str, Path], out: Path, retokeniser: Retokeniser | None) -> None:
    from strands_rollout.evaluation.display import counter
    from strands_rollout.view.page import DumpView, view_dump, write_page

    with counter("samples") as on_read:
        views = {name: view_dump(dump, retokeniser, on_read) for name, dump in dumps.items()}
    page = write_page(DumpView.beside(views), " | ".join(dumps))
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"can't write {out}: {e.strerror}; choose another --out") from e
    typer.echo(f"{out}: {len(page.encode()) / 1e6:.1f} MB")


def _serve(dumps: Mapping[str, Path], port: int | None, retokeniser: Retokeniser | None) -> None:
    from strands_rollout.dump import read_dump
    from strands_rollout.view.live_server import LiveDump, live_server

    live, title = LiveDump(dumps, retokeniser), " | ".join(dumps)
    for dump in dumps.values():
        next(read_dump(dump), None)  # a file that is no dump is refused here, the rest is shown on the page

    async def serve() -> None:
        async with live_server(live, title, port or 0) as url:
            typer.echo(f"{url}  (Ctrl-C ends)")
            if port is None:
                webbrowser.open(url)
            await asyncio.Event().wait()

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        typer.echo("")


def export(
    dump: Dump,
    to: Annotated[
        Literal["otel", "wandb"],
        typer.Option(help="otel: a trace per sample, to a collector; wandb: a table of the samples, in a run."),
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
    """Send samples to where you look at traces or tables.

    Texts stay here unless --contents is given.
    """
    if to == "otel" and project is not None:
        raise typer.BadParameter("got --project with --to otel; expected it with --to wandb")
    if to == "wandb" and (endpoint is not None or start is not None):
        raise typer.BadParameter("got --endpoint or --start with --to wandb; expected them with --to otel")
    if to == "otel":
        typer.echo(_to_otel(dump, endpoint, start, reward_key, with_contents=contents))
    else:
        typer.echo(_to_wandb(dump, project, reward_key, with_contents=contents))


def _to_otel(dump: Path, endpoint: str | None, start: datetime | None, reward_key: str, *, with_contents: bool) -> str:
    from strands_rollout.integrations.traces import otlp_exporter, send_dump

    if start is not None and start.tzinfo is None:
        start = start.replace(tzinfo=UTC)
    exporter = otlp_exporter(endpoint)
    start_s = None if start is None else start.timestamp()
    try:
        samples, spans = send_dump(dump, exporter, start_s=start_s, reward_key=reward_key, with_contents=with_contents)
    finally:
        exporter.shutdown()
    _refuse_none(samples, dump)
    return f"{samples} samples, {spans} spans"


def _to_wandb(dump: Path, project: str | None, reward_key: str, *, with_contents: bool) -> str:
    from strands_rollout.integrations import wandb

    wandb.check_wandb("--to wandb")
    table = wandb.sample_table(dump, reward_key=reward_key, with_contents=with_contents)
    _refuse_none(len(table.rows), dump)
    wandb.log_table(table, project, dump.resolve().name)
    return f"{len(table.rows)} samples"


def _refuse_none(samples: int, dump: Path) -> None:
    if not samples:
        raise DumpError(f"{dump} holds no sample; expected one or more")
