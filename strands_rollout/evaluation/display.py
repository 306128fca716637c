"""Outcomes for people: a table of samples, totals in words, violations, and the progress of a run.

Knows rich and outcomes; decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from textwrap import shorten
from typing import Any, Final, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from strands_rollout.evaluate import Outcome, Summary
from strands_rollout.sample_type import Sample

PLAIN_WIDTH: Final = 140
_OTHER_COLUMNS_WIDTH: Final = 84
_MIN_QUESTION_WIDTH, _MAX_QUESTION_WIDTH = 24, 60
_ANSWER_WIDTH: Final = 12
_COLUMNS: Final = (
    "#",
    "question",
    "label",
    "predicted",
    "reward",
    "status",
    "stop reason",
    "turns",
    "calls",
    "tokens",
)
_NUMBERS: Final = frozenset({"#", "reward", "turns", "calls", "tokens"})
_MAX_VIOLATIONS_SHOWN: Final = 20
_MAX_ERRORS_SHOWN: Final = 5
_LINES: Final = 10
_STATUS_STYLES: Final = {"completed": "green", "truncated": "yellow", "aborted": "yellow", "failed": "red"}


class OnDone(Protocol):
    """Told of each outcome when it is there."""

    def __call__(self, outcome: Outcome, /) -> None:
        """One more is done."""


def make_console(*, stderr: bool = False) -> Console:
    """A console, wide enough for the table where it is no terminal; rich decides about colours (NO_COLOR, no tty)."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=PLAIN_WIDTH)


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[OnDone]:
    """A bar with the running accuracy until the block ends; call what it yields with each outcome."""
    with accuracy_bar(console, total) as tell:
        yield lambda outcome, /: tell(bool(outcome.graded.get("acc")))


@contextmanager
def accuracy_bar(console: Console, total: int, earlier: Sequence[bool] = ()) -> Iterator[Callable[[bool | None], None]]:
    """A bar until the block ends; call what it yields with whether each sample is right, None for one without a score.

    Where nobody watches a terminal, it is a line at each tenth of the samples.

    Args:
        console: Where it is drawn.
        total: Samples of the whole run.
        earlier: Whether each sample was right that was done before; they count.
    """
    with _bar(console, total) if console.is_interactive else nullcontext(_lines(console, total)) as show:
        done = scored = len(earlier)
        right = sum(earlier)

        def tell(is_right: bool | None) -> None:  # noqa: FBT001 - a verdict, not a flag
            nonlocal done, right, scored
            done += 1
            scored += is_right is not None
            right += bool(is_right)
            show(done, f"  accuracy {right / scored:.0%}" if scored else "")

        yield tell


@contextmanager
def counter(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A count on stderr until the block ends; call what it yields with how many more are done.

    Nothing where nobody watches a terminal.

    Args:
        what: Is counted.
        total: How many there are; None where it is not known.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=make_console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda more: progress.advance(task, more)


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[int, str], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("episodes", total=total)
        yield lambda done, words: progress.update(task, completed=done, description=f"episodes{words}")


def _lines(console: Console, total: int) -> Callable[[int, str], None]:
    def show(done: int, words: str) -> None:
        if done * _LINES // total > (done - 1) * _LINES // total:
            console.print(f"episodes {done}/{total}{words}", highlight=False, soft_wrap=True)

    return show


def print_outcomes(console: Console, outcomes: Sequence[Outcome]) -> None:
    """The table, one line per sample; without the questions where the console is too narrow for them."""
    question_width = min(console.width - _OTHER_COLUMNS_WIDTH, _MAX_QUESTION_WIDTH)
    shown = [name for name in _COLUMNS if name != "question" or question_width >= _MIN_QUESTION_WIDTH]
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in shown:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True, overflow="ellipsis")
    for outcome in outcomes:
        cells = dict(zip(_COLUMNS, _cells(outcome, question_width), strict=True))
        table.add_row(*(cells[name] for name in shown))
    console.print(table)


def print_summary(console: Console, outcomes: Sequence[Outcome], summary: Summary, *, seconds: float) -> None:
    """Totals in words, then the first violations and the errors of failed samples, if any."""
    reasons = Counter(str(outcome.facts.get("stop_reason")) for outcome in outcomes)
    tokens = sum(int(outcome.facts.get("sampled_tokens", 0)) for outcome in outcomes)
    console.print(
        f"{summary.samples} samples in {seconds:.1f} s: accuracy {summary.accuracy:.1%}, mean reward "
        f"{summary.mean_reward:.3f}, {summary.tool_calls} tool calls, {tokens} sampled tokens"
    )
    console.print(f"stop reasons: {', '.join(f'{reason} {count}' for reason, count in reasons.most_common())}")
    for what, name in (("token exactness", "tito_violations"), ("slime's contract", "contract_violations")):
        _print_violations(
            console, what, [(outcome.sample.index, words) for outcome in outcomes for words in getattr(outcome, name)]
        )
    failed = [outcome for outcome in outcomes if outcome.sample.status is Sample.Status.FAILED]
    errors = Counter(str(outcome.facts.get("error")) for outcome in failed)
    for error, count in errors.most_common(_MAX_ERRORS_SHOWN):
        console.print(Text(f"failed, {count} of {len(outcomes)}: {error}", style="red"), soft_wrap=True)


def _print_violations(console: Console, what: str, violations: Sequence[tuple[int | None, str]]) -> None:
    if not violations:
        console.print(Text(f"{what}: every sample passed", style="green"))
        return
    console.print(Text(f"{what}: {len(violations)} violations", style="bold red"))
    for index, words in violations[:_MAX_VIOLATIONS_SHOWN]:
        console.print(Text(f"  sample {index}: {words}", style="red"), soft_wrap=True)


def _cells(outcome: Outcome, question_width: int) -> list[str | Text]:
    sample, facts, graded = outcome.sample, outcome.facts, outcome.graded
    status = str(sample.status.value)
    score = graded.get("score")
    return [
        str(sample.index),
        Text(shorten(question_of(sample.prompt), max(question_width, _MIN_QUESTION_WIDTH), placeholder="...")),
        Text(shorten(str(sample.label), _ANSWER_WIDTH, placeholder="...")),
        Text(shorten(str(graded.get("pred") or "-"), _ANSWER_WIDTH, placeholder="...")),
        Text("-" if score is None else f"{score:g}", style="green" if graded.get("acc") else ""),
        Text(status, style=_STATUS_STYLES.get(status, "")),
        str(facts.get("stop_reason", "-")),
        str(facts.get("turns", 0)),
        str(facts.get("tool_calls", 0)),
        str(sample.response_length),
    ]


def question_of(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """The last user message of a prompt."""
    if isinstance(prompt, str):
        return prompt
    texts = [str(message.get("content", "")) for message in prompt if message.get("role") == "user"]
    return texts[-1] if texts else ""
