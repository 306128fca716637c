"""The scripts of data_prep from end to end, run in this process."""

import json
from pathlib import Path

import pytest
from prep_support import Main, aime_row, gsm8k_row, lines_of, nested_row, prepared_file, problem, write_parquet

SETS = {
    "dapo_math_17k.py": ([nested_row(number) for number in (2, 3, 4, 3)], (2, 3, 4)),
    "aime_2024.py": ([aime_row(number) for number in (3, 5)], (3, 5)),
    "aime_2025.py": ([aime_row(number) for number in (6, 7)], (6, 7)),
    "gsm8k.py": ([gsm8k_row(number) for number in (8, 900)], (8, 900)),
}


@pytest.mark.parametrize("script", SETS)
def test_prep_script_prepares_and_prints_one_json_line(script: str, tmp_path: Path, main: Main) -> None:
    rows, numbers = SETS[script]
    source, out = write_parquet(rows, tmp_path / "source.parquet"), tmp_path / "out.jsonl"
    code, stdout, stderr = main(script, "--from", str(source), "--out", str(out), "--json")
    assert code == 0, stderr
    assert stdout.count("\n") == 1
    facts = json.loads(stdout)
    assert (facts["rows"], facts["out"], facts["done_before"]) == (len(numbers), str(out), False)
    assert [(row["prompt"], row["label"]) for row in lines_of(out)] == [
        ([{"role": "user", "content": problem(number)}], str(4 * number)) for number in numbers
    ]


def test_prep_script_help_names_the_file_of_a_split(main: Main) -> None:
    code, stdout, _ = main("gsm8k.py", "--help")
    assert (code, "Writes data/gsm8k-SPLIT.jsonl," in stdout) == (0, True), stdout


def test_prep_script_reports_and_warns_on_stderr(tmp_path: Path, main: Main) -> None:
    source = write_parquet(SETS["dapo_math_17k.py"][0], tmp_path / "source.parquet")
    evaluation = prepared_file(tmp_path / "eval.jsonl", problem(3))
    out = tmp_path / "out.jsonl"
    arguments = ("--from", str(source), "--out", str(out), "--against", str(evaluation), "--instruction", "keep")
    code, stdout, stderr = main("dapo_math_17k.py", *arguments)
    assert code == 0, stderr
    for said in (
        "columns: prompt from prompt, label from reward_model.ground_truth",
        "rows: 4 read, 1 duplicates removed, 0 rejected, 0 contaminated removed, 0 beyond the limit, 3 written",
        "answer instruction: kept in 3 prompts (answer_line 3, boxed 0, hashes 0)",
        "1 rows share words with 1 of 1 problems",
        "sha256: ",
        f"written: {out}",
    ):
        assert said in stdout
    for said in (
        "reading 4 rows",
        "warning: the prompts keep their own answer instruction: set system_prompt",
        "3 prompts seem to ask for another form of the answer than the default system prompt (answer_line 3)",
        "--drop-contaminated leaves these rows out",
    ):
        assert said in stderr
    code, stdout, _ = main("dapo_math_17k.py", *arguments)
    assert f"{out} exists already, made with these settings on " in stdout


def test_contamination_script_compares_prepared_files(tmp_path: Path, main: Main) -> None:
    sets = {"train": (2, 3), "same": (3,), "other": (500,)}
    files = [prepared_file(tmp_path / name, *map(problem, numbers)) for name, numbers in sets.items()]
    train, same, other = map(str, files)
    code, stdout, _ = main("contamination.py", train, same, other, "--json")
    assert (code, [file["rows"] for file in json.loads(stdout)["files"]]) == (1, [1, 0])
    code, stdout, _ = main("contamination.py", train, other)
    assert code == 0
    assert "0 rows share words with 0 of 1 problems" in stdout


def test_prep_script_exit_codes(tmp_path: Path, main: Main) -> None:
    assert main("gsm8k.py", "--limit", "0")[0] == 2
    (tmp_path / "notes.txt").write_text("hello")
    assert main("gsm8k.py", "--from", str(tmp_path / "notes.txt"))[0] == 2
    source = write_parquet([{"riddle": "2 + 2"}], tmp_path / "source.parquet")
    code, stdout, stderr = main("gsm8k.py", "--from", str(source), "--out", str(tmp_path / "out.jsonl"))
    assert (code, stdout) == (1, "")
    assert stderr.lstrip().startswith("error: the source has no prompt: got the columns riddle; expected one of prompt")


def test_prep_scripts_write_to_data_dir(tmp_path, main, monkeypatch) -> None:
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "sets"))
    for script, rows in (("aime_2024.py", [aime_row(3)]), ("dapo_math_17k.py", [nested_row(3), nested_row(4)])):
        code, stdout, stderr = main(
            script, "--from", str(write_parquet(rows, tmp_path / f"{script}.parquet")), "--json"
        )
        assert code == 0, stderr
    assert {path.name for path in (tmp_path / "sets").glob("*.jsonl")} == {"aime-2024.jsonl", "dapo-math-17k.jsonl"}
    assert json.loads(stdout)["contamination"], "training rows are compared with the evaluation set beside them"
