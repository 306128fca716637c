"""Print to a terminal: texts of models and users safely, transcripts of samples, progress, and the next command.

Terminal control characters are replaced by visible symbols. In a transcript, adjacent tokens of one kind form a block.
The first line of a block begins with the kind as a word, so the kind can be read without colors.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.text import Text

from strands_rollout.samples import FinishedSample, SampleLike, facts_of

_PLAIN_WIDTH: Final = 140
# C1 controls, zero-width spaces, marks and overrides of the writing direction, line separators, invisible tags, and
# lone surrogates
_ESCAPED: Final = (
    *range(0x80, 0xA0),
    0x061C,
    0x200B,
    0x200E,
    0x200F,
    0xFEFF,
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),
    *range(0xE0000, 0xE0080),
)
_REPLACEMENTS: Final = (
    {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}
    | {0x7F: "\u2421"}
    | {code: f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}" for code in _ESCAPED}
)


def printable(text: str) -> str:
    """Replace control characters by symbols, and characters in `_ESCAPED` by escapes; keep newlines and tabs."""
    return text if text.isascii() and text.isprintable() else text.translate(_REPLACEMENTS)


class PlainConsole(Console):
    """A rich console that replaces control characters in texts; its own control sequences stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of a renderable, with control characters in their texts replaced."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def make_console(*, stderr: bool = False) -> Console:
    """Return a console for stdout or stderr.

    If the console is not a terminal, it is 140 columns wide, enough for tables. rich decides whether to print colors.
    """
    console = PlainConsole(stderr=stderr, highlight=False)
    return console if console.is_terminal else PlainConsole(stderr=stderr, highlight=False, width=_PLAIN_WIDTH)


def show_next(*words: object, folder: Path | None = None) -> None:
    """Print the next command on stderr, as the user must type it; if `folder` is given, put a `cd` to it in front."""
    program, name = Path(sys.argv[0]), "strands-rollout"
    command = "python -m strands_rollout.cli" if program.name == "__main__.py" else name
    if program.name == name and shutil.which(name) != str(program):
        # the user called the program by its path, as the demo's script does
        command = str(program.absolute()) if folder else min(os.path.relpath(program), str(program), key=len)
    change_folder = f"cd {shlex.quote(str(folder))} && " if folder else ""
    line = f"next: {change_folder}{command} {shlex.join(map(str, words))}"
    make_console(stderr=True).print(line, markup=False, soft_wrap=True)


@contextmanager
def counter(description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a count on stderr until the block ends; call the yielded function with a number of items to add them.

    Show nothing if stderr is not a terminal. `total` is None if unknown.
    """
    with progress_bar(make_console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda count: progress.advance(task, count)


def progress_bar(console: Console, *, transient: bool = False, refresh_per_second: float = 10) -> Progress:
    """Return a bar that counts steps; without a terminal, the bar shows nothing."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    if not console.is_interactive:  # a quiet console, since rich before 15 prints an empty line after a disabled bar
        return Progress(*columns, console=Console(quiet=True), disable=True)
    return Progress(*columns, console=console, transient=transient, refresh_per_second=refresh_per_second)


_TOKEN_KINDS: Final = {
    "prompt": ("dim", "read before the first turn, not trained"),
    "context": ("cyan", "read between turns (tool results, template), not trained"),
    "trained": ("bold green", "sampled by the policy, trained"),
    "masked": ("yellow", "sampled by the policy, not trained"),
    "untrained": ("yellow", "sampled or read in a sample that is not trained"),
}
_GUTTER_WIDTH: Final = max(map(len, _TOKEN_KINDS))


def runs_by_kind(sample: SampleLike) -> list[tuple[str, list[int]]]:
    """Return a sample's tokens in order, split where their kind changes: pairs of kind and ids.

    A sample that is not trained may lack the facts for telling sampled tokens from context. Then the tokens of its
    response with a loss mask of 0 are "untrained".
    """
    prompt_length = len(sample.tokens) - sample.response_length
    bounds = FinishedSample(sample, facts_of(sample)).turn_bounds
    context = "untrained" if sample.remove_sample and bounds is None else "context"
    kinds = ["prompt"] * prompt_length + [context] * sample.response_length
    for start, end in bounds or ():
        kinds[start:end] = ["masked"] * (end - start)
    for position, is_trained in enumerate(sample.loss_mask, start=prompt_length):
        if is_trained:
            kinds[position] = "masked" if sample.remove_sample else "trained"
    pairs = zip(kinds, sample.tokens, strict=True)
    return [(kind, [token for _, token in group]) for kind, group in groupby(pairs, key=itemgetter(0))]


def print_transcript(console: Console, sample: SampleLike, decode: Callable[[Sequence[int]], str]) -> None:
    """Print a legend and a sample's text by kind of token; `decode` must include the texts of control tokens."""
    pairs = runs_by_kind(sample)
    for kind in dict.fromkeys(kind for kind, _ in pairs):
        count = sum(len(ids) for other, ids in pairs if other == kind)
        console.print(_transcript_line(kind, kind, f"{_TOKEN_KINDS[kind][1]}; {count} tokens"), soft_wrap=True)
    console.print()
    for kind, ids in pairs:
        lines = decode(ids).split("\n")
        if len(lines) > 1 and not lines[-1]:
            lines.pop()  # empty, since the run ends with a newline; the next run begins a new line anyway
        for number, line in enumerate(lines):
            console.print(_transcript_line(kind, kind if number == 0 else "", line), soft_wrap=True)


def _transcript_line(kind: str, label: str, text: str) -> Text:
    return Text.assemble((f"{label:>{_GUTTER_WIDTH}} | ", "dim"), (printable(text), _TOKEN_KINDS[kind][0]))
