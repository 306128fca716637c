"""How far a training run is, for who watches: a bar on a terminal, else a line a step.

Knows rich and a step's record; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_WORDS: Final[Mapping[str, Callable[[float], str]]] = {
    "reward": lambda value: f"reward {value:.2f}",
    "accuracy": lambda value: f"accuracy {value:.0%}",
    "held_out_accuracy": lambda value: f"held out {value:.0%}",
}
_TIMES: Final = ("rollout_s", "train_s", "sync_s", "eval_s")


class TrainingProgress:
    """The display of a run until the block ends; a context manager.

    Args:
        console: Where it is shown, on stderr.
        total: Steps of the whole run.
        done: Those that an earlier start has done.
    """

    def __init__(self, console: Console, *, total: int, done: int = 0) -> None:
        self._console, self._total, self._done = console, total, done
        self._words = self._phase = ""
        self._bar = _new_bar(console) if console.is_interactive else None
        self._task = self._bar.add_task("steps", total=total, completed=done) if self._bar else TaskID(0)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def phase(self, words: str) -> None:
        """Show what is being done now, as in "rollout"; nothing where it is no terminal."""
        self._phase = words
        self._show()

    def step_done(self, record: Mapping[str, float | int | str | None]) -> None:
        """Show a step's reward and accuracies."""
        self._done += 1
        told = [form(value) for key, form in _WORDS.items() if isinstance(value := record.get(key), int | float)]
        self._words = "  ".join(told)
        if self._bar is None:
            seconds = sum(value for key in _TIMES if isinstance(value := record.get(key), int | float))
            line = f"step {self._done}/{self._total}  {self._words}  {seconds:.1f} s"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._show()

    def _show(self) -> None:
        if self._bar:
            told = "  ".join(filter(None, (self._words, self._phase)))
            self._bar.update(self._task, completed=self._done, description=told)


def _new_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # two draws a second: the thread that draws shares its core with the training
    return Progress(*columns, console=console, refresh_per_second=2)
