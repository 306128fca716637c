"""Questions in the layouts of Search-R1 and FlashRAG, prepared from files and from the hub."""

import json
from pathlib import Path
from typing import Any

import pytest
from prep_support import lines_of, write_parquet
from stand_in_hub import REVISION, served
from test_hub import in_a_process

from strands_rollout.environments.question_answering import label_answers

SCRIPT = "question_answering.py"


def search_r1_row(number: int, source: str = "nq", **more: Any) -> dict[str, Any]:
    """Return an invented row in the layout of Search-R1's data set, whose prompt has another agent's instruction."""
    question, answers = f"which ferry crosses lake {number}", [f"Ferry {number}", f"The {number}"]
    return {
        "id": f"train_{number}",
        "question": question,
        "golden_answers": answers,
        "data_source": source,
        "prompt": [{"role": "user", "content": f"Answer with <search> tags. Question: {question}?"}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": answers}, "style": "rule"},
        "extra_info": {"index": number, "split": "train"},
        **more,
    }


def test_question_answering_writes_questions_and_answers(main, tmp_path: Path) -> None:
    again = search_r1_row(9, question="Which ferry crosses lake 1?")
    rows = [search_r1_row(1), search_r1_row(2, "hotpotqa"), again, search_r1_row(3, "popqa")]
    parquet, out = write_parquet(rows, tmp_path / "source.parquet"), tmp_path / "out.jsonl"
    given = ("--from", str(parquet), "--out", str(out), "--only", "nq,hotpotqa", "--json")
    code, stdout, stderr = main(SCRIPT, *given)
    assert code == 0, stderr
    facts = json.loads(stdout)
    assert (facts["rows"], facts["duplicates_removed"]) == (2, 1)
    assert facts["rows_by_source"] == {"nq": 1, "hotpotqa": 1}
    assert {"out": str(out), **json.loads(Path(f"{out}.manifest.json").read_text())} == facts
    first, second = lines_of(out)
    assert first == {
        "prompt": [{"role": "user", "content": "which ferry crosses lake 1"}],
        "label": ["Ferry 1", "The 1"],
        "metadata": {"data_source": "nq", "id": "train_1"},
    }
    assert second["metadata"]["data_source"] == "hotpotqa"
    assert label_answers(first["label"]) == ["Ferry 1", "The 1"]


def test_question_answering_leaves_out_held_out_questions(main, tmp_path: Path) -> None:
    source = write_parquet([search_r1_row(number) for number in range(40)], tmp_path / "source.parquet")
    held_out, out = tmp_path / "held-out.jsonl", tmp_path / "out.jsonl"
    sample = ("--limit", "10", "--seed", "3")
    assert main(SCRIPT, "--from", str(source), "--out", str(held_out), *sample)[0] == 0
    code, stdout, _ = main(SCRIPT, "--from", str(source), "--out", str(out), "--against", str(held_out))
    assert (code, "30 rows (nq 30)" in stdout, "10 in --against" in stdout) == (0, True, True)
    questions = [{row["prompt"][0]["content"] for row in lines_of(path)} for path in (held_out, out)]
    assert ([len(found) for found in questions], questions[0] & questions[1]) == ([10, 30], set())
    assert [row["metadata"]["id"] for row in lines_of(held_out)] != [f"train_{number}" for number in range(10)]


def test_question_answering_refuses_unprepared_against_file(main, tmp_path: Path) -> None:
    source = write_parquet([search_r1_row(1)], tmp_path / "source.parquet")
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "?"}\n', encoding="utf-8")
    arguments = ("--from", str(source), "--out", str(tmp_path / "out.jsonl"), "--against", str(other))
    code, _, stderr = main(SCRIPT, *arguments)
    assert code == 1
    assert f"{other}:1: got " in stderr
    assert "expected a prepared row" in stderr


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        ([{"prompt": "?", "label": "x"}], (), "no column question and no column golden_answers: got prompt, label"),
        ([search_r1_row(1), search_r1_row(2, golden_answers=[" "])], (), "1 rows have no question or no answer"),
        ([search_r1_row(1)], ("--only", "musique"), "The values of data_source: nq"),
    ],
)
def test_question_answering_refuses_other_rows(main, tmp_path: Path, rows, arguments, message) -> None:
    source, out = write_parquet(rows, tmp_path / "source.parquet"), tmp_path / "out.jsonl"
    code, _, stderr = main(SCRIPT, "--from", str(source), "--out", str(out), *arguments)
    assert (code, out.exists()) == (1, False)
    assert message in " ".join(stderr.split())


def test_question_answering_reads_flashrag_from_the_hub(tmp_path: Path) -> None:
    rows = [{"id": f"dev_{n}", "question": f"who built pier {n}?", "golden_answers": [f"Ann {n}"]} for n in range(3)]
    file = tmp_path / "dev.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = tmp_path / "README.md"
    paths = [{"split": "dev", "path": "hotpotqa/dev.jsonl"}]
    card.write_text(f"---\nconfigs: {json.dumps([{'config_name': 'hotpotqa', 'data_files': paths}])}\n---\n")
    out = tmp_path / "out.jsonl"
    chosen = ("--dataset", "someone/flashrag", "--config", "hotpotqa", "--split", "dev", "--out", str(out), "--json")
    with served("someone/flashrag", {"README.md": card, "hotpotqa/dev.jsonl": file}) as hub:
        code, stdout, stderr = in_a_process(tmp_path / "home", SCRIPT, *chosen, "--mirror", hub.base_url)
    assert code == 0, stderr
    facts = json.loads(stdout)
    assert (facts["revision"], facts["rows_by_source"]) == (REVISION, {"hotpotqa": 3})
    assert lines_of(out)[2]["prompt"][0]["content"] == "who built pier 2?"
