"""The way from a request to a data file, its manifest, and the rows that were rejected.

Reads the source twice: once to decide which rows stay, once to write those; their prompts once more where there is
something to compare them with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from preparation.contamination import Finding, find_contamination
from preparation.duplicates import Choice, Survey
from preparation.instruction import InstructionCount, without_instructions
from preparation.labels import first_difference, is_number
from preparation.output import finish, sha256_of, unfinished, write_whole
from preparation.report import Stage
from preparation.request import Request, check_usage
from preparation.rows import (
    Columns,
    PreparationError,
    column_of,
    find_columns,
    problem_of,
    to_chat,
    value_of,
    values_of,
)
from preparation.source import Source, input_sha256, open_source
from strands_rollout import __version__

FORMAT: Final = 1
MOST_REJECTED: Final = 0.01
"""Share of the different rows; an evaluation set of 30 problems that lacks one is no longer that set."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The manifest as written beside the file, and whether the file was there already."""

    manifest: dict[str, Any]
    done_before: bool


def prepare(request: Request, stage: Stage, *, force: bool = False) -> Prepared:
    """Write the file, unless it is there with the same arguments.

    Raises:
        ConfigError: The request can't be meant; see `check_usage`.
        PreparationError: The source can't be read, or too many rows can't be used; then no data file is written, and
            one that was there stays.
    """
    check_usage(request, force=force)
    arguments = arguments_of(request, input_sha256(request.path))
    finished = None if force else _finished_manifest(request, arguments)
    if finished is not None:
        return Prepared(finished, done_before=True)
    source = open_source(request)
    columns = find_columns(source.rows.data.schema, request.prompt_column, request.label_column)
    survey, differences = _survey(source, columns, stage)
    choice = survey.decide(keep_duplicates=request.keep_duplicates)
    _write_rejected(source, choice, request)
    _refuse_too_many(choice, request)
    findings = _compare(source, columns, choice, request, stage)
    dropped = {overlap.line for finding in findings for overlap in finding.overlaps if request.drop_contaminated}
    numbers = [number for line, number in enumerate(choice.kept) if line not in dropped][: request.limit]
    written, sha256 = _write_rows(source, columns, survey, numbers, request, stage)
    wordings = [label for label in map(survey.label_of, numbers) if not is_number(label)]
    manifest = {
        "format": FORMAT,
        **_origin(source, columns, request),
        "rows": len(numbers),
        **_counts(survey, choice, request, len(numbers), len(dropped)),
        "labels_not_number": {"rows": len(wordings), "example": wordings[0] if wordings else None},
        "label_differences": differences,
        **written,
        "contamination": _contamination_facts(findings, request),
        "sha256": sha256,
        "arguments": arguments,
        "strands_rollout": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_whole(request.manifest_file, [json.dumps(manifest, indent=2, ensure_ascii=False).encode(), b"\n"])
    return Prepared(manifest, done_before=False)


def arguments_of(request: Request, input_sha256: str | None) -> dict[str, Any]:
    """All that decides a file's content: settings, and checksums of the files it is made from and compared with."""
    against = {str(path): sha256_of(path) if path.is_file() else None for path in request.against}
    return {**request.arguments(), "input_sha256": input_sha256, "against": against}


def _finished_manifest(request: Request, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of the file that is there, if it was made with these arguments and was not changed since."""
    try:
        manifest = json.loads(request.manifest_file.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("arguments") != arguments:
        return None
    try:
        return manifest if manifest.get("sha256") == sha256_of(request.out) else None
    except FileNotFoundError:
        return None
    except OSError as e:
        raise PreparationError(f"can't read {request.out}: {e.strerror}") from e


def _survey(source: Source, columns: Columns, stage: Stage) -> tuple[Survey, list[dict[str, Any]]]:
    """The rows, and the first difference of each further column with a label's name."""
    survey, differences, advance = Survey(), dict[str, tuple[str, str]](), stage("reading", len(source.rows))
    needed = [
        column_of(source.rows.column_names, path) for path in (columns.prompt, columns.label, *columns.other_labels)
    ]
    for batch in source.batches(needed):
        before, labels = len(survey), values_of(batch, columns.label)
        survey.add(values_of(batch, columns.prompt), labels)
        for path in columns.other_labels:
            if path not in differences and (found := first_difference(labels, values_of(batch, path))):
                differences[path] = found
        advance(len(survey) - before)
    return survey, [{"column": path, "label": one, "other": other} for path, (one, other) in differences.items()]


def _write_rejected(source: Source, choice: Choice, request: Request) -> None:
    """What is left out and why, row by row; the file of an earlier run goes where there is nothing to say."""
    if not choice.rejections:
        request.rejected_file.unlink(missing_ok=True)
        return
    rows = source.rows_at([rejection.row for rejection in choice.rejections])
    write_whole(
        request.rejected_file,
        (
            _line({"reason": one.reason, "kind": one.kind, "row": one.row, "times": one.times, "source": row})
            for one, row in zip(choice.rejections, rows, strict=True)
        ),
    )


def _refuse_too_many(choice: Choice, request: Request) -> None:
    rejected = sum(rejection.times for rejection in choice.rejections)
    looked_at = len(choice.kept) + rejected  # all rows but the repeated ones
    if not choice.kept:
        why = choice.rejections[0].reason if choice.rejections else "there are none"
        raise PreparationError(f"none of the rows can be used: {why}. Is it the right column? See --prompt-column.")
    if rejected > MOST_REJECTED * looked_at and not request.allow_rejected:
        raise PreparationError(
            f"{rejected} of {looked_at} different rows can't be used, the first because of: "
            f"{choice.rejections[0].reason}. Expected at most {MOST_REJECTED:.0%}; read {request.rejected_file}, then "
            "name the right column with --label-column, or accept this with --allow-rejected. No data file was written."
        )


def _compare(source: Source, columns: Columns, choice: Choice, request: Request, stage: Stage) -> Sequence[Finding]:
    """What the rows that could be written have in common with the evaluation files that are there."""
    present = [path for path in request.against if path.is_file()]
    if not present:
        return ()
    rows = source.rows_at(choice.kept, [column_of(source.rows.column_names, columns.prompt)])
    problems = (problem_of(without_instructions(to_chat(value_of(row, columns.prompt)))[0]) for row in rows)
    return find_contamination(enumerate(problems), present, request.ngram_words, stage("comparing", len(choice.kept)))


def _write_rows(
    source: Source, columns: Columns, survey: Survey, numbers: Sequence[int], request: Request, stage: Stage
) -> tuple[dict[str, Any], str]:
    """Write the data file; what the manifest says of its rows, and its digest."""
    count = InstructionCount(removing=request.instruction == "remove")
    names: dict[str, None] = {}
    systems, advance = 0, stage("writing", len(numbers))
    with unfinished(request.out) as partial:
        with partial.open("wb") as file:
            for number, row in zip(numbers, source.rows_at(numbers), strict=True):
                chat = count.apply(to_chat(value_of(row, columns.prompt)))
                systems += chat[0]["role"] == "system"
                own = {"prompt": chat, "label": survey.label_of(number)}
                prepared = {**own, **row, **own}
                names |= dict.fromkeys(prepared)
                file.write(_line(prepared))
                advance(1)
        sha256 = sha256_of(partial)
        finish(partial, request.out)
    return {"own_system_messages": systems, "columns": list(names), "instruction": count.facts()}, sha256


def _origin(source: Source, columns: Columns, request: Request) -> dict[str, Any]:
    return {
        "dataset": request.dataset if request.path is None else str(request.path),
        "config": request.config,
        "split": request.split,
        "revision_requested": request.revision,
        "revision": source.revision,
        "revision_reason": source.revision_reason,
        "source": source.kind,
        "prompt_column": columns.prompt,
        "label_column": columns.label,
    }


def _counts(survey: Survey, choice: Choice, request: Request, chosen: int, dropped: int) -> dict[str, Any]:
    """Where all rows went: `rows_read` is the sum of `rows` and of the next four."""
    kinds = [rejection.kind for rejection in choice.rejections for _ in range(rejection.times)]
    return {
        "rows_read": len(survey),
        "duplicates_removed": choice.repeated,
        "rejected": len(kinds),
        "contaminated_removed": dropped,
        "beyond_limit": len(choice.kept) - dropped - chosen,
        "rejected_by_kind": {kind: kinds.count(kind) for kind in ("prompt", "label", "conflict")},
        "rejected_file": request.rejected_file.name if kinds else None,
        "conflicts": {"problems": choice.conflicts, "left_out": choice.undecided},
    }


def _contamination_facts(findings: Sequence[Finding], request: Request) -> dict[str, Any]:
    """Of rows in the file, or of those that were left out of it."""
    findings = [finding.of_first(None if request.drop_contaminated else request.limit) for finding in findings]
    return {
        "ngram_words": request.ngram_words,
        "rows": len({overlap.line for finding in findings for overlap in finding.overlaps}),
        "dropped": request.drop_contaminated,
        "files": [finding.facts() for finding in findings],
        "absent": [str(path) for path in request.against if not path.is_file()],
    }


def _line(value: dict[str, Any]) -> bytes:
    return orjson.dumps(value, default=str, option=orjson.OPT_APPEND_NEWLINE)
