"""`rescore` from end to end: samples scored again, written to a new dump where asked, and shown.

Glue.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import shorten

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strands_rollout.dataset_rows import json_line
from strands_rollout.dump import DumpWriter
from strands_rollout.inspection.rescoring import Rescored, RewardChange, rescore
from strands_rollout.inspection.reward_call import RewardCall
from strands_rollout.report import counter, make_console

_TEXT_WIDTH = 60


@dataclass(frozen=True, slots=True)
class RescoreOptions:
    """What the command was asked for; see its --help."""

    dump: Path
    reward: RewardCall
    out: Path | None
    show: int
    as_json: bool


async def run_rescore(options: RescoreOptions) -> RewardChange:
    """Score, write and show; what changed.

    Raises:
        DumpError: The dump can't be read, or the new one can't be written.
    """
    found: list[Rescored] = []
    with nullcontext() if options.out is None else DumpWriter(options.out) as writer, counter("samples") as on_done:
        async for one in rescore(options.dump, options.reward):
            if writer is not None:
                writer.write(one.record)
            found.append(_without_tokens(one))
            on_done(1)
    change = RewardChange.of(found)
    if options.as_json:
        for one in found:
            print(json_line(_line(one)).decode(), end="")
        print(json_line(asdict(change)).decode(), end="")
    else:
        _show(make_console(), found, change, options.show)
    return change


def _without_tokens(one: Rescored) -> Rescored:
    """What is shown of it: a whole dump's tokens need not be held."""
    shown = ("index", "label", "status", "reward", "response")
    values = {name: one.record.values.get(name) for name in shown}
    values["response"] = str(values["response"])[-200:]
    return replace(one, record=replace(one.record, values=values, token_texts={}))


def _line(one: Rescored) -> dict[str, object]:
    facts = {"number": one.number, "index": one.record.values.get("index"), "old": one.old, "new": one.new}
    return {**facts, "changed": one.is_changed, "error": one.error}


def _show(console: Console, found: Sequence[Rescored], change: RewardChange, show: int) -> None:
    changed = [one for one in found if one.is_changed]
    if changed and show:
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for name in ("sample", "index", "status", "label", "old", "new", "the response ends"):
            table.add_column(name, justify="right" if name in ("sample", "index", "old", "new") else "left")
        for one in changed[:show]:
            table.add_row(*map(Text, _cells(one)))
        console.print(table)
    for one in [one for one in found if one.error][:show]:
        words = f"sample {one.number} could not be scored: {_printable(str(one.error))}"
        console.print(Text(words, style="red"), soft_wrap=True)
    console.print(Text(_words(change)), soft_wrap=True)


def _cells(one: Rescored) -> tuple[str, ...]:
    values = one.record.values
    ending = " ".join(str(values["response"]).split())[-_TEXT_WIDTH:]
    label = shorten(str(values["label"]), 16, placeholder="...")
    told = (str(one.number), str(values["index"]), str(values["status"]), label, f"{one.old:g}", f"{one.new:g}", ending)
    return tuple(map(_printable, told))


def _printable(text: str) -> str:
    """A terminal would obey what a model wrote."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def _words(change: RewardChange) -> str:
    compared = ""
    if change.compared:
        correlation = "none: one of them never varies" if change.correlation is None else f"{change.correlation:.3f}"
        compared = (
            f"; of {change.compared} with an old reward {change.changed} changed ({change.raised} up, {change.lowered} "
            f"down), mean {change.old_mean:.4g} -> {change.new_mean:.4g}, correlation {correlation}"
        )
    return f"{change.scored} of {change.samples} samples scored, {change.failed} failed{compared}"
