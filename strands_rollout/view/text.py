"""A dump in a terminal: the list, and samples token kind by token kind."""

from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from strands_rollout.dump import DumpRecord, read_dump
from strands_rollout.dump.terminal import print_transcript, printable
from strands_rollout.errors import foreign_code
from strands_rollout.view.page import view_dump
from strands_rollout.view.sample import Retokeniser

_COLUMNS = (
    *("", "index", "status", "stop reason", "reward", "advantage", "turns", "calls", "tokens"),
    *("drift", "problems"),
)


def print_dump(console: Console, path: Path, retokeniser: Retokeniser | None, wanted: Collection[int]) -> None:
    """Print the list, then transcripts of the samples at the positions `wanted`; none for all.

    Without a retokeniser there is no drift, and no texts but the dump's. For what is raised see `read_dump`.
    """
    view = view_dump(path, retokeniser)
    table = Table(*_COLUMNS, box=None, header_style="bold")
    for position, row in enumerate(view.rows):
        named = (row[name] for name in ("index", "status", "stop", "reward", "advantage", "turns", "calls", "length"))
        cells = (position, *named, row["drift"], ", ".join(row["problems"]))
        table.add_row(*(Text(_cell(cell)) for cell in cells))
    console.print(table)
    for position, record in enumerate(read_dump(path)):
        if not wanted or position in wanted:
            console.rule(Text(printable(f"{position}: {record.where}")))
            for problem in view.rows[position]["problems"]:
                console.print(Text(printable(f"problem: {problem}"), style="bold red"))
            with foreign_code("one odd sample must not hide the others") as outcome:
                _print_sample(console, record, retokeniser)
            if (error := outcome.error) is not None:
                console.print(Text(printable(f"it can't be shown: {type(error).__name__}: {error}"), style="bold red"))


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else printable(str(value))


def _print_sample(console: Console, record: DumpRecord, retokeniser: Retokeniser | None) -> None:
    mask, length = (record.values.get(name) for name in ("loss_mask", "response_length"))
    if not record.has_tokens or not isinstance(mask, list) or len(mask) != length:
        console.print(Text(printable(str(record.values.get("response") or "")), style="dim"))
        return
    texts = record.token_texts if retokeniser is None else retokeniser.texts

    def decode(ids: Sequence[int]) -> str:
        return b"".join(texts.get(token, f"<{token}>".encode()) for token in ids).decode("utf-8", "replace")

    print_transcript(console, record.to_sample(), decode)
