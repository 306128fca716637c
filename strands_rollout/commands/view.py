"""The command `strands-rollout view`: its arguments and its exit code."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strands_rollout.errors import ConfigError

if TYPE_CHECKING:
    from strands_rollout.view.sample_view import Retokeniser


def view(
    dump: Annotated[
        Path,
        typer.Argument(
            help="A dump, a folder of dumps, results of `eval`, or slime's --save-debug-rollout-data.",
            exists=True,
            show_default=False,
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Write the page to this file, in place of opening it.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="The policy's; shows drift, and texts that the dump lacks.", exists=True, file_okay=False),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the list and the samples to the terminal.")] = False,
    sample: Annotated[
        list[int] | None, typer.Option(help="With --text: print these samples only, from 0.", metavar="N", min=0)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Serve the page at this port and open no browser; 0 for a free one.", min=0, max=65535),
    ] = None,
) -> None:
    """Look at samples: a page in the browser, which follows a run that writes; a file; or text.

    The page needs no network. The server listens on 127.0.0.1 until Ctrl-C.
    """
    if out is not None and (text or port is not None):
        raise typer.BadParameter("got --out beside --text or --port; expected one of them")
    if sample and not text:
        raise typer.BadParameter("got --sample without --text; expected both")
    retokeniser = _retokeniser(tokenizer)
    if text:
        from strands_rollout.report import make_console
        from strands_rollout.view.text_view import print_dump

        print_dump(make_console(), dump, retokeniser, set(sample or ()))
    elif out is not None:
        _write(dump, out, retokeniser)
    else:
        _serve(dump, port, retokeniser)


def _retokeniser(folder: Path | None) -> Retokeniser | None:
    if folder is None:
        return None
    # transformers would advise to install torch, which nothing here needs
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from strands_rollout.slime_seam import load_tokenizer
    from strands_rollout.view.sample_view import Retokeniser

    return Retokeniser(load_tokenizer(str(folder)))


def _write(dump: Path, out: Path, retokeniser: Retokeniser | None) -> None:
    from strands_rollout.report import counter
    from strands_rollout.view.dump_view import view_dump
    from strands_rollout.view.page import write_page

    with counter("samples") as on_read:
        page = write_page(view_dump(dump, retokeniser, on_read), dump.name)
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"can't write {out}: {e.strerror}; choose another --out") from e
    typer.echo(f"{out}: {len(page.encode()) / 1e6:.1f} MB")


def _serve(dump: Path, port: int | None, retokeniser: Retokeniser | None) -> None:
    from strands_rollout.dump import read_dump
    from strands_rollout.view.live_server import LiveDump, LiveServer

    live = LiveDump(dump, retokeniser)
    next(read_dump(dump), None)  # what is no dump is told here, the rest on the page
    try:
        server = LiveServer(live, dump.resolve().name, port or 0)
    except OSError as e:
        raise ConfigError(f"can't listen at port {port}: {e.strerror}; choose another --port") from e
    typer.echo(f"{server.url}  (Ctrl-C ends)")
    if port is None:
        webbrowser.open(server.url)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("")
