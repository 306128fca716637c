"""Compare a prepared file with prepared evaluation files: `python data_prep/contamination.py TRAIN EVAL...`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from preparation.contamination import find_contamination, problems_in
from preparation.report import contamination_lines, contamination_warnings, progress
from preparation.request import NGRAM_WORDS

from strands_rollout.cli.options import run_command


def main(
    train: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Prepared file to check.")],
    evaluation: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="Prepared files with evaluation problems.")
    ],
    ngram_words: Annotated[
        int, typer.Option(help="Number of consecutive shared words that make an overlap.", min=2)
    ] = NGRAM_WORDS,
    as_json: Annotated[  # noqa: FBT002
        bool, typer.Option("--json", help="Print one line of JSON instead of the report.")
    ] = False,
) -> None:
    """Find rows of a file that share words with evaluation problems.

    A row shares words with a problem if both contain the same run of --ngram-words consecutive words. A shorter problem
    counts only if a row consists of the same words. Runs shared by more than ten different rows are stock phrases and
    don't count, unless a row has at least half of a problem's runs.

    Exit codes: 0 none found, 1 some found or a file can't be read, 2 wrong usage.

    Example: python data_prep/contamination.py data/dapo-math-17k.jsonl data/aime-2024.jsonl
    """
    findings = find_contamination(progress(problems_in(train), "comparing"), evaluation, ngram_words)
    files = [finding.facts() for finding in findings]
    if as_json:
        typer.echo(json.dumps({"train": str(train), "ngram_words": ngram_words, "files": files}, ensure_ascii=False))
    else:
        for line in (line for file in files for line in contamination_lines(file)):
            typer.echo(line)
    for warning in (line for file in files for line in contamination_warnings(file)):
        typer.echo(f"warning: {warning}", err=True)
    raise typer.Exit(1 if any(finding.overlaps for finding in findings) else 0)


if __name__ == "__main__":
    run_command(main, "python data_prep/contamination.py")
