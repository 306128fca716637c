"""Write the data file of a request, its manifest, and the rejected rows.

The source is read to choose the rows, and again to write them; in between, the prompts of the chosen rows are read to
compare them with evaluation files.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from preparation.benchmarks import benchmark_metadata, convert_rows
from preparation.contamination import Finding, find_contamination
from preparation.duplicates import Choice, Survey
from preparation.files import atomic_write, sha256_of
from preparation.instruction import InstructionCount, without_instructions
from preparation.labels import is_number, label_of, normalize
from preparation.report import progress
from preparation.request import MAX_REJECTED_SHARE, Request, check_usage
from preparation.rows import Columns, PreparationError, column_of, find_columns, to_chat, value_of
from preparation.source import Source, input_sha256, open_source
from strands_rollout import __version__
from strands_rollout.evaluation.benchmarks import Benchmark, find_benchmark

FORMAT: Final = 1
"""Version of the manifest's format."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of a preparation.

    Attributes:
        manifest: The manifest as written.
        done_before: True if an earlier run had made the file.
    """

    manifest: dict[str, Any]
    done_before: bool


def prepare(request: Request, *, force: bool = False) -> Prepared:
    """Write the data file, its manifest and the rejected rows.

    Without `force`, do nothing if an earlier run with the same arguments made the data file and the file is unchanged.

    Raises:
        ConfigError: An option is wrong, or a file that must not be overwritten is in the way.
        PreparationError: The source can't be read, or too many rows can't be used.

    After either error no data file is written, and an existing file stays.
    """
    check_usage(request, force=force)
    arguments = arguments_of(request)
    finished = None if force else _finished_manifest(request, arguments)
    if finished is not None:
        return Prepared(finished, done_before=True)
    benchmark = None if request.benchmark is None else find_benchmark(request.benchmark)
    source = open_source(request)
    if benchmark is not None:
        source = replace(source, rows=convert_rows(source.rows, benchmark, request.seed))
    columns = find_columns(source.rows.features, request.prompt_column, request.label_column)
    survey, differences = _survey_rows(source, columns)
    choice = survey.decide(keep_duplicates=request.keep_duplicates)
    _write_rejected(source, choice, request)
    _check_rejections(choice, request)
    findings = _compare_rows(source, columns, choice, request)
    dropped = {overlap.line for finding in findings for overlap in finding.overlaps if request.drop_contaminated}
    written = [number for line, number in enumerate(choice.kept) if line not in dropped][: request.limit]
    manifest = {
        "format": FORMAT,
        **_origin(source, columns, request),
        "rows": len(written),
        **_counts(survey, choice, request),
        "contaminated_removed": len(dropped),
        "beyond_limit": len(choice.kept) - len(dropped) - len(written),
        "label_differences": differences,
        "contamination": _contamination_facts(findings, request),
        **_write_rows(source, columns, written, request, benchmark),
        "benchmark_rows": benchmark and benchmark.rows,
        "arguments": arguments,
        "strands_rollout": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with atomic_write(request.manifest_file) as file:
        file.write(json.dumps(manifest, indent=2, ensure_ascii=False).encode() + b"\n")
    return Prepared(manifest, done_before=False)


def arguments_of(request: Request) -> dict[str, Any]:
    """Return the arguments that identify a data file: settings, and checksums of local inputs and evaluation files."""
    against = {str(path): sha256_of(path) if path.is_file() else None for path in request.against}
    return {**request.arguments(), "input_sha256": input_sha256(request.path), "against": against}


def _finished_manifest(request: Request, arguments: dict[str, Any]) -> dict[str, Any] | None:
    try:
        manifest = json.loads(request.manifest_file.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("arguments") != arguments:
        return None
    return manifest if request.out.is_file() and manifest.get("sha256") == sha256_of(request.out) else None


def _survey_rows(source: Source, columns: Columns) -> tuple[Survey, list[dict[str, Any]]]:
    """Return the survey of the rows and, for each column of `other_labels`, its first difference from the label."""
    survey, differences = Survey(), dict[str, dict[str, Any]]()
    needed = {
        column_of(source.rows.column_names, path) for path in (columns.prompt, columns.label, *columns.other_labels)
    }
    for row in progress(source.rows.select_columns(list(needed)), "reading", len(source.rows)):
        value = value_of(row, columns.label)
        survey.add(value_of(row, columns.prompt), value)
        for path in columns.other_labels:
            if path not in differences:
                label, other = label_of(value).text, label_of(value_of(row, path)).text
                if label and other and label != other:
                    differences[path] = {"column": path, "label": label, "other": other}
    return survey, list(differences.values())


def _write_rejected(source: Source, choice: Choice, request: Request) -> None:
    if not choice.rejections:
        request.rejected_file.unlink(missing_ok=True)  # an earlier run's file
        return
    rows = source.rows.select([rejection.row for rejection in choice.rejections])
    with atomic_write(request.rejected_file) as file:
        for rejection, row in zip(choice.rejections, rows, strict=True):
            file.write(
                _json_line(
                    {
                        "reason": rejection.reason,
                        "kind": rejection.kind,
                        "row": rejection.row,
                        "times": rejection.times,
                        "source": row,
                    }
                )
            )


def _check_rejections(choice: Choice, request: Request) -> None:
    rejected = sum(rejection.times for rejection in choice.rejections)
    different_rows = len(choice.kept) + rejected  # all rows except duplicates
    if not choice.kept:
        reason = choice.rejections[0].reason if choice.rejections else "the source has no rows"
        raise PreparationError(
            f"none of the rows can be used: {reason}. Name the right columns with --prompt-column and --label-column"
        )
    if rejected > MAX_REJECTED_SHARE * different_rows and not request.allow_rejected:
        raise PreparationError(
            f"{rejected} of {different_rows} different rows can't be used, the first because of: "
            f"{choice.rejections[0].reason}. Expected at most {MAX_REJECTED_SHARE:.0%}. No data file was written. Read "
            f"{request.rejected_file}, then name the right column with --label-column, or continue without these rows "
            "with --allow-rejected"
        )


def _compare_rows(source: Source, columns: Columns, choice: Choice, request: Request) -> Sequence[Finding]:
    present = [path for path in request.against if path.is_file()]
    if not present:
        return ()
    numbers = choice.kept if request.drop_contaminated else choice.kept[: request.limit]
    rows = source.rows.select(numbers).select_columns([column_of(source.rows.column_names, columns.prompt)])
    chats = (without_instructions(to_chat(value_of(row, columns.prompt)))[0] for row in rows)
    problems = progress((chat[-1]["content"] for chat in chats), "comparing", len(numbers))
    return find_contamination(problems, present, request.ngram_words)


def _write_rows(
    source: Source, columns: Columns, numbers: Sequence[int], request: Request, benchmark: Benchmark | None
) -> dict[str, Any]:
    """Write the rows with these numbers to the data file; return the manifest's entries about the file."""
    count = InstructionCount(removing=request.instruction == "remove")
    is_math = benchmark is None or benchmark.grading == "math"  # other prompts and labels are not mathematics
    names, labels_in_words, system_messages, digest = dict[str, None](), list[str](), 0, hashlib.sha256()
    with atomic_write(request.out) as file:
        for row in progress(source.rows.select(numbers), "writing", len(numbers)):
            chat, label = to_chat(value_of(row, columns.prompt)), normalize(value_of(row, columns.label))
            chat = count.apply(chat) if is_math else chat
            prompt_and_label = {"prompt": chat, "label": label}
            # prompt and label stand first in the line, and replace the row's own columns of these names
            prepared = {**prompt_and_label, **row, **prompt_and_label}
            if benchmark is not None:
                prepared["metadata"] = benchmark_metadata(row, benchmark)
            line = _json_line(prepared)
            file.write(line)
            digest.update(line)
            names |= dict.fromkeys(prepared)
            system_messages += chat[0]["role"] == "system"
            labels_in_words += [] if is_number(label) or not is_math else [label]
    return {
        "columns": list(names),
        "own_system_messages": system_messages,
        "labels_not_number": {"rows": len(labels_in_words), "example": next(iter(labels_in_words), None)},
        "instruction": count.facts(),
        "sha256": digest.hexdigest(),
    }


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


def _counts(survey: Survey, choice: Choice, request: Request) -> dict[str, Any]:
    kinds = [rejection.kind for rejection in choice.rejections for _ in range(rejection.times)]
    return {
        "rows_read": survey.rows_read,
        "duplicates_removed": choice.repeated,
        "rejected": len(kinds),
        "rejected_by_kind": {kind: kinds.count(kind) for kind in ("prompt", "label", "conflict")},
        "rejected_file": request.rejected_file.name if kinds else None,
        "conflicts": {"problems": choice.conflicts, "left_out": choice.undecided},
    }


def _contamination_facts(findings: Sequence[Finding], request: Request) -> dict[str, Any]:
    return {
        "ngram_words": request.ngram_words,
        "rows": len({overlap.line for finding in findings for overlap in finding.overlaps}),
        "dropped": request.drop_contaminated,
        "files": [finding.facts() for finding in findings],
        "absent": [str(path) for path in request.against if not path.is_file()],
    }


def _json_line(value: dict[str, Any]) -> bytes:
    return orjson.dumps(value, default=str, option=orjson.OPT_APPEND_NEWLINE)
