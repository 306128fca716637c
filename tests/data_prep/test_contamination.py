"""Rows that share words with evaluation problems are found, shown, and left out if asked."""

import json
from pathlib import Path

import pytest
from prep_support import Prepare, dapo_row, prepared_file, problem
from preparation.contamination import STOCK_PHRASE_ROWS, Finding, find_contamination, problems_in, words_of
from preparation.report import contamination_warnings
from preparation.rows import PreparationError

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


def test_a_row_with_thirteen_words_of_a_problem_is_found_however_they_are_written(tmp_path: Path) -> None:
    row = "Warm up. " + LONG.upper().replace(", AND ON", " -- (AND) $ON$") + " Show your work."
    finding = found(tmp_path, [problem(1), row], [problem(900), LONG])
    (overlap,) = finding.overlaps
    assert (overlap.line, overlap.problem, finding.problems, finding.facts()["problems_found"]) == (1, LONG, 2, 1)
    assert overlap.words == "a clockmaker sells brass clocks for 12 coins and oak clocks for 7"


def test_twelve_words_in_a_row_are_no_overlap_and_the_number_can_be_set(tmp_path: Path) -> None:
    twelve = " ".join(words_of(LONG)[:12])
    row = f"{twelve} geese. How many geese are left when the fox has come and gone?"
    assert not found(tmp_path, [row], [LONG]).overlaps
    assert len(found(tmp_path, [row], [LONG], ngram_words=12).overlaps) == 1


def test_short_problems_are_compared_whole(tmp_path: Path) -> None:
    finding = found(tmp_path, ["What is 3 + 4?", "what is $3 + 4$", "What is 3 + 4 + 5?"], ["What is 3+4?"])
    assert [overlap.line for overlap in finding.overlaps] == [0, 1]


def test_the_data_sets_instruction_is_no_overlap(tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text(json.dumps(dapo_row(1)) + "\n")
    evaluation = tmp_path / "eval.jsonl"
    evaluation.write_text(json.dumps(dapo_row(2000)) + "\n")
    assert not find_contamination(problems_in(train), [evaluation], 13)[0].overlaps


def test_a_phrase_of_many_rows_is_a_stock_phrase_unless_the_problem_itself_is_there(tmp_path: Path) -> None:
    phrase = "where m and n are relatively prime positive integers, find the value of m + n."
    problems = [f"{LONG.replace(' ', f' {number} ')} {phrase}" for number in range(STOCK_PHRASE_ROWS + 1)]
    finding = found(tmp_path, problems, [f"Quite another chance is m/n, {phrase}", problems[3]])
    assert [overlap.line for overlap in finding.overlaps] == [3]
    assert finding.stock_phrases > 0
    fewer = found(tmp_path, problems[:3] * 50, [f"Quite another chance is m/n, {phrase}"])
    assert len(fewer.overlaps) == 150, "repeated rows make no stock phrase"


def test_many_copies_of_a_problem_make_no_stock_phrase_of_it(tmp_path: Path) -> None:
    copies = [f"(Variant {number}) {LONG}" for number in range(STOCK_PHRASE_ROWS + 2)]
    finding = found(tmp_path, [*copies, problem(1)], [problem(900), LONG])
    assert [overlap.line for overlap in finding.overlaps] == list(range(len(copies)))
    assert {overlap.problem for overlap in finding.overlaps} == {LONG}
    halves = [f"{number} " + " ".join(words_of(LONG)[:24]) for number in range(STOCK_PHRASE_ROWS + 2)]
    assert len(found(tmp_path, halves, [LONG]).overlaps) == len(halves)


def test_a_problem_of_stock_phrases_only_is_counted_and_so_are_short_ones(tmp_path: Path) -> None:
    phrase = "where m and n are relatively prime positive integers, find the value of m + n."
    rows = [f"{LONG.replace(' ', f' {number} ')} {phrase}" for number in range(STOCK_PHRASE_ROWS + 1)]
    finding = found(tmp_path, rows, [phrase, LONG, "What is 3 + 4?", "What is 4 + 3?"])
    assert (finding.problems, finding.problems_stock, finding.problems_short) == (4, 1, 2)
    (said,) = contamination_warnings(finding.facts())
    assert said.startswith("1 problems of ")
    assert not list(contamination_warnings(found(tmp_path, rows, [LONG]).facts()))


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_evaluation_file_without_problems_is_an_error(prepare: Prepare, tmp_path: Path, content: str) -> None:
    (tmp_path / "eval.jsonl").write_text(content)
    with pytest.raises(PreparationError, match=r"eval\.jsonl has no problem to compare with"):
        prepare([dapo_row(3)], against=(tmp_path / "eval.jsonl",))


def test_contaminated_rows_are_reported_in_the_manifest_and_stay_unless_dropped(
    prepare: Prepare, tmp_path: Path
) -> None:
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
        "an evaluation file that came later is compared"
    )


@pytest.mark.parametrize("line", ["not json", "[]", '{"problem": "2 + 2"}', '{"prompt": []}'])
def test_a_file_that_was_not_prepared_is_an_error_with_its_line(tmp_path: Path, line: str) -> None:
    train = prepared_file(tmp_path / "train.jsonl", LONG)
    other = tmp_path / "other.jsonl"
    other.write_text(f"{line}\n")
    with pytest.raises(PreparationError, match=r"other\.jsonl:1: got .* expected a prepared row"):
        find_contamination(problems_in(train), [other], 13)
