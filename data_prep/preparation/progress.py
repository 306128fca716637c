"""How far a preparation is, on stderr: a bar, or where that is no terminal, a line now and then.

Knows the terminal; must not know the work.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Advance: TypeAlias = Callable[[int], None]
Stage: TypeAlias = Callable[[str, int | None], Advance]
"""Begins a stage with a number of rows, None where it is unknown, and returns what counts them."""

_LINE_EVERY_S: Final = 10.0


@contextlib.contextmanager
def shown_progress(line_every_s: float = _LINE_EVERY_S) -> Iterator[Stage]:
    """A bar for each stage; where stderr is no terminal, a line whenever that many seconds have gone by."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda name, rows: _lines(console, name, rows, line_every_s)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def begin(name: str, rows: int | None) -> Advance:
            task = progress.add_task(name, total=rows)
            return lambda done: progress.advance(task, done)

        yield begin


def _lines(console: Console, name: str, rows: int | None, every_s: float) -> Advance:
    """Counts the rows of one stage and says so now and then."""
    done, said = 0, time.monotonic()
    total = "" if rows is None else f" of {rows}"

    def advance(more: int) -> None:
        nonlocal done, said
        done += more
        if time.monotonic() - said >= every_s:
            said = time.monotonic()
            console.print(f"{name}: {done}{total} rows", highlight=False, soft_wrap=True)

    return advance
