"""The benchmarks: their columns on the hub, with rows that were made up, and what evaluation needs in the metadata."""

import json
from pathlib import Path
from typing import Any

import pytest
from prep_support import Main, gsm8k_row, lines_of, problem, write_parquet

from strands_rollout.evaluation.benchmarks import BENCHMARK_KEY, BENCHMARKS
from strands_rollout.slime_plugin.reward import GRADING_KEY


def mathematics_row(number: int) -> dict[str, Any]:
    return {"problem_idx": number, "problem": problem(number), "answer": str(4 * number), "problem_type": ["Algebra"]}


def math_500_row(number: int) -> dict[str, Any]:
    solution = f"It is $4n$, so \\boxed{{\\frac{{{number}}}{{7}}}}."
    return {
        "problem": problem(number),
        "solution": solution,
        "answer": f"\\frac{{{number}}}{{7}}",
        "subject": "Algebra",
        "level": 2,
        "unique_id": f"test/algebra/{number}.json",
    }


def gpqa_row(number: int) -> dict[str, Any]:
    wrong = {f"Incorrect Answer {n}": f" {number * 10 + n} J\n" for n in (1, 2, 3)}
    return {
        "Record ID": f"rec{number}",
        "Question": f"{problem(number)}\n",
        "Correct Answer": f"{number} J",
        **wrong,
        "Explanation": "secret",
    }


def ifeval_row(number: int) -> dict[str, Any]:
    return {
        "key": number,
        "prompt": f"{problem(number)} Use no comma. Please put your final answer within \\boxed{{}}.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"num_words": None, "relation": None}, {"num_words": 30 + number, "relation": "at least"}],
    }


ROWS = {
    "aime-2024": mathematics_row,
    "aime-2025": mathematics_row,
    "hmmt-feb-2025": mathematics_row,
    "math-500": math_500_row,
    "gsm8k": gsm8k_row,
    "gpqa-diamond": gpqa_row,
    "ifeval": ifeval_row,
}


def prepare(main: Main, folder: Path, name: str, rows: list[dict[str, Any]], *options: str) -> list[dict[str, Any]]:
    source, out = write_parquet(rows, folder / "source.parquet"), folder / "out.jsonl"
    code, stdout, stderr = main(
        "benchmark.py", name, "--from", str(source), "--out", str(out), "--json", "--force", *options
    )
    assert code == 0, stderr
    manifest = json.loads(stdout)
    assert manifest["rows"] == len(rows)
    assert f"the file holds {len(rows)} of the {BENCHMARKS[name].rows} problems of {name}" in stderr
    assert stderr.count("warning") == 1, "only the number of problems is a reason for a warning"
    return lines_of(out)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_script_marks_every_row(name: str, tmp_path: Path, main: Main) -> None:
    rows = prepare(main, tmp_path, name, [ROWS[name](number) for number in range(3, 9)])
    for row in rows:
        assert row["metadata"][BENCHMARK_KEY] == name
        assert row["metadata"].get(GRADING_KEY, "math") == BENCHMARKS[name].grading
        assert [message["role"] for message in row["prompt"]] == ["user"]


def test_benchmark_script_reads_the_labels_of_mathematics(tmp_path: Path, main: Main) -> None:
    assert [row["label"] for row in prepare(main, tmp_path, "gsm8k", [gsm8k_row(900)])] == ["3600"]
    (row,) = prepare(main, tmp_path, "math-500", [math_500_row(3)])
    assert (row["prompt"][0]["content"], row["label"]) == (problem(3), "\\frac{3}{7}")


def choices_of(row: dict[str, Any]) -> dict[str, str]:
    lines = [line for line in row["prompt"][0]["content"].splitlines() if line.startswith("(")]
    return {line[1]: line[4:] for line in lines}


def test_benchmark_script_shuffles_the_choices_of_gpqa_by_seed(tmp_path: Path, main: Main) -> None:
    source = [gpqa_row(number) for number in range(3, 23)]
    rows = prepare(main, tmp_path, "gpqa-diamond", source)
    for number, row in enumerate(rows, start=3):
        choices = choices_of(row)
        assert list(choices) == ["A", "B", "C", "D"]
        assert choices[row["label"]] == f"{number} J"
        assert set(choices.values()) == {f"{number} J", *(f"{number * 10 + n} J" for n in (1, 2, 3))}
        assert row["prompt"][0]["content"].startswith(f"{problem(number)}\n\n(A) ")
        assert "secret" not in json.dumps(row)
    assert {row["label"] for row in rows} == set("ABCD")
    assert prepare(main, tmp_path, "gpqa-diamond", source[5:8]) == rows[5:8], "other rows do not affect a row"
    assert prepare(main, tmp_path, "gpqa-diamond", source, "--seed", "1") != rows


def test_benchmark_script_keeps_the_prompts_of_ifeval(tmp_path: Path, main: Main) -> None:
    (row,) = prepare(main, tmp_path, "ifeval", [ifeval_row(4)])
    assert row["prompt"] == [{"role": "user", "content": ifeval_row(4)["prompt"]}]
    assert row["label"] == "punctuation:no_comma, length_constraints:number_words"
    given = row["metadata"]["ifeval"]
    assert (given["key"], given["instruction_id_list"]) == (4, ifeval_row(4)["instruction_id_list"])
    assert given["kwargs"][1] == {"num_words": 34, "relation": "at least"}


def test_benchmark_script_refuses_unknown_names_and_columns(tmp_path: Path, main: Main) -> None:
    code, _, stderr = main("benchmark.py", "gpqa")
    assert (code, "got the benchmark 'gpqa'; expected one of aime-2024, aime-2025, " in stderr) == (2, True)
    source = str(write_parquet([{"question": "?", "answer": "C"}], tmp_path / "source.parquet"))
    code, _, stderr = main("benchmark.py", "gpqa-diamond", "--from", source, "--out", str(tmp_path / "out.jsonl"))
    assert code == 1
    assert "the source has no Question, Correct Answer, " in stderr
    assert "got the columns question, answer; expected Question, Correct Answer, Incorrect Answer 1" in stderr


def test_gsm8k_script_marks_the_test_split_only(tmp_path: Path, main: Main) -> None:
    source = str(write_parquet([gsm8k_row(8)], tmp_path / "source.parquet"))
    for split, name in (("test", "gsm8k"), ("train", None)):
        out = tmp_path / f"{split}.jsonl"
        assert main("gsm8k.py", "--from", source, "--out", str(out), "--split", split)[0] == 0
        assert lines_of(out)[0].get("metadata", {}).get(BENCHMARK_KEY) == name
