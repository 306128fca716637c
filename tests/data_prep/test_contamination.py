"""Contamination: rows that share words with evaluation problems are found, reported, and dropped on request."""

from pathlib import Path

from prep_support import dapo_row, prepared_file, problem
from preparation.contamination import STOCK_PHRASE_ROWS, Finding, find_contamination, problems_in, words_of

LONG = (
    "A clockmaker sells brass clocks for 12 coins and oak clocks for 7 coins, and on one market day he takes in "
    "exactly 101 coins. How many clocks has he sold in all?"
)


def found(tmp_path: Path, rows: list[str], problems: list[str], ngram_words: int = 13) -> Finding:
    train, evaluation = (
        prepared_file(tmp_path / "train.jsonl", *rows),
        prepared_file(tmp_path / "eval.jsonl", *problems),
    )
    return find_contamination(problems_in(train), [evaluation], ngram_words)[0]


def test_find_contamination_ignores_case_and_punctuation(tmp_path: Path) -> None:
    row = "Warm up. " + LONG.upper().replace(", AND ON", " -- (AND) $ON$") + " Show your work."
    finding = found(tmp_path, [problem(1), row], [problem(900), LONG])
    (overlap,) = finding.overlaps
    assert (overlap.line, overlap.problem, finding.problems, finding.facts()["problems_found"]) == (1, LONG, 2, 1)
    assert overlap.words == "a clockmaker sells brass clocks for 12 coins and oak clocks for 7"


def test_find_contamination_ngram_words(tmp_path: Path) -> None:
    twelve = " ".join(words_of(LONG)[:12])
    row = f"{twelve} geese. How many geese are left when the fox has come and gone?"
    assert not found(tmp_path, [row], [LONG]).overlaps
    assert len(found(tmp_path, [row], [LONG], ngram_words=12).overlaps) == 1


def test_find_contamination_ignores_stock_phrases(tmp_path: Path) -> None:
    phrase = "where m and n are relatively prime positive integers, find the value of m + n."
    problems = [f"{LONG.replace(' ', f' {number} ')} {phrase}" for number in range(STOCK_PHRASE_ROWS + 1)]
    finding = found(tmp_path, problems, [f"Quite another chance is m/n, {phrase}", problems[3]])
    assert [overlap.line for overlap in finding.overlaps] == [3]
    assert finding.stock_phrases > 0
    fewer = found(tmp_path, problems[:3] * 50, [f"Quite another chance is m/n, {phrase}"])
    assert len(fewer.overlaps) == 150, "repeated rows do not make a stock phrase"


def test_prepare_reports_or_drops_contaminated_rows(prepare, tmp_path) -> None:
    evaluation = prepared_file(tmp_path / "eval.jsonl", problem(3))
    rows = [dapo_row(2), dapo_row(3), dapo_row(4)]
    facts = prepare(rows, against=(evaluation,)).manifest["contamination"]
    assert (facts["rows"], facts["absent"], facts["dropped"]) == (1, [], False)
    (file,) = facts["files"]
    assert (file["file"], file["problems"], file["problems_found"]) == (str(evaluation), 1, 1)
    assert file["examples"][0]["line"] == 2
    assert file["examples"][0]["row"] == file["examples"][0]["problem"] == problem(3)
    absent = tmp_path / "later.jsonl"
    dropped = prepare(rows, against=(evaluation, absent), drop_contaminated=True, limit=1)
    assert dropped.problems == [problem(2)]
    assert [dropped.manifest[count] for count in ("rows", "contaminated_removed", "beyond_limit")] == [1, 1, 1]
    assert dropped.manifest["contamination"]["absent"] == [str(absent)]
    prepared_file(absent, problem(2))
    again = prepare(rows, against=(evaluation, absent), drop_contaminated=True, limit=1)
    assert (again.done_before, again.problems) == (False, [problem(4)]), (
        "the file is prepared again once the evaluation file exists"
    )
