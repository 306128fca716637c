"""How far a preparation is, as a bar on stderr.

Knows the terminal; must not know the work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Advance: TypeAlias = Callable[[int], None]
Stage: TypeAlias = Callable[[str, int | None], Advance]
"""Begins a stage with a number of rows, None where it is unknown, and returns what counts them."""


@contextlib.contextmanager
def shown_progress() -> Iterator[Stage]:
    """A bar for each stage; none where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def begin(name: str, rows: int | None) -> Advance:
            task = progress.add_task(name, total=rows)
            return lambda done: progress.advance(task, done)

        yield begin
