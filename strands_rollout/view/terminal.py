"""Print a dump in a terminal: the list of samples, then transcripts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from strands_rollout.dump import DumpRecord, read_dump
from strands_rollout.dump.terminal import print_transcript, printable
from strands_rollout.errors import ConfigError
from strands_rollout.view.page import view_dump
from strands_rollout.view.sample import Retokenizer

# heading of a column -> key of the row
_COLUMNS: Final = {
    "index": "index",
    "status": "status",
    "stop reason": "stop",
    "reward": "reward",
    "advantage": "advantage",
    "turns": "turns",
    "calls": "calls",
    "tokens": "length",
    "drift": "drift",
    "problems": "problems",
}


def print_dump(console: Console, path: Path, retokenizer: Retokenizer | None, positions: Collection[int]) -> None:
    """Print the list, then transcripts of the samples at `positions`, or of all samples if `positions` is empty.

    If `retokenizer` is None, drift is not shown, and texts come from the dump.

    Raises:
        ConfigError: A position has no sample.
        DumpError: The dump can't be read; see `read_dump`.
    """
    view = view_dump(path, retokenizer)
    table = Table("", *_COLUMNS, box=None, header_style="bold")
    for position, row in enumerate(view.rows):
        values = row | {"problems": ", ".join(row["problems"])}
        table.add_row(str(position), *(Text(_cell(values[name])) for name in _COLUMNS.values()))
    console.print(table)
    if absent := sorted(set(positions) - set(range(len(view.rows)))):
        raise ConfigError(f"got --sample {absent[0]}; {path} has {len(view.rows)} samples, counted from 0")
    for position, record in enumerate(read_dump(path)):
        if not positions or position in positions:
            console.rule(Text(printable(f"{position}: {record.where}")))
            for problem in view.rows[position]["problems"]:
                console.print(Text(printable(f"problem: {problem}"), style="bold red"))
            try:
                _print_sample(console, record, retokenizer)
            except Exception as e:  # a dump may hold anything, and one odd sample must not hide the others
                console.print(Text(printable(f"can't show this sample: {type(e).__name__}: {e}"), style="bold red"))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:g}"
    return printable(str(value))


def _print_sample(console: Console, record: DumpRecord, retokenizer: Retokenizer | None) -> None:
    mask, length = (record.values.get(name) for name in ("loss_mask", "response_length"))
    if not record.has_tokens or not isinstance(mask, list) or len(mask) != length:
        console.print(Text(printable(str(record.values.get("response") or "")), style="dim"))
        return
    texts = record.token_texts if retokenizer is None else retokenizer.texts

    def decode(ids: Sequence[int]) -> str:
        return b"".join(texts.get(token, f"<{token}>".encode()) for token in ids).decode("utf-8", "replace")

    print_transcript(console, record.to_sample(), decode)
