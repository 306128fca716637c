"""The command line that the scripts share: options, exit codes (0 ok, 1 failed, 2 usage), and where words go.

Human words go to stdout, warnings, errors and progress to stderr; with --json, stdout is one line of JSON. The
annotations are not strings here: they name the defaults of the script's data set.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from preparation.prepare import MOST_REJECTED, prepare
from preparation.report import report_lines, shown_progress, warning_lines
from preparation.request import HUB, NGRAM_WORDS, Request
from strands_rollout.errors import ConfigError, RolloutError

DATA_DIR: Final = Path(__file__).resolve().parents[2] / "data"


@dataclass(frozen=True, slots=True)
class DataSet:
    """Defaults of one script.

    Attributes:
        script: The script's file name.
        hub_id: Repository of the hub.
        id_source: Who says that this is its id.
        config: Configuration within the repository; None for its only or default one.
        split: Split within the configuration.
        file_stem: Name of the file in the data folder; `{split}` stands for the split.
        against: Stems of the prepared files that hold evaluation problems, of which no other should hold any.
    """

    script: str
    hub_id: str
    id_source: str
    config: str | None
    split: str
    file_stem: str
    against: tuple[str, ...] = ()

    def out(self, folder: Path, split: str) -> Path:
        """The default file of a split."""
        return folder / f"{self.file_stem.format(split=split)}.jsonl"

    def evaluation_files(self, folder: Path, split: str) -> tuple[Path, ...]:
        """The default files to compare a split with, or a part of it: all but its own."""
        own = {self.file_stem.format(split=part.partition("[")[0].strip()) for part in split.split("+")}
        return tuple(folder / f"{stem}.jsonl" for stem in self.against if own != {stem})


# ruff: noqa: FBT002 - flags of a command are given by name


def run(data_set: DataSet) -> None:
    """Run a script; never returns."""
    exit_with(_command(data_set), data_set.script)


def exit_with(command: Callable[..., None], script: str) -> None:
    """Run a command with its arguments from the command line; never returns."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(command)
    try:
        app(prog_name=f"python data_prep/{script}")
    except RolloutError as e:
        typer.echo(f"error: {e}", err=True)
        sys.exit(2 if isinstance(e, ConfigError) else 1)


def _command(data_set: DataSet) -> Callable[..., None]:
    """The command of one script, with its defaults and help."""

    def command(
        dataset: Annotated[str, typer.Option(help=f"Repository of the hub; {data_set.id_source}.")] = data_set.hub_id,
        config: Annotated[
            str | None, typer.Option(help="Configuration of the repository.", show_default=data_set.config or "none")
        ] = data_set.config,
        split: Annotated[str, typer.Option(help="Split of it.")] = data_set.split,
        revision: Annotated[str, typer.Option(help="Branch, tag or commit.")] = "main",
        source: Annotated[
            Path | None,
            typer.Option(
                "--from",
                exists=True,
                help="Read this parquet, jsonl, json or csv file, or a folder as downloaded from the hub, instead.",
            ),
        ] = None,
        mirror: Annotated[
            str | None, typer.Option(help=f"URL to use instead of {HUB}.", envvar="HF_ENDPOINT", show_default="the hub")
        ] = None,
        data_dir: Annotated[
            Path,
            typer.Option(
                help="Folder of the data sets.", envvar="DATA_DIR", file_okay=False, show_default="data/ here"
            ),
        ] = DATA_DIR,
        out: Annotated[
            Path | None,
            typer.Option(
                help="File to write.", dir_okay=False, show_default=f"{data_set.file_stem}.jsonl in --data-dir"
            ),
        ] = None,
        prompt_column: Annotated[
            str | None, typer.Option(help="Column of the prompt; a dot leads into a struct.", show_default="found")
        ] = None,
        label_column: Annotated[
            str | None, typer.Option(help="Column of the label, likewise.", show_default="found")
        ] = None,
        instruction: Annotated[
            Literal["remove", "keep"],
            typer.Option(
                help="The data set's own answer instruction. The default system prompt asks for \\boxed{}, so it is "
                "removed; who keeps it must set system_prompt to match."
            ),
        ] = "remove",
        keep_duplicates: Annotated[bool, typer.Option("--keep-duplicates", help="Keep repeated rows.")] = False,
        allow_rejected: Annotated[
            bool,
            typer.Option(
                "--allow-rejected", help=f"Go on where more than {MOST_REJECTED:.0%} of the rows can't be used."
            ),
        ] = False,
        against: Annotated[
            list[Path] | None,
            typer.Option(
                exists=True,
                dir_okay=False,
                help="Prepared evaluation file to compare with; can be given several times.",
                show_default=" ".join(f"{stem}.jsonl" for stem in data_set.against) or "none",
            ),
        ] = None,
        drop_contaminated: Annotated[
            bool, typer.Option("--drop-contaminated", help="Leave out rows that share words with such a problem.")
        ] = False,
        ngram_words: Annotated[int, typer.Option(help="How many words in a row that is.", min=2)] = NGRAM_WORDS,
        limit: Annotated[int | None, typer.Option(help="Write at most this many rows.", min=1)] = None,
        force: Annotated[bool, typer.Option("--force", help="Prepare it although it is there.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
    ) -> None:
        request = Request(
            dataset=dataset,
            config=config,
            split=split,
            revision=revision,
            path=source and source.resolve(),
            endpoint=(mirror or HUB).rstrip("/"),
            prompt_column=prompt_column,
            label_column=label_column,
            instruction=instruction,
            keep_duplicates=keep_duplicates,
            allow_rejected=allow_rejected,
            drop_contaminated=drop_contaminated,
            ngram_words=ngram_words,
            limit=limit,
            against=tuple(path.resolve() for path in against)
            if against
            else data_set.evaluation_files(data_dir.resolve(), split),
            out=(out or data_set.out(data_dir, split)).resolve(),
        )
        _run(request, force=force, as_json=as_json)

    command.__doc__ = _help(data_set)
    return command


def _run(request: Request, *, force: bool, as_json: bool) -> None:
    with shown_progress() as stage:
        prepared = prepare(request, stage, force=force)
    if as_json:
        facts = {"out": str(request.out), "done_before": prepared.done_before, **prepared.manifest}
        typer.echo(json.dumps(facts, ensure_ascii=False))
    else:
        for line in report_lines(prepared, request):
            typer.echo(line)
    for line in warning_lines(prepared, request):
        typer.echo(f"warning: {line}", err=True)


def _help(data_set: DataSet) -> str:
    return f"""Prepare {data_set.hub_id} as JSONL for slime, {{"prompt": [...], "label": "34", ...}}, with a manifest.

    Repeated problems are left out, each label is checked with the package's own reward, and the data set's own answer
    instruction is removed; all of it is counted. `datasets` keeps what it reads in its cache. A file that is there with
    the same settings and an unchanged checksum is not made again.

    Exit codes: 0 ok, 1 failed, 2 wrong usage.

    Example: python data_prep/{data_set.script} --from ~/Downloads/{data_set.hub_id.rpartition("/")[2]} --json
    """
