"""What people see: progress on stderr, and a manifest as text."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from preparation.request import Request

if TYPE_CHECKING:
    from preparation.prepare import Prepared

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


def report_lines(prepared: Prepared, request: Request) -> Iterator[str]:
    """What was read, what was left out, and what was written."""
    facts = prepared.manifest
    if prepared.done_before:
        yield f"{request.out} is there already, made with these settings on {facts['created']}; --force makes it anew"
    yield f"source: {facts['dataset']}, split {facts['split']} ({facts['source']}), {_revision(facts)}"
    yield f"columns: prompt from {facts['prompt_column']}, label from {facts['label_column']}"
    yield (
        f"rows: {facts['rows_read']} read, {facts['duplicates_removed']} duplicates removed, "
        f"{facts['rejected']} rejected, {facts['contaminated_removed']} contaminated removed, "
        f"{facts['beyond_limit']} beyond the limit, {facts['rows']} written"
    )
    yield _instruction(facts["instruction"])
    for file in facts["contamination"]["files"]:
        yield from contamination_lines(file)
    yield f"sha256: {facts['sha256']}"
    yield f"written: {request.out} (manifest: {request.manifest_file.name})"


def warning_lines(prepared: Prepared, request: Request) -> Iterator[str]:
    """What a person should look at before training or evaluating on the file."""
    facts = prepared.manifest
    if facts["rejected"]:
        kinds = ", ".join(f"{count} for the {kind}" for kind, count in facts["rejected_by_kind"].items() if count)
        yield f"{facts['rejected']} rows were rejected ({kinds}); {request.rejected_file} says why"
    if facts["beyond_limit"]:
        yield f"the file holds {facts['rows']} of {facts['rows'] + facts['beyond_limit']} rows, because of --limit"
    if facts["conflicts"]["problems"]:
        yield _conflicts(facts["conflicts"], keep_duplicates=request.keep_duplicates)
    if facts["labels_not_number"]["rows"]:
        yield (
            f"{facts['labels_not_number']['rows']} labels are no number, so that only an answer in the same words or "
            f"an equal formula gets the point, such as: {facts['labels_not_number']['example']!r:.80}"
        )
    for one in facts["label_differences"]:
        yield (
            f"the label is from {facts['label_column']} ({one['label']!r:.80}), but {one['column']} differs "
            f"({one['other']!r:.80}); name the right one with --label-column"
        )
    if facts["own_system_messages"]:
        yield (
            f"{facts['own_system_messages']} prompts bring a system message of their own, which replaces the setting "
            "system_prompt for them"
        )
    yield from _instruction_warnings(facts["instruction"])
    contamination = facts["contamination"]
    for path in contamination["absent"]:
        yield f"not compared with {path}: it is not there. Prepare it first, then run this again"
    for file in contamination["files"]:
        yield from contamination_warnings(file)
    if contamination["rows"] and not contamination["dropped"]:
        yield (
            f"{contamination['rows']} rows share {contamination['ngram_words']} words in a row with an evaluation "
            "problem; --drop-contaminated leaves them out"
        )


def contamination_lines(facts: dict[str, Any]) -> Iterator[str]:
    """What was found against one evaluation file."""
    yield (
        f"against {facts['file']}: {facts['rows']} rows share words with {facts['problems_found']} of "
        f"{facts['problems']} problems ({facts['stock_phrases']} stock phrases not counted; {facts['problems_short']} "
        "problems are shorter than a run of words and compared whole only)"
    )
    for example in facts["examples"]:
        yield f"  line {example['line']}: {example['row']!r}"
        yield f"    problem: {example['problem']!r}"
        yield f"    in common: {example['words']!r}"


def contamination_warnings(facts: dict[str, Any]) -> Iterator[str]:
    """What a comparison with one evaluation file can't tell."""
    if facts["problems_stock"]:
        yield (
            f"{facts['problems_stock']} problems of {facts['file']} consist of words that many rows have in common: "
            "either those rows are made from them, or the rows that share less than half of them can't be told"
        )


def _revision(facts: dict[str, Any]) -> str:
    revision = facts["revision"]
    return f"revision {revision}" if revision else f"revision unknown: {facts['revision_reason']}"


def _instruction(facts: dict[str, Any]) -> str:
    verb = "removed from" if facts["mode"] == "remove" else "kept in"
    kinds = ", ".join(f"{kind} {count}" for kind, count in facts["kinds"].items())
    return f"answer instruction: {verb} {facts['prompts']} prompts ({kinds})"


def _instruction_warnings(facts: dict[str, Any]) -> Iterator[str]:
    if facts["mode"] == "keep" and facts["prompts"]:
        yield (
            "the prompts keep their own answer instruction: set system_prompt so that it does not ask for another form "
            "(the default asks for \\boxed{})"
        )
    if facts["still_asking"]:
        kinds = ", ".join(f"{kind} {count}" for kind, count in facts["still_asking_kinds"].items())
        yield (
            f"{facts['still_asking']} prompts seem to ask for another form of the answer than the default system "
            f"prompt ({kinds}), such as: {facts['still_asking_example']!r}"
        )


def _conflicts(facts: dict[str, Any], *, keep_duplicates: bool) -> str:
    said = f"{facts['problems']} problems have several labels"
    if keep_duplicates:
        return f"{said}; all their rows are kept"
    decided = facts["problems"] - facts["left_out"]
    return f"{said}: for {decided} the one that most rows give is kept, {facts['left_out']} are left out"
