"""The shipped rows: how many there are, and that held-out problems were never trained on."""

import json
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
DATA = REPOSITORY / "strands_rollout/data"
TRAINING = REPOSITORY / "strands_rollout/engine/checkpoint/training.json"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def questions(name: str) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows(name)]


def test_shipped_data_has_promised_sizes() -> None:
    assert len(rows("demo.jsonl")) == 256
    assert len(rows("train.jsonl")) >= 2000
    assert (DATA / "train.jsonl").stat().st_size < 1_000_000


def test_shipped_data_held_out_shares_no_numbers(shipped_model: Any) -> None:
    plan = json.loads(TRAINING.read_text())["plan"]
    sizes = [plan[key] for key in ("held_out_rows", "validation_rows", "problems")]
    split = shipped_model("problems").split_problems(plan["seed"], *sizes)
    assert [problem.question for problem in split.held_out] == questions("demo.jsonl")
    assert [problem.question for problem in split.training[: plan["training_rows"]]] == questions("train.jsonl")
    keys = [{problem.key for problem in part} for part in (split.held_out, split.validation, split.training)]
    assert not keys[0] & (keys[1] | keys[2])
    assert not keys[1] & keys[2]


def test_shipped_data_follows_from_its_seed(shipped_model: Any, tmp_path: Path) -> None:
    plan = json.loads(TRAINING.read_text())["plan"]
    split = shipped_model("problems").split_problems(plan["seed"], plan["held_out_rows"], 0, 0)
    rows_of = shipped_model("word_problems").WORD_PROBLEMS.rows_of
    shipped_model("task").write_rows(rows_of(split.held_out), tmp_path / "demo.jsonl")
    assert (tmp_path / "demo.jsonl").read_bytes() == (DATA / "demo.jsonl").read_bytes()
