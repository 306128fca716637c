"""Progress on stderr, and the manifest as a report and as warnings."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

from preparation.request import Request

_T = TypeVar("_T")


def progress(rows: Iterable[_T], stage: str, total: int | None = None) -> Iterable[_T]:
    """Return the rows; show a bar on stderr while they are read, or print a line if stderr is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{stage} {'' if total is None else f'{total} '}rows", highlight=False, soft_wrap=True)
    return track(rows, stage, total, console=console, disable=not console.is_terminal)


def report_lines(facts: dict[str, Any], request: Request, *, done_before: bool) -> Iterator[str]:
    """Yield the report: source, columns, counts of rows, overlaps with evaluation files, and the files written."""
    if done_before:
        yield f"{request.out} exists already, made with these settings on {facts['created']}; --force makes it again"
    revision = facts["revision"]
    revision = f"revision {revision}" if revision else f"revision unknown: {facts['revision_reason']}"
    yield f"source: {facts['dataset']}, split {facts['split']} ({facts['source']}), {revision}"
    yield f"columns: prompt from {facts['prompt_column']}, label from {facts['label_column']}"
    yield (
        f"rows: {facts['rows_read']} read, {facts['duplicates_removed']} duplicates removed, "
        f"{facts['rejected']} rejected, {facts['contaminated_removed']} contaminated removed, "
        f"{facts['beyond_limit']} beyond the limit, {facts['rows']} written"
    )
    instruction = facts["instruction"]
    verb = "removed from" if instruction["mode"] == "remove" else "kept in"
    yield f"answer instruction: {verb} {instruction['prompts']} prompts ({_counts(instruction['kinds'])})"
    for file in facts["contamination"]["files"]:
        yield from contamination_lines(file)
    yield f"sha256: {facts['sha256']}"
    yield f"written: {request.out} (manifest: {request.manifest_file.name})"


def warning_lines(facts: dict[str, Any], request: Request) -> Iterator[str]:
    """Yield warnings to read before training or evaluating on the file."""
    if facts["rejected"]:
        kinds = ", ".join(f"{count} for the {kind}" for kind, count in facts["rejected_by_kind"].items() if count)
        yield f"{facts['rejected']} rows were rejected ({kinds}); {request.rejected_file} says why"
    if facts["beyond_limit"]:
        yield f"the file holds {facts['rows']} of {facts['rows'] + facts['beyond_limit']} rows, because of --limit"
    if facts["benchmark_rows"] not in (None, facts["rows"]):
        yield (
            f"the file holds {facts['rows']} of the {facts['benchmark_rows']} problems of {request.benchmark}; its "
            "results can't be compared with published ones"
        )
    yield from _label_warnings(facts, request)
    if facts["own_system_messages"]:
        yield (
            f"{facts['own_system_messages']} prompts have a system message of their own, which replaces the setting "
            "system_prompt"
        )
    yield from _instruction_warnings(facts["instruction"])
    contamination = facts["contamination"]
    for path in contamination["absent"]:
        yield f"not compared with {path}, which does not exist; prepare that file, then run this script again"
    for file in contamination["files"]:
        yield from contamination_warnings(file)
    if contamination["rows"] and not contamination["dropped"]:
        yield (
            f"{contamination['rows']} rows share {contamination['ngram_words']} consecutive words with an evaluation "
            "problem; --drop-contaminated leaves these rows out"
        )


def contamination_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yield lines on the overlap with an evaluation file."""
    yield (
        f"against {facts['file']}: {facts['rows']} rows share words with {facts['problems_found']} of "
        f"{facts['problems']} problems ({facts['stock_phrases']} of the shared runs of words are stock phrases; "
        f"{facts['problems_short']} problems are shorter than a run of words and compared only as a whole)"
    )
    for example in facts["examples"]:
        yield f"  line {example['line']}: {example['row']!r}"
        yield f"    problem: {example['problem']!r}"
        yield f"    in common: {example['words']!r}"


def contamination_warnings(facts: dict[str, Any]) -> Iterator[str]:
    """Yield warnings about the limits of a comparison with an evaluation file."""
    if facts["problems_stock"]:
        yield (
            f"{facts['problems_stock']} problems of {facts['file']} consist of stock phrases, which many rows share: "
            "either the rows were made from these problems, or the problems are made of common phrases, so that a row "
            "with less than half of such a problem is not found"
        )


def _label_warnings(facts: dict[str, Any], request: Request) -> Iterator[str]:
    conflicts, words = facts["conflicts"], facts["labels_not_number"]
    if conflicts["problems"]:
        decided = conflicts["problems"] - conflicts["left_out"]
        yield f"{conflicts['problems']} problems have several labels" + (
            "; all their rows are kept"
            if request.keep_duplicates
            else f": {decided} keep the label of more than half of their rows, {conflicts['left_out']} are left out"
        )
    if words["rows"]:
        yield (
            f"{words['rows']} labels are not numbers, such as {words['example']!r:.80}; only an answer in the same "
            "words or an equal formula is right"
        )
    for difference in facts["label_differences"]:
        yield (
            f"the label is from {facts['label_column']} ({difference['label']!r:.80}), but {difference['column']} "
            f"differs ({difference['other']!r:.80}); name the right column with --label-column"
        )


def _instruction_warnings(facts: dict[str, Any]) -> Iterator[str]:
    if facts["mode"] == "keep" and facts["prompts"]:
        yield (
            "the prompts keep their own answer instruction: set system_prompt so that it does not ask for another form "
            "(the default asks for \\boxed{})"
        )
    if facts["still_asking"]:
        yield (
            f"{facts['still_asking']} prompts seem to ask for another form of the answer than the default system "
            f"prompt ({_counts(facts['still_asking_kinds'])}), such as: {facts['still_asking_example']!r}"
        )


def _counts(kinds: dict[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in kinds.items())
