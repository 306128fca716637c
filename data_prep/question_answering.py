"""Prepare questions for agents that search, such as NQ's: `python data_prep/question_answering.py --help`.

Reads the layout of FlashRAG and Search-R1: a column `question`, and a column `golden_answers` with a list of texts.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import typer
from preparation.command_line import DATA_DIR
from preparation.contamination import problems_in
from preparation.files import atomic_write
from preparation.report import progress
from preparation.request import HUB, MAX_REJECTED_SHARE, Request, check_usage
from preparation.rows import PreparationError
from preparation.source import open_source

from strands_rollout.cli.options import run_command

_SOURCE_COLUMN: Final = "data_source"
_COLUMNS: Final = ("question", "golden_answers")
_KEPT: Final = ("id", _SOURCE_COLUMN)


def command(
    dataset: Annotated[
        str, typer.Option(help="Repository on the Hugging Face Hub, such as RUC-NLPIR/FlashRAG_datasets.")
    ] = "PeterJinGo/nq_hotpotqa_train",
    config: Annotated[str | None, typer.Option(help="Configuration of the data set, such as hotpotqa.")] = None,
    split: Annotated[str, typer.Option(help="Split of the data set.")] = "train",
    revision: Annotated[str, typer.Option(help="Branch, tag or commit.")] = "main",
    path: Annotated[
        Path | None,
        typer.Option(
            "--from",
            exists=True,
            resolve_path=True,
            help="File, or folder downloaded from the hub, to read instead of the hub.",
        ),
    ] = None,
    endpoint: Annotated[str, typer.Option("--mirror", envvar="HF_ENDPOINT", help="URL of a mirror of the hub.")] = HUB,
    only: Annotated[
        str | None,
        typer.Option(help="Keep rows with these values of data_source, such as nq,hotpotqa.", show_default="all"),
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            resolve_path=True,
            help="Prepared file; leave out its questions. May be repeated.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of rows.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of a shuffle before --limit.", show_default="none")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write.", dir_okay=False, resolve_path=True, show_default="data/question-answering-SPLIT.jsonl"
        ),
    ] = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of the report.")] = False,
) -> None:
    """Prepare questions and their right answers as JSONL for slime.

    Writes lines {"prompt": [...], "label": ["an answer", ...], "metadata": {...}} and a manifest. The prompt is the
    question alone: a prompt column with another agent's instruction is not used. Repeated questions are left out.

    Exit codes: 0 ok, 1 failed, 2 wrong usage.

    Example: python data_prep/question_answering.py --split test --only hotpotqa --limit 500 --seed 0
    """
    file = out or DATA_DIR / f"question-answering-{split.partition('[')[0]}.jsonl"
    request = Request(
        dataset=dataset,
        config=config,
        split=split,
        revision=revision,
        path=path,
        endpoint=(endpoint or HUB).rstrip("/"),
        limit=limit,
        against=against or [],
        out=file,
    )
    check_usage(request, force=force)
    source = open_source(request)
    if missing := [name for name in _COLUMNS if name not in source.rows.column_names]:
        raise PreparationError(
            f"the source has no column {' and no column '.join(missing)}: got {', '.join(source.rows.column_names)}; "
            "expected the layout of FlashRAG and Search-R1"
        )
    counts = Counter[str]()
    rows = list(_rows(source.rows, _names(only), request, counts))
    if counts["rejected"] > MAX_REJECTED_SHARE * (counts["rejected"] + len(rows)) or not rows:
        raise PreparationError(
            f"{counts['rejected']} rows have no question or no answer, {counts['other']} are of another data_source, "
            f"and {len(rows)} can be used; expected at least 1, and at most {MAX_REJECTED_SHARE:.0%} without question "
            f"or answer. The values of data_source: {', '.join(sorted(count_rows_by_source(source.rows))) or 'none'}"
        )
    if seed is not None:
        random.Random(seed).shuffle(rows)  # noqa: S311 - a sample, not a secret
    rows = rows[:limit]
    facts = {
        "out": str(file),
        "dataset": dataset if path is None else str(path),
        "config": config,
        "split": split,
        "revision": source.revision,
        "only": only,
        "seed": seed,
        "rows": len(rows),
        "rows_by_source": dict(Counter(row["metadata"].get(_SOURCE_COLUMN) or "" for row in rows)),
        "rejected": counts["rejected"],
        "duplicates_removed": counts["repeated"],
        "against_removed": counts["against"],
    }
    with atomic_write(file) as lines:
        lines.writelines(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
    with atomic_write(request.manifest_file) as manifest:
        manifest.write(json.dumps(facts, indent=2, ensure_ascii=False).encode() + b"\n")
    typer.echo(json.dumps(facts, ensure_ascii=False) if as_json else _report(facts))


def count_rows_by_source(rows: Any) -> Counter[str]:  # noqa: ANN401 - a datasets.Dataset
    """Return the number of rows of each `data_source`; empty if the column is missing."""
    return Counter(map(str, rows[_SOURCE_COLUMN])) if _SOURCE_COLUMN in rows.column_names else Counter()


def _names(only: str | None) -> frozenset[str]:
    return frozenset(name.strip() for name in (only or "").split(",") if name.strip())


def _rows(source: Any, only: frozenset[str], request: Request, counts: Counter[str]) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - a datasets.Dataset
    seen = {_key(text) for path in request.against for text in problems_in(path) if text}
    others = set(seen)
    names = [name for name in (*_COLUMNS, *_KEPT) if name in source.column_names]
    for row in progress(source.select_columns(names), "reading", len(source)):
        if only and row.get(_SOURCE_COLUMN, request.config) not in only:
            counts["other"] += 1
            continue
        question, answers = _text(row["question"]), _answers(row["golden_answers"])
        key = _key(question)
        if not question or not answers:
            counts["rejected"] += 1
        elif key in seen:
            counts["against" if key in others else "repeated"] += 1
        else:
            seen.add(key)
            yield {
                "prompt": [{"role": "user", "content": question}],
                "label": answers,
                "metadata": {_SOURCE_COLUMN: request.config} | {name: row[name] for name in _KEPT if name in row},
            }


def _text(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""


def _answers(value: object) -> list[str]:
    values = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return list(dict.fromkeys(filter(None, map(_text, values))))


def _key(question: str) -> str:
    """Normalize a question for comparison: NQ has the same questions with and without "?"."""
    return " ".join(question.lower().rstrip(" ?.").split())


def _report(facts: Mapping[str, Any]) -> str:
    by_source = ", ".join(f"{name or 'unnamed'} {count}" for name, count in facts["rows_by_source"].items())
    left_out = f"{facts['rejected']} without question or answer, {facts['duplicates_removed']} repeated"
    return (
        f"{facts['out']}: {facts['rows']} rows ({by_source}) of {facts['dataset']}, revision "
        f"{facts['revision'] or 'unknown'}; left out: {left_out}, {facts['against_removed']} in --against"
    )


if __name__ == "__main__":
    run_command(command, "python data_prep/question_answering.py")
